"""The page in a real browser. Skipped where there is no Chromium or no driver for it.

    apt-get install chromium; pip install -e '.[test,browser]'

K3FUSE_CHROMIUM names a browser that is not on the path.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3fuse.rewriter.html.page import page as page_of
from reports import full_size, small

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'"
)
CHROMIUM = os.environ.get("K3FUSE_CHROMIUM") or next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))),
    None,
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here"),
    pytest.mark.xdist_group("browser"),
]

OPENS_WITHIN = 1000  # milliseconds from navigation to the end of the load event
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pages = {"full": page_of(full_size()), "refused": page_of(small(plan=False))}
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in pages}


class Opened:
    """A page, with what the browser said and asked for."""

    def __init__(self, context: Any, file: Path, fragment: str = "") -> None:
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(file.as_uri() + fragment)


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Opened]:
    """The full-size page; no console message and no request may be left behind."""
    context = browser.new_context(viewport=WIDE)
    found = Opened(context, files["full"])
    yield found
    context.close()
    assert found.said == []
    assert [url for url in found.asked if not url.startswith(("file:", "data:"))] == []


def test_it_opens_fast(opened: Opened) -> None:
    timing = opened.page.evaluate(
        "() => { const [t] = performance.getEntriesByType('navigation');"
        " return [t.duration, t.loadEventEnd - t.startTime]; }"
    )
    assert 0 < timing[1] < OPENS_WITHIN, timing
    assert opened.page.locator("#grid a.cell").count() == 464
    assert opened.page.locator("#groups").is_hidden()


def test_a_site_opens_with_pictures_diff_guards_and_lines(opened: Opened) -> None:
    page = opened.page
    page.click("a.cell[data-site='L057-output_projection']")
    viewer = page.locator("#viewer")
    assert viewer.is_visible()
    assert page.inner_text("#viewer-title") == "output_projection, layer 57: found"
    assert viewer.locator("svg.pic").count() == 2
    before, after = (viewer.locator("svg.pic").nth(i).bounding_box() for i in (0, 1))
    assert before["x"] < after["x"]  # side by side
    assert abs(before["y"] - after["y"]) < 40
    assert viewer.locator("svg.pic .gone").count() >= 10
    assert viewer.locator("svg.pic .new").count() >= 1
    assert "k3fuse.output_projection_attn_res(" in viewer.locator(".diff .add").all_inner_texts()[0]
    assert viewer.locator(".diff .del").count() > 10
    assert "K*TP = 12288" in viewer.locator(".guards").inner_text()
    assert "self.o_proj" in viewer.locator("article").inner_text()
    assert page.url.endswith("#L057-output_projection")


def test_pictures_that_are_shared_are_drawn_in_every_site(opened: Opened) -> None:
    page = opened.page
    for name in ("L000-attn_res", "L012-output_projection", "L092-experts", "final-attn_res"):
        page.evaluate(f"document.querySelector(\"a.cell[data-site='{name}']\").click()")
        assert page.locator("#viewer svg.pic").count() == 2, name


def test_search_finds_layer_57(opened: Opened) -> None:
    page = opened.page
    page.fill("#search", "57")
    assert page.inner_text("#hits") == "5 sites"
    assert {t.split()[0] for t in page.locator("#results a").all_inner_texts()} == {"57"}
    assert page.locator("a.cell.hit").count() == 5
    page.fill("#search", "57 router")
    assert page.inner_text("#hits") == "1 site"
    page.press("#search", "Enter")
    assert page.inner_text("#viewer-title") == "router, layer 57: found"
    page.fill("#search", "sharded_front_route")
    assert page.inner_text("#hits") == "92 sites"
    page.fill("#search", "nothing like it")
    assert page.inner_text("#hits") == "0 sites"


def test_keys(opened: Opened) -> None:
    page = opened.page

    def focused() -> str:
        return str(
            page.evaluate("document.activeElement.dataset.site ?? document.activeElement.id")
        )

    page.keyboard.press("/")
    assert focused() == "search"
    page.keyboard.press("Escape")
    page.locator("#grid a.cell").first.focus()
    first = focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert focused() == "L001-output_projection", first
    page.keyboard.press("Enter")
    assert page.inner_text("#viewer-title") == "output_projection, layer 1: found"
    assert focused() == "viewer"
    page.keyboard.press("n")
    assert page.inner_text("#viewer-title") != "output_projection, layer 1: found"
    page.keyboard.press("p")
    assert page.inner_text("#viewer-title") == "output_projection, layer 1: found"
    page.keyboard.press("Escape")
    assert page.locator("#viewer").is_hidden()
    assert focused() == "L001-output_projection"
    # One stop of the tab key for the whole grid.
    assert page.locator("#grid a.cell[tabindex='0']").count() == 1


def test_tabs(opened: Opened) -> None:
    page = opened.page
    for name, text in (
        ("layers", "Computed, not measured."),
        ("ranks", "digest of the sites"),
        ("why", "Every site was rewritten"),
        ("about", "k3fuse.report/2"),
    ):
        page.click(f"#tab-{name}")
        assert text in page.inner_text(f"#{name}")
        assert page.locator("section[data-tab]:visible").count() == 1
    page.keyboard.press("ArrowRight")
    assert page.locator("#sites").is_visible()


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_light_and_dark(opened: Opened, browser: Any, files: dict[str, Path]) -> None:
    page = opened.page
    assert background(page) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert background(page) == "rgb(13, 17, 23)"
    page.reload()
    assert background(page) == "rgb(13, 17, 23)"  # kept
    page.keyboard.press("t")
    assert background(page) == "rgb(255, 255, 255)"
    for script in (True, False):
        context = browser.new_context(color_scheme="dark", java_script_enabled=script)
        other = context.new_page()
        other.goto(files["refused"].as_uri())
        if script:
            assert background(other) == "rgb(13, 17, 23)"
        assert other.locator("h1").is_visible()
        context.close()


def test_without_a_script_the_summary_and_the_sites_are_there(
    browser: Any, files: dict[str, Path]
) -> None:
    context = browser.new_context(java_script_enabled=False, viewport=WIDE)
    page = context.new_page()
    page.goto(files["full"].as_uri())
    assert re.search(r"router\s+92\s+92\s+0\s+0", page.inner_text(".counts"))
    assert page.locator("#grid a.cell").count() == 464
    assert page.locator("#search").is_hidden()
    assert page.locator("#layers table").first.is_visible()
    page.locator("details.group summary").first.click()
    assert page.locator("details.group article").first.is_visible()
    context.close()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["full", "refused"])
def test_nothing_is_wider_than_the_screen(
    browser: Any, files: dict[str, Path], size: dict[str, int], name: str
) -> None:
    context = browser.new_context(viewport=size)
    found = Opened(context, files[name], "#L003-output_projection")
    for tab in ("sites", "why", "layers", "ranks", "about"):
        if tab != "sites":
            found.page.click(f"#tab-{tab}")
        wide = found.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], tab
    assert found.said == []
    context.close()


def test_it_prints(opened: Opened) -> None:
    opened.page.emulate_media(media="print")
    assert opened.page.locator("section[data-tab]:visible").count() == 5
    assert opened.page.locator("#tabs").is_hidden()
    assert len(opened.page.pdf()) > 20_000


def violations(page: Any) -> list[str]:
    """Serious and critical findings of axe-core on what can be seen."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install '.[browser]'"
    )
    context = {"exclude": [["#groups"], ["section[data-tab]:not(.open)"]]}
    found = axe.Axe().run(page, context=context, options={"resultTypes": ["violations"]})
    return [
        f"{v['id']}: {[n['html'][:90] for n in v['nodes'][:2]]}"
        for v in found.response["violations"]
        if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize(
    ("name", "theme", "tabs"),
    [
        ("full", "light", ("sites", "layers")),
        ("refused", "light", ("why", "ranks", "about")),
        ("refused", "dark", ("sites", "why", "layers")),
    ],
)
def test_axe_finds_nothing_serious(
    browser: Any, files: dict[str, Path], name: str, theme: str, tabs: tuple[str, ...]
) -> None:
    context = browser.new_context(viewport=WIDE, color_scheme=theme)
    found = Opened(context, files[name], "#L003-output_projection")
    for tab in tabs:
        if tab != "sites":
            found.page.click(f"#tab-{tab}")
        assert violations(found.page) == [], tab
    context.close()


def test_axe_notices_a_fault(browser: Any, files: dict[str, Path]) -> None:
    context = browser.new_context(viewport=WIDE)
    found = Opened(context, files["refused"])
    found.page.evaluate("document.body.append(document.createElement('button'))")
    assert any(v.startswith("button-name") for v in violations(found.page))
    context.close()

"""The page without a browser: structure, names, contrast, size, escaping, and what it says."""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest
from click.testing import CliRunner

from k3fuse.rewriter.cli import main
from k3fuse.rewriter.html.content import content, span
from k3fuse.rewriter.html.page import FOLDER, page, share, size
from reports import LAYER, dumped, full_size, small

MOST_BYTES = 2_000_000
MOST_SECONDS = 5.0


@lru_cache(maxsize=1)
def full_page() -> str:
    return page(full_size())


@lru_cache(maxsize=1)
def refused_page() -> str:
    return page(small(plan=False))


def tree(text: str) -> Element:
    """Parse as a browser does; any error of nesting or syntax raises."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    found: Element = parser.parse(text)
    for element in found.iter():
        element.tag = str(element.tag).rpartition("}")[2]  # SVG has a namespace of its own
    return found


@lru_cache(maxsize=1)
def full_tree() -> Element:
    return tree(full_page())


@lru_cache(maxsize=1)
def refused_tree() -> Element:
    return tree(refused_page())


def classes(element: Element) -> set[str]:
    return set((element.get("class") or "").split())


def words(element: Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


@pytest.fixture(scope="module", params=["full", "refused"])
def root(request: pytest.FixtureRequest) -> Element:
    return full_tree() if request.param == "full" else refused_tree()


# --- structure ----------------------------------------------------------------------------------


def test_a_wrong_nesting_is_noticed() -> None:
    with pytest.raises(html5lib.html5parser.ParseError):
        tree(refused_page().replace("</section>", "</div></section>", 1))


def test_ids_are_unique(root: Element) -> None:
    ids = Counter(e.get("id") for e in root.iter() if e.get("id"))
    assert [name for name, n in ids.items() if n > 1] == []
    assert {"sites", "why", "layers", "ranks", "about", "search", "grid", "viewer"} <= set(ids)


def test_links_and_references_lead_somewhere(root: Element) -> None:
    ids = {e.get("id") for e in root.iter() if e.get("id")}
    links = [e.get("href", "") for e in root.iter("a")]
    assert len(links) > 10
    assert [x for x in links if not x.startswith("#") or x[1:] not in ids] == []
    for name in ("aria-labelledby", "aria-describedby", "for"):
        assert {e.get(name) for e in root.iter() if e.get(name)} <= ids, name


def test_everything_has_a_name(root: Element) -> None:
    """Fields have labels; links, buttons, pictures, scrolling parts and tables have texts."""
    labelled = {e.get("for") for e in root.iter("label")}
    assert all(e.get("id") in labelled for e in root.iter("input"))
    for tag in ("a", "button", "summary", "th", "h1", "h2", "h4"):
        for element in root.iter(tag):
            assert words(element) or element.get("aria-label"), tag
    pictures = [e for e in root.iter("svg") if "pic" in classes(e)]
    assert pictures
    assert all(e.get("role") == "img" and e.get("aria-label") for e in pictures)
    scrolling = [e for e in root.iter() if e.get("tabindex") == "0"]
    assert scrolling
    assert all(e.get("aria-label") for e in scrolling)
    assert all(e.find(".//th[@scope='col']") is not None for e in root.iter("table"))


def test_headings_follow_each_other(root: Element) -> None:
    levels = [int(e.tag[1]) for e in root.iter() if re.fullmatch(r"h[1-6]", str(e.tag))]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = full_page()
    outside = re.findall(r"(?:https?:)?//[\w.-]+", text.replace("http://www.w3.org/2000/svg", ""))
    assert [x for x in outside if "." in x.strip("/")] == []
    root = full_tree()
    assert [e.tag for e in root.iter() if e.get("src")] == []
    assert [e.get("href") for e in root.iter("link")] == ["data:,"]
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?!#)", text)


# --- colours ------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05), the lighter first."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    text = (FOLDER / "style.css").read_text()
    light = text[text.index(":root {") : text.index(':root[data-theme="dark"]')]
    dark = text[text.index(':root[data-theme="dark"]') : text.index("/*DARK*/")]
    colour = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
    return {"light": dict(colour.findall(light)), "dark": dict(colour.findall(dark))}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(theme: str) -> None:
    """4.5 for text (level AA), 3 for lines and bars that carry meaning."""
    colours = themes()[theme]
    pairs = [n.removesuffix("-bg") for n in colours if n.endswith("-bg")]
    assert len(pairs) >= 12
    for name in pairs:
        found = contrast(colours[f"{name}-bg"], colours[f"{name}-fg"])
        assert found >= 4.5, (theme, name, found)
    for name in ("focus", "gone-line", "new-line", "box-line", "bar-before", "bar-after"):
        assert contrast(colours[name], colours["page-bg"]) >= 3, (theme, name)


def test_both_themes_have_the_same_colours() -> None:
    found = themes()
    assert set(found["light"]) == set(found["dark"])
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") < 4.5


# --- what it says -------------------------------------------------------------------------------


def test_the_summary_is_there_without_a_script() -> None:
    root = full_tree()
    counts = next(e for e in root.iter("table") if "counts" in classes(e))
    rows = [[words(c) for c in row] for row in counts.iter("tr")]
    assert ["attention_projection", "93", "93", "0", "0", "stream_gemm"] in rows
    cells = [e for e in root.iter("a") if "cell" in classes(e)]
    assert len(cells) == 464
    assert Counter(words(e) for e in cells) == {"F": 464}
    assert {e.get("aria-label") for e in cells} >= {"layer 57, router: found"}
    names = {e.get("data-site") for e in cells}
    assert {"L057-router", "L000-attn_res", "final-attn_res"} <= names
    needs = [e for e in root.iter() if "needs-script" in classes(e)]
    assert {e.get("id") for e in needs} >= {"search", "theme", "viewer"}


def test_colour_is_not_alone() -> None:
    root = refused_tree()
    cells = [e for e in root.iter("a") if "cell" in classes(e)]
    assert {words(e) for e in cells} == {"F", "N", "R"}
    heads = [e for e in full_tree().iter("text") if "h" in classes(e)]
    marks = {(e.text or "")[:2] for e in heads}
    assert {"- ", "+ "} <= marks


def test_size_and_time_for_93_layers() -> None:
    document = full_size()
    start = time.process_time()
    text = page(document)
    assert time.process_time() - start < MOST_SECONDS
    assert 300_000 < len(text.encode()) < MOST_BYTES


def test_equal_sites_share_a_picture() -> None:
    found = content(full_size())
    assert len(found["index"]) == 464
    # Experts differ by the blocks that the AttnRes in their op reads.
    assert len(found["groups"]) < 80
    drawn = sum(bool(p["svg"]) for g in found["groups"] for p in g["pictures"].values())
    assert drawn == len(full_size()["graphs"])


def test_every_refused_site_has_its_reason_and_fix() -> None:
    root = refused_tree()
    why = next(e for e in root.iter("section") if e.get("id") == "why")
    text = words(why)
    report = small(plan=False)
    assert Counter(s["outcome"] for s in report["sites"]) == {"found": 4, "near": 1, "refused": 1}
    refused = [s for s in report["sites"] if s["outcome"] == "refused"]
    assert [s["pattern"] for s in refused] == ["experts"]
    for site in refused:
        assert site["reasons"][0]["code"] in text
        assert site["reasons"][0]["hint"] in text
    assert "Every site was rewritten" in words(
        next(e for e in full_tree().iter("section") if e.get("id") == "why")
    )


def test_guards_show_expected_and_actual() -> None:
    report = small(plan=False)
    report["sites"][1]["guards"][1].update(passed=False, actual="K = 128")
    root = tree(page(report))
    failed = [e for e in root.iter("tr") if "failed" in classes(e)]
    assert [words(c) for c in failed[0]][:3] == ["FAIL", "K = 7168", "K = 128"]
    assert len(failed) == 1


def test_a_built_kernel_shows_its_launch() -> None:
    report = small()
    row = {"grid": [149, 1, 1], "cluster": [7, 1, 1], "registers": 96, "smem_bytes": 65536}
    report["sites"][0]["built"] = {"fused_m8": row}
    text = words(tree(page(report)))
    for part in ("fused_m8", "grid 149 × 1 × 1", "registers 96", "smem bytes 65536"):
        assert part in text
    assert "149 × 1" not in words(tree(page(small())))


def test_bytes_are_labelled_as_computed() -> None:
    root = full_tree()
    layers = next(e for e in root.iter("section") if e.get("id") == "layers")
    text = words(layers)
    assert "Computed, not measured." in text
    assert "8 TB/s" in text
    assert "launches after" in text
    assert len(list(layers.iter("table"))) == len(full_size()["layers"]) == 5
    assert "floor 5" in text


def test_ranks_are_compared() -> None:
    first, second, third = (copy.deepcopy(small()) for _ in range(3))
    for rank, document in enumerate((first, second, third)):
        document.update(rank=rank, world=3)
    assert "All 3 ranks chose the same sites" in page(first, [second, third])
    second["site_hash"] = "0" * 16
    text = page(first, [third, second])
    assert "Ranks disagree" in text
    assert "One rank of 3 is shown" in page(first)


def test_texts_are_escaped() -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
    report = small(plan=False)
    report.update(source=evil, notes=[evil], options={"log": evil})
    place = next(i for i, s in enumerate(report["sites"]) if s["reasons"])
    site = report["sites"][place]
    site.update(form=evil, anchor=evil, frames=[evil], lines=[evil, evil], kernel=evil)
    site["reasons"][0].update(sentence=evil, hint=evil, expected=evil, actual=evil, nodes=[])
    site["guards"][0].update(guard=evil, actual=evil, why=evil)
    for piece in report["graphs"].values():
        for node in piece["nodes"]:
            node.update(text=evil, value=evil, op=evil)
    text = page(report)
    root = tree(text)
    assert [e.tag for e in root.iter("img")] == []
    assert "<img" not in text
    assert len(list(root.iter("script"))) == 2
    assert "49" not in words(next(root.iter("h1")))
    index = next(e for e in root.iter("script") if e.get("id") == "index")
    assert json.loads(index.text or "")[place]["a"] == evil


def test_a_report_without_graphs_says_so() -> None:
    report = small()
    report.update(graphs={}, layers=[])
    text = words(tree(page(report)))
    assert "The report has no graph of it" in text
    assert "The report has no bytes" in text


def test_a_graph_without_sites() -> None:
    report = small()
    report.update(sites=[], graphs={}, layers=[])
    assert "No site and no near miss" in words(tree(page(report)))


@pytest.mark.parametrize(
    ("layers", "text"),
    [([1, 2, 3, 5], "1-3, 5"), ([7], "7"), ([None, 4], "4, final"), ([3, 3, 2], "2-3"), ([], "")],
)
def test_spans(layers: list[int | None], text: str) -> None:
    assert span(layers) == text


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1000, 90_358_064, 538e6, 6.77e10)] == [
        "0 B", "999 B", "1.0 KB", "90.4 MB", "538 MB", "67.7 GB",
    ]  # fmt: skip
    assert [share(a, 200.0) for a in (0, 0.1, 100, 900)] == ["0", "0.4", "50.0", "100.0"]


# --- the commands -------------------------------------------------------------------------------


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_html_of_a_dump(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = call("html", dumped(tmp_path / "dump"), "-o", out)
    assert result.exit_code == 0, result.output
    assert out.read_text() == full_page()
    assert str(out) in "".join(result.stdout.split("\n"))
    document = json.loads(call("html", tmp_path / "dump", "-o", out, "--json").stdout)
    assert document["bytes"] == out.stat().st_size


def test_html_of_several_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "dump" / f"rank_{rank:03d}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({**small(), "rank": rank, "world": 2}))
    out = tmp_path / "report.html"
    assert call("html", tmp_path / "dump", "-o", out).exit_code == 0
    assert "All 2 ranks chose the same sites" in out.read_text()


def test_inspect_writes_the_page_too(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = call("inspect", LAYER, "--plan", "--json", "--html", out)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["graphs"]
    assert "k3fuse.output_projection_attn_res" in out.read_text()


def test_html_of_nothing_is_wrong_use(tmp_path: Path) -> None:
    result = call("html", tmp_path, "-o", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "has no summary.json" in result.stderr
    assert not (tmp_path / "report.html").exists()

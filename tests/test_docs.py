"""The docs against the code: generated parts, links, pages, commands and examples."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.rewriter.cli import main as command
from k3fuse.rewriter.inspecting import inspect_source
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.reasons import HINTS, Code

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_generated_parts_are_up_to_date(page: Path, generate: ModuleType) -> None:
    text = page.read_text()
    assert generate.render(text) == text, "run: python docs/generate.py"


def test_a_stale_part_is_noticed(generate: ModuleType) -> None:
    text = (DOCS / "patterns" / "router.md").read_text()
    stale = text.replace("`E = 896`", "`E = 895`")
    assert stale != text
    assert generate.render(stale) == text


def test_an_unknown_generated_part_is_an_error(generate: ModuleType) -> None:
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        generate.render("<!-- generated: nothing at all -->\n<!-- end generated -->")


# --- links --------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Heading anchors of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_broken_links_are_noticed() -> None:
    index = DOCS / "index.md"
    text = "[a](options.md) [b](nowhere.md) [c](index.md#patterns) [d](#none) [e](https://x.org)"
    assert broken(index, text) == ["nowhere.md", "#none"]


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = [k.partition("#")[0] for k in _LINK.findall(_FENCE.sub("", page.read_text()))]
        todo += [(page.parent / k).resolve() for k in links if k and not re.match(r"[a-z]+:", k)]
    assert {p.resolve() for p in PAGES} - seen == set()


# --- pages --------------------------------------------------------------------------------------


def test_every_code_has_a_page_and_a_fix() -> None:
    pages = {p.stem for p in (DOCS / "reasons").glob("*.md")} - {"README"}
    assert pages == {c.value for c in Code}
    assert set(HINTS) == set(Code)
    for code in Code:
        text = (DOCS / "reasons" / f"{code}.md").read_text()
        assert text.startswith(f"# {code}\n"), code
        meaning = text.split("\n\n")[1]
        assert len(meaning) > 40, f"{code} has no meaning"


def test_every_code_that_is_given_has_an_example() -> None:
    reserved = {c for c in Code if "Reserved:" in (DOCS / "reasons" / f"{c}.md").read_text()}
    source = "".join(
        p.read_text()
        for folder in ("rewriter", "patterns")
        for p in (ROOT / folder).rglob("*.py")
        if p.name != "reasons.py"
    )
    given = {c for c in Code if f"Code.{c.name}" in source}
    assert reserved == set(Code) - given
    for code in given:
        assert "```text\n" in (DOCS / "reasons" / f"{code}.md").read_text(), code


@pytest.mark.parametrize("code", list(Code), ids=str)
def test_every_code_has_a_fix_to_copy(code: Code) -> None:
    """A section with a sentence, and a diff of model or command where the code is given today."""
    text = (DOCS / "reasons" / f"{code}.md").read_text()
    fix = text.partition("\n## Fix\n")[2].partition("\n<!-- generated: hint")[0]
    assert len(fix.strip()) > 20
    if "Reserved:" not in text:
        changed = re.findall(r"```diff\n(.*?)```", fix, re.DOTALL)[0].splitlines()
        assert {line[0] for line in changed} >= {"-", "+"}
    assert f"Printed fix: {HINTS[code]}." in text


def test_every_pattern_has_a_page() -> None:
    pages = {p.stem for p in (DOCS / "patterns").glob("*.md")}
    assert pages == {p.name for p in load_patterns()}


def test_every_option_is_described(generate: ModuleType) -> None:
    texts = generate.option_texts()
    assert list(texts) == list(Options.__dataclass_fields__)
    assert all(len(t) > 10 for t in texts.values())


# --- commands and examples ----------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """Words of every `$ k3fuse ...` line in a page's console blocks."""
    return [
        shlex.split(x, comments=True)
        for x in re.findall(r"^\$ .*?\b(k3fuse .+)$", page.read_text(), re.M)
    ]


def check_command(words: list[str]) -> None:
    """Parse a shown command with the real one; raises click.UsageError where it would not run."""
    group: click.Command = command
    rest = words[1:]
    context = click.Context(group, **group.context_settings)
    while isinstance(group, click.Group):
        found = group.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]}")
        group, rest = found, rest[1:]
    # Without its parent the command would cache a help option without `-h`.
    group.make_context("k3fuse", list(rest), parent=context)


SHOWN = [(page, words) for page in PAGES for words in commands(page)]


def test_the_docs_show_commands() -> None:
    assert len(SHOWN) >= 8
    assert {w[1] for _, w in SHOWN} >= {"inspect", "explain", "diff", "check", "run"}


@pytest.mark.parametrize(
    ("page", "words"), SHOWN, ids=lambda v: v.name if isinstance(v, Path) else ""
)
def test_shown_commands_are_well_formed(page: Path, words: list[str]) -> None:
    check_command(words)


def test_the_report_in_the_readme_is_true() -> None:
    """Sites by the model's config; kernels and launches from a cut of the same graph."""
    document = inspect_source("kimi-k3", layers=4, plan=True)
    readme = (ROOT / "README.md").read_text()
    kernels: dict[str, set[str]] = {}
    for site in document["sites"]:
        kernels.setdefault(site["pattern"], set()).add(site["kernel"])
    for name, sites in KimiK3Config().expected_sites(93).items():
        row = next(r for r in readme.splitlines() if r.startswith(f"│ {name} "))
        *counts, named = (cell.strip() for cell in row.strip("│").split("│"))
        assert counts == [name, str(sites), str(sites), "0", "0"]
        assert set(named.split(", ")) == kernels[name]
    launches = "KDA {kda_layer}, MLA {mla_layer}".format_map(document["launches"])
    assert f"counted by policy): {launches}" in readme
    assert f"| {launches} |" in readme


def test_a_wrong_command_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        check_command(["k3fuse", "inspect", "kimi-k3", "--wrong"])


def test_the_readme_has_two_commands_with_scripts() -> None:
    shown = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == ["bash docs/first_run.sh", "bash tests/run.sh"]
    for line in shown:
        assert (ROOT / line.split()[1]).is_file()


def example(page: Path) -> str:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return max(blocks, key=len)


def test_the_pattern_example_runs(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(example(DOCS / "writing_a_pattern.md"))
    names = runpy.run_path(str(file))
    # The last run is the control: 65 rows, refused.
    assert names["report"]["patterns"]["silu_mul"] == {
        "expected": None, "found": 0, "near": 0, "refused": 1,
    }  # fmt: skip
    _, accepted = names["run"](rows=8)
    assert accepted["patterns"]["silu_mul"]["found"] == 1


# --- the site -----------------------------------------------------------------------------------


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run mkdocs as CI does; not quietly, which would hide warnings from --strict."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr[-2000:]
    made = {p.relative_to(tmp_path / "site").with_suffix("") for p in tmp_path.rglob("*.html")}
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        assert (name.parent / "index" if name.name == "README" else name) in made, page
    assert (tmp_path / "site" / "img" / "report.png").is_file()
    assert not (tmp_path / "site" / "generate.py").exists()


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nothing"])
def test_a_broken_link_stops_the_build(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "nav.py").write_text((DOCS / "nav.py").read_text())
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "docs" / "index.md").write_text("# Start\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[there]({link})\n")
    assert build(tmp_path, tmp_path / "site").returncode == 1


# --- docs/examples ------------------------------------------------------------------------------

GRAPH = str(ROOT / "tests" / "data" / "vllm_k3" / "layer3_tp8_m8_opaque.json")


def example_main(name: str) -> Any:
    return runpy.run_path(str(DOCS / "examples" / f"{name}.py"))["main"]


def test_every_example_is_listed_and_run() -> None:
    scripts = {p.stem for p in (DOCS / "examples").glob("*.py")}
    assert scripts == {
        "page_of_a_graph",
        "check_in_ci",
        "what_a_target_changes",
        "silu_mul_pattern",
    }
    listed = (DOCS / "examples" / "README.md").read_text()
    assert all(f"]({name}.py)" in listed for name in scripts)


def test_the_page_example(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert example_main("page_of_a_graph")(GRAPH, str(out)) == len(out.read_text())
    assert "k3fuse.output_projection_attn_res" in out.read_text()


def test_the_ci_example(capsys: pytest.CaptureFixture[str]) -> None:
    main = example_main("check_in_ci")
    assert main(GRAPH, "router=1", "experts=1") == 0
    assert capsys.readouterr().out == "as expected\n"
    assert main(GRAPH, "router=2") == 1
    assert capsys.readouterr().out == "router: 1 of 2; nothing like it\n"


def test_the_target_example() -> None:
    text = example_main("what_a_target_changes")(GRAPH, "gb300:tp8", "gb300:tp16")
    assert "target: gb300:tp8 -> gb300:tp16" in text
    assert "GROUP_MISMATCH" in text


def test_the_pattern_example_is_the_file_in_the_docs() -> None:
    text = (DOCS / "examples" / "silu_mul_pattern.py").read_text()
    assert text.partition('"""\n\n')[2] == example(DOCS / "writing_a_pattern.md")

"""Write the generated parts of the docs from the code they describe.

    python docs/generate.py            rewrite what is out of date
    python docs/generate.py --check    list what is out of date; exit 1 where anything is

A generated part stands between `<!-- generated: KIND NAME -->` and `<!-- end generated -->`.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from k3fuse.kernels.attention_projection.policy import SHARDED
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.common.registry import OPS
from k3fuse.rewriter import options as options_module
from k3fuse.rewriter.cli import main as command
from k3fuse.rewriter.console import report_text
from k3fuse.rewriter.inspecting import inspect_source
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import Pattern, load_patterns
from k3fuse.rewriter.reasons import HINTS, Code
from k3fuse.rewriter.saved import SavedReport, site_diffs

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_PART = re.compile(r"(<!-- generated: ([^\n]*?) -->\n).*?(<!-- end generated -->)", re.DOTALL)
_LINE = re.compile(r"%(\w+): (.*?) = ([\w.]+)\((.*)\)$")
_NO_DEFAULT = dataclasses.MISSING


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; pipes inside cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |\n" for row in lines)


def pattern(name: str) -> Pattern:
    """Return a pattern by name."""
    return next(p for p in load_patterns() if p.name == name)


def guards(name: str) -> str:
    """Guards of a pattern, in the order they are asked."""
    scopes = {
        "always": "every target", "kernel": "hardware targets",
        "row_sharded": "hardware targets with `row_sharded`",
    }  # fmt: skip
    rows = []
    for guard in pattern(name).guards:
        asked = scopes[guard.scope]
        proof = "proved" if guard.proof == "static" else "in range; run time decides"
        link = f"[{guard.code}](../reasons/{guard.code}.md)"
        rows.append([f"`{guard.text}`", guard.why or "-", asked, proof, link])
    return table(["condition", "because", "asked of", "must be", "otherwise"], rows)


def summary(name: str) -> str:
    """One line on a pattern."""
    found = pattern(name)
    return f"`{name}`: {found.summary}. Priority {found.priority}.\n"


def policy(name: str) -> str:
    """Which kernel serves which token count on GB300."""
    return policy_table(OPS[name].table)


def sharded(_: str) -> str:
    """The same for rows that the ranks split."""
    return policy_table(SHARDED)


def policy_table(chosen: Table) -> str:
    """Rows of both GB300 targets, in one column where they name the same kernels."""
    eight, sixteen = (chosen.rows[f"gb300:tp{ranks}"] for ranks in (8, 16))
    alike = [r.kernel for r in eight] == [r.kernel for r in sixteen]
    rows = []
    for row, other in zip(eight, sixteen, strict=True):
        names = [r.kernel or r.planned for r in ((row,) if alike else (row, other))]
        hops = list(dict.fromkeys(str(r.hops) for r in (row, other)))
        state = "built" if row.kernel and other.kernel else "planned"
        rows.append(
            [f"{row.m_min} to {row.m_max}", *names, str(row.launches), ", ".join(hops), state]
        )
    heads = ["kernel on gb300:tp8 and gb300:tp16"] if alike else ["on gb300:tp8", "on gb300:tp16"]
    return table(["M", *heads, "launches", "hops added", "state"], rows)


def patterns(_: str) -> str:
    """All patterns, highest priority first."""
    found = sorted(load_patterns(), key=lambda p: -p.priority)
    rows = [[f"[{p.name}](patterns/{p.name}.md)", p.summary] for p in found]
    return table(["pattern", "what it covers"], rows)


def hint(name: str) -> str:
    """What to do about a reason code."""
    return f"Printed fix: {HINTS[Code(name)]}.\n"


def askers(name: str) -> str:
    """Guards that give a reason code."""
    rows = []
    for found in load_patterns():
        for guard in found.guards:
            if guard.code == Code(name):
                rows.append([f"[{found.name}](../patterns/{found.name}.md)", f"`{guard.text}`"])
    return table(["pattern", "guard"], rows) if rows else "No guard gives this code.\n"


def codes(_: str) -> str:
    """Every reason code with its fix."""
    return table(["code", "printed fix"], [[f"[{c}]({c}.md)", HINTS[c]] for c in Code])


def option_texts() -> dict[str, str]:
    """Description of each option, from the docstring of Options ("name: text. name: text.")."""
    text = " ".join(inspect.cleandoc(Options.__doc__ or "").split("\n\n", 1)[1].split())
    names = "|".join(f.name for f in dataclasses.fields(Options))
    parts = re.split(rf"(?:^|(?<=\. ))({names}): ", text)
    return {name: found.strip() for name, found in zip(parts[1::2], parts[2::2], strict=True)}


def environment() -> set[str]:
    """Options that an environment variable can set."""
    tree = ast.parse(inspect.getsource(options_module))
    reader = next(
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_environment"
    )
    texts = {n.value for n in ast.walk(reader) if isinstance(n, ast.Constant)}
    return {f.name for f in dataclasses.fields(Options) if f.name in texts}


def options(_: str) -> str:
    """Options of the backend."""
    texts, variables = option_texts(), environment()
    rows = []
    for field in dataclasses.fields(Options):
        made = field.default
        if made is _NO_DEFAULT and field.default_factory is not _NO_DEFAULT:
            made = field.default_factory()
        variable = f"`K3FUSE_{field.name.upper()}`" if field.name in variables else "-"
        rows.append([f"`{field.name}`", f"`{made!r}`", variable, texts[field.name]])
    return table(["option", "default", "environment", "meaning"], rows)


def commands(_: str) -> str:
    """Commands of the command line."""
    rows = []

    def add(group: click.Group, prefix: str) -> None:
        context = click.Context(group, **group.context_settings)
        own = list(group.commands)
        for name in [*own, *(n for n in group.list_commands(context) if n not in own)]:
            found = group.get_command(context, name)
            if found is None:
                raise ValueError(f"command {name!r} does not load")
            if isinstance(found, click.Group):
                add(found, f"{prefix} {name}")
                continue
            arguments = " ".join(
                p.human_readable_name.upper() for p in found.params if isinstance(p, click.Argument)
            )
            flags = ", ".join(
                f"`{p.opts[-1] if p.name == 'output' else p.opts[0]}`"
                for p in found.params
                if isinstance(p, click.Option) and p.name not in ("as_json", "output")
            )
            text = inspect.cleandoc(found.help or "").split("\n\n")[0].replace("\n", " ")
            rows.append([f"`{prefix} {name} {arguments}`".replace(" `", "`"), text, flags or "-"])

    add(command, "k3fuse")
    return table(["command", "does", "options"], rows)


@lru_cache
def dumped(name: str) -> tuple[Path, dict[str, Any]]:
    """Rewrite a captured graph and dump it; the folder and the graph file's document."""
    file = ROOT / "tests" / "data" / "vllm_k3" / f"{name}.json"
    folder = Path(tempfile.mkdtemp(prefix="k3fuse_docs_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    inspect_source(str(file), plan=True, dump=folder)
    return folder, json.loads(file.read_text())


def diff(name: str) -> str:
    """Text diff of one site: "GRAPH PATTERN"."""
    graph, site = name.split()
    folder, _ = dumped(graph)
    saved = SavedReport.load(folder).filtered(site, None)
    return f"```diff\n{site_diffs(folder, saved)[0]['diff']}```\n"


def report(name: str) -> str:
    """Report of a planned rewrite, its time left out: "SOURCE" or "SOURCE LAYERS"."""
    source, *layers = name.split()
    source = str(ROOT / source) if source.endswith(".json") else source
    saved = SavedReport(
        inspect_source(source, plan=True, layers=int(layers[0]) if layers else None)
    )
    console = Console(width=150, force_terminal=False)
    with console.capture() as capture:
        for part in report_text(saved):
            console.print(part, highlight=False)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    text = re.sub(r"rewritten in [\d.]+ s", "rewritten in ... s", "\n".join(lines))
    return f"```text\n{text}\n```\n"


def flowchart(lines: list[str], labels: dict[str, str], prefix: str) -> list[str]:
    """Mermaid nodes and edges of dumped node lines; tuple elements stand for their tuple."""
    made: dict[str, str] = {}
    drawn: dict[str, None] = {}
    for line in lines:
        name, value, called, rest = _LINE.match(line).groups()  # type: ignore[union-attr]
        operands = re.findall(r"%(\w+)", rest)
        if called == "getitem":
            made[name] = made[operands[0]]
            continue
        inner = re.match(r"([\w.]+)\.default", rest)
        called = inner[1] if called.startswith("auto_functionalized") and inner else called
        made[name] = f"{prefix}_{name}"
        shape = value if "?" not in value and not value.startswith("(") else ""
        text = f"<b>{called}</b>" + (f"<br/>{shape}" if shape else "")
        drawn[f'{made[name]}["{text}"]'] = None
        for operand in dict.fromkeys(operands):
            if operand not in made:
                made[operand] = f"{prefix}_{operand}"
                drawn[f'{made[operand]}(["{labels.get(operand, operand)}"])'] = None
            drawn[f"{made[operand]} --> {made[name]}"] = None
    return list(drawn)


def picture(name: str) -> str:
    """One site before and after as a Mermaid flowchart: "GRAPH PATTERN"."""
    graph, site = name.split()
    folder, document = dumped(graph)
    labels = {n["name"]: short(n["origin"]) for n in document["nodes"] if "origin" in n}
    out = ["flowchart LR"]
    for part in ("before", "after"):
        file = next((folder / "sites").glob(f"*_{site}.{part}.txt"))
        drawn = flowchart(file.read_text().splitlines(), labels, part)
        out += [f"  subgraph {part}", *(f"    {line}" for line in drawn), "  end"]
    return "```mermaid\n" + "\n".join(out) + "\n```\n"


def short(origin: str) -> str:
    """Last two parts of a parameter's path."""
    return ".".join(origin.split(".")[-2:])


def nearmiss(_: str) -> str:
    """What the ledger of near-miss graphs holds."""
    ledger = json.loads((DOCS / "nearmiss_ledger.json").read_text())
    wrong = {name: n for name, n in ledger["problems"].items() if n or name == "false accept"}
    outcomes = ("rewritten", "refused", "absent")
    rows = [
        [family, str(sum(found.values())), *(str(found.get(o, 0)) for o in outcomes)]
        for family, found in sorted(ledger["by_family"].items())
    ]
    defects = ", ".join(
        f"{n}: {sum(found.values()):,}" for n, found in sorted(ledger["defects"].items())
    )
    faults = ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in wrong.items())
    rate = ledger["graphs"] / ledger["seconds"]
    before = [e for e in ledger["earlier"] if e["graphs"]]
    graphs = sum(e["graphs"] for e in before)
    failed = sum(n for e in before for n in e["problems"].values())
    earlier = f" Of earlier code: {failed} failed of {graphs:,}." if before else ""
    return (
        f"**{faults} in {ledger['graphs']:,} graphs** of seed {ledger['seed']} "
        f"({ledger['dates'][-1]}, torch {ledger['versions']['torch']}); the target is 0 in 100,000."
        "\n\n"
        + table(["family", "graphs", "rewritten", "refused with a reason", "no candidate"], rows)
        + f"\n{ledger['compared']:,} of them had a site of some family, so values were compared."
        f" By number of defects: {defects}. {rate:.0f} graphs a second of one core.{earlier}\n"
    )


KINDS: dict[str, Callable[[str], str]] = {
    "guards": guards,
    "summary": summary,
    "policy": policy,
    "sharded": sharded,
    "patterns": patterns,
    "hint": hint,
    "askers": askers,
    "codes": codes,
    "options": options,
    "commands": commands,
    "diff": diff,
    "picture": picture,
    "report": report,
    "nearmiss": nearmiss,
}


def render(text: str) -> str:
    """Return a page with its generated parts made anew. Raises ValueError for an unknown kind."""

    def part(match: re.Match[str]) -> str:
        kind, _, name = match[2].partition(" ")
        if kind not in KINDS:
            raise ValueError(f"generated part {kind!r} is unknown; use one of {', '.join(KINDS)}")
        return f"{match[1]}\n{KINDS[kind](name)}\n{match[3]}"

    return _PART.sub(part, text)


def pages() -> list[Path]:
    """Every Markdown page of the repository's docs, README and CONTRIBUTING included."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Rewrite or check all pages; return the exit code."""
    stale = 0
    for page in pages():
        old = page.read_text()
        new = render(old)
        if new == old:
            continue
        stale += 1
        print(page.relative_to(ROOT))
        if "--check" not in arguments:
            page.write_text(new)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

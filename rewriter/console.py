"""Terminal output: tables from rich, progress on standard error, NO_COLOR and width respected."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from k3fuse.rewriter.reasons import without_node
from k3fuse.rewriter.report import grouped_reasons

if TYPE_CHECKING:
    from k3fuse.rewriter.saved import SavedReport


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on standard error: a live line in a terminal, else one line a step."""
    console = Console(stderr=True)
    if quiet and not console.is_terminal:
        yield lambda _: None
        return
    if console.is_terminal:
        with console.status("start") as status:
            yield status.update
        return
    last = ""

    def say(text: str) -> None:
        nonlocal last
        word = text.split(" layer ")[0]
        if word != last:
            console.print(f"k3fuse: {text} ...", highlight=False)
        last = word

    yield say


def emit(content: Any, output: Path | None) -> None:
    """Write text, a rich renderable or a JSON document to standard output or a file."""
    if isinstance(content, dict):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    elif isinstance(content, str):
        text = content if content.endswith("\n") else content + "\n"
    else:
        plain = output is not None or not sys.stdout.isatty()
        # What is piped or written reads the same everywhere; a terminal's width and NO_COLOR are
        # rich's to find out.
        console = Console(width=150 if plain else None, force_terminal=False if plain else None)
        with console.capture() as capture:
            for part in content:
                console.print(part, highlight=False)
        text = capture.get()
        if plain:  # tables pad their cells
            text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    if output is None:
        sys.stdout.write(text)
    else:
        partial = output.with_name(output.name + ".part")
        partial.write_text(text)
        partial.replace(output)


def report_text(saved: SavedReport) -> list[Any]:
    """Counts, the most frequent reasons, launches."""
    d = saved.document
    plan = ", plan" if d["plan"] else ""
    head = f"{d['source']}, M={d['m']}, target {d['target']}{plan}"
    table = Table(title=head, title_justify="left")
    table.add_column("pattern")
    for name in ("expected", "found", "near", "refused"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for name, count in d["patterns"].items():
        kernels = sorted(
            {s["kernel"] for s in saved.sites if s["pattern"] == name and s["outcome"] == "found"}
        )
        expected = "-" if count["expected"] is None else str(count["expected"])
        row = [str(count[k]) for k in ("found", "near", "refused")]
        table.add_row(name, expected, *row, ", ".join(kernels) or "-")
    parts: list[Any] = [table]
    parts += reasons(saved.sites)[:6]
    parts += [f"note: {note}" for note in d["notes"]]
    counts = d["launches"]
    if any(v is not None for v in counts.values()):
        parts.append(
            "launches a layer after the rewrite (counted by policy): "
            f"KDA {counts['kda_layer']}, MLA {counts['mla_layer']}"
        )
    if ahead := prefetch_text(saved.sites):
        parts.append(ahead)
    nodes = d["nodes"]
    parts.append(
        f"{nodes['before']} -> {nodes['after']} nodes, rewritten in {d['seconds']:.2f} s, "
        f"checked: {d['validated']}"
    )
    return parts


def prefetch_text(sites: list[dict[str, Any]]) -> str:
    """What accepted sites ask for ahead of its readers; "" for nothing."""
    sizes = [s["prefetched_bytes"] for s in sites if s.get("prefetched_bytes")]
    if not sizes:
        return ""
    return f"L2 prefetch: {len(sizes)} sites ask for {sum(sizes)} bytes of later weights on a rank"


def reasons(sites: list[dict[str, Any]]) -> list[str]:
    """Reasons grouped by code, pattern and text, most frequent first."""
    return grouped_reasons(
        (r["code"], site["pattern"], without_node(r["sentence"], r["nodes"]))
        for site in sites
        for r in site["reasons"][:1]
    )


def explain_text(sites: list[dict[str, Any]]) -> list[Any]:
    """One block a refused site or near miss: where, why, expected, actual, fix."""
    if not sites:
        return ["every site was rewritten"]
    parts: list[Any] = []
    for site in sites:
        where = f"layer {site['layer']}" if site["layer"] is not None else "outside the layers"
        parts.append(f"{where}  {site['pattern']}  {site['outcome']}  at {site['anchor']}")
        for reason in site["reasons"]:
            parts.append(f"    {reason['code']}  {reason['sentence']}")
            if reason["expected"]:
                parts.append(f"        expected {reason['expected']}; actual {reason['actual']}")
            parts.append(f"        fix: {reason['hint']}")
    return parts


def bench_text(document: dict[str, Any]) -> list[Any]:
    """Rows of `bench rewrite`."""
    table = Table(
        title=f"rewrite time, {document['target']}, {document['machine']}", title_justify="left"
    )
    names = (
        "layers",
        "nodes",
        "rewrite_seconds",
        "rewrite_cpu_seconds",
        "microseconds_per_node",
        "inductor_pattern_seconds",
        "compile_seconds",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in document["rows"]:
        table.add_row(*("-" if row[n] is None else str(row[n]) for n in names))
    return [table]

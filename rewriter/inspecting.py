"""What `k3fuse inspect` and `k3fuse run` do, callable from Python."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3fuse.rewriter import sources
from k3fuse.rewriter.dump import write_dump
from k3fuse.rewriter.engine import launches, rewrite
from k3fuse.rewriter.graph_text import graph_text
from k3fuse.rewriter.key import factors
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.target import Target


class ScriptError(ValueError):
    """A script that cannot be run."""


def inspect_source(
    source: str,
    *,
    target: str = "gb300:tp8",
    m: int | None = 8,
    plan: bool = False,
    layers: int | None = None,
    form: str = "",
    dump: Path | None = None,
    record: bool = False,
    progress: sources.Progress = lambda _: None,
) -> dict[str, Any]:
    """Rewrite every graph of a source and return the report's document.

    record: keep what the page shows (graph pieces, model lines, bytes), as a dump does.

    Raises SourceError, TargetError, GraphFileError or DumpError, each one line with the fix.
    """
    parsed = Target.parse(target)
    record = record or dump is not None
    request = sources.SourceRequest(parsed, m, layers, form, progress, lines=record)
    graphs = sources.load(source, request)
    merged: Report | None = None
    for number, graph in enumerate(graphs, start=1):
        options = Options.make(
            {
                "target": parsed,
                "plan": plan,
                "groups": graph.groups,
                "expect": graph.expected,
                "first_layer": graph.first_layer,
                "log": "off",
            }
        )
        before = graph_text(graph.module.graph) if dump is not None else ""
        report = rewrite(graph.module, options, source=graph.name, progress=progress, texts=record)
        report.notes += graph.notes
        report.factors = factors(options, load_patterns(), report)
        if dump is not None:
            progress("write dump")
            several = number if len(graphs) > 1 else 0
            write_dump(report, dump, graph.module.graph, before=before, numbered=several)
        merged = report if merged is None else merge(merged, report)
    if merged is None:
        raise sources.SourceError(f"source {source!r} gave no graph")
    return merged.to_json()


def merge(first: Report, second: Report) -> Report:
    """Add the second report's sites, nodes and time to the first."""
    first.sites += second.sites
    first.near += second.near
    first.nodes_before += second.nodes_before
    first.nodes_after += second.nodes_after
    first.seconds += second.seconds
    first.events.update(second.events)
    first.graphs.update(second.graphs)
    first.layers += second.layers
    first.expected = dict(first.expected) or dict(second.expected)
    first.launches = launches(first)
    return first


def run_script(script: Path, arguments: Sequence[str], *, dry_run: bool) -> dict[str, Any] | None:
    """Run a script in this process; its graphs' merged report, or None where none was compiled.

    Raises ScriptError where the script does not exist.
    """
    from k3fuse.rewriter import backend

    if not script.is_file():
        raise ScriptError(f"script {str(script)!r} does not exist")
    backend.reset_reports()
    argv, environment = list(sys.argv), os.environ.get("K3FUSE_DRY_RUN")
    sys.argv = [str(script), *arguments]
    os.environ["K3FUSE_DRY_RUN"] = "1" if dry_run else "0"
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
        sys.path.pop(0)
        if environment is None:
            os.environ.pop("K3FUSE_DRY_RUN", None)
        else:
            os.environ["K3FUSE_DRY_RUN"] = environment
    found = backend.reports()
    if not found:
        return None
    merged = found[0]
    for report in found[1:]:
        merged = merge(merged, report)
    return merged.to_json()

"""Numbered text dumps: what the graph was, what it is, and each site's before, after and why."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from k3fuse.rewriter.graph_text import graph_text
from k3fuse.rewriter.report import Report, dump_json
from k3fuse.rewriter.site import Site


class DumpError(ValueError):
    """A dump folder that cannot be written or read."""


def write_dump(
    report: Report, folder: str | Path, rewritten: fx.Graph, *, before: str = "", numbered: int = 0
) -> Path:
    """Write index.md, summary.json, graph texts and one file triple a site; return the folder.

    numbered: sub-folder number where one process compiles several graphs (0: the folder itself).
    Existing files of the same names are overwritten. Raises DumpError where writing fails.
    """
    root = Path(folder).absolute()
    if numbered:
        root = root / f"graph_{numbered:03d}"
    try:
        (root / "sites").mkdir(parents=True, exist_ok=True)
        report.dump = str(root)
        if before:
            (root / "00_input.txt").write_text(before)
        (root / "01_rewritten.txt").write_text(graph_text(rewritten))
        (root / "summary.json").write_text(dump_json(report.to_json()))
        lines = [
            "# k3fuse dump",
            "",
            "```",
            report.summary(),
            "```",
            "",
            "| site | outcome | reason |",
            "|---|---|---|",
        ]
        for site in report.sites:
            stem = site_stem(site.layer, site.pattern, site.anchor.name)
            (root / "sites" / f"{stem}.before.txt").write_text((site.before or "") + "\n")
            (root / "sites" / f"{stem}.after.txt").write_text((site.after or "") + "\n")
            (root / "sites" / f"{stem}.why.txt").write_text(why_text(site))
            code = site.reasons[0].code.value if site.reasons else ""
            lines.append(f"| [{stem}](sites/{stem}.why.txt) | {site.outcome} | {code} |")
        for miss in report.near:
            lines.append(f"| {miss.pattern} {miss.anchor.name} | near | {miss.reason.code.value} |")
        (root / "index.md").write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise DumpError(f"dump folder {str(root)!r} cannot be written: {error.strerror}") from error
    return root


def site_stem(layer: int | None, pattern: str, anchor: str) -> str:
    """L057_output_projection, or the anchor and pattern where there is no layer."""
    place = f"L{layer:03d}" if layer is not None else f"final_{anchor}"
    return f"{place}_{pattern}"


def why_text(site: Site) -> str:
    """Guards with what they saw, then reasons with the fix."""
    lines = [f"{site.pattern} ({site.form}), layer {site.layer}: {site.outcome}"]
    if site.source:
        lines.append(f"model line: {site.source}")
    if site.kernel is not None:
        hops = f", {site.kernel.hops} hop(s) more" if site.kernel.hops else ""
        lines.append(
            f"kernel: {site.kernel.name}, {site.kernel.launches} launch(es){hops}, "
            f"{site.kernel.policy}"
        )
    lines += [f"note: {note}" for note in (*site.notes, *site.parted)]
    lines += ["", "guards"]
    lines += [
        f"  {'ok  ' if g.passed else 'FAIL'} {g.guard.text}   [{g.actual}]" for g in site.guards
    ]
    for reason in site.reasons:
        lines += ["", f"{reason.code}: {reason.sentence}", f"  fix: {reason.fix}"]
        lines += [f"  nodes: {', '.join(reason.nodes)}"] if reason.nodes else []
    return "\n".join(lines) + "\n"

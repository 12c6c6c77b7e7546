"""`k3fuse html` and `k3fuse show`: the report as a page, one site as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from k3fuse.rewriter import console
from k3fuse.rewriter.cli import Failure, _filters, _load, _one_line, _shared
from k3fuse.rewriter.saved import SavedReport, rank_dumps


@click.command("html")
@click.argument(
    "dumps", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DUMP..."
)
@_shared
def html(dumps: tuple[Path, ...], as_json: bool, output: Path | None) -> None:
    """Write the page of DUMP to one file: nothing is loaded from elsewhere.

    Further DUMPs are those of other ranks, compared on the page; a folder with rank_000, rank_001,
    ... brings them all.
    """
    with _one_line():
        paths = [path for dump in dumps for path in rank_dumps(dump)]
        first, *others = [SavedReport.load(path).document for path in paths]
        write_page(first, output or Path("report.html"), others, as_json=as_json)


@click.command("show")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--mermaid/--svg", "mermaid", default=True, help="Mermaid text (default), or SVG.")
@click.option(
    "--part", type=click.Choice(["before", "after"]), default="before", show_default=True,
    help="What an SVG shows; Mermaid shows both.",
)  # fmt: skip
@_filters
@_shared
def show(
    dump: Path, mermaid: bool, part: str, pattern: str | None, layer: int | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Draw one site of DUMP, the first that --pattern and --layer leave, for issues and docs."""
    from k3fuse.rewriter.html import picture

    saved = _load(dump, pattern, layer)
    graphs = saved.document["graphs"]
    if not saved.sites:
        raise Failure(f"{str(dump)!r} has no site; see the report's counts")
    site = saved.sites[0]
    pieces = {p: graphs[key] for p, key in site["pieces"].items() if key in graphs}
    if not pieces:
        raise Failure(f"{str(dump)!r} has no graph pieces; write it with inspect --dump")
    if not mermaid and part not in pieces:
        raise Failure(f"the site has no graph {part!r}: it is {site['outcome']}; use --part before")
    where = "after the layers" if site["layer"] is None else f"layer {site['layer']}"
    title = f"{site['pattern']}, {where}, {part} the rewrite"
    text = (
        picture.mermaid(pieces)
        if mermaid
        else picture.svg(pieces[part], before=part == "before", name=title, alone=True) + "\n"
    )
    document = {
        "schema": saved.document["schema"], "layer": site["layer"], "pattern": site["pattern"],
        "outcome": site["outcome"], "pieces": pieces, "text": text,
    }  # fmt: skip
    console.emit(document if as_json else text, output)


def write_page(
    document: dict[str, Any], output: Path, ranks: list[dict[str, Any]], *, as_json: bool = False
) -> None:
    """Write the page and say where it is."""
    from k3fuse.rewriter.html.page import page

    text = page(document, ranks)
    console.emit(text, output)
    size = len(text.encode())
    said = {"schema": document["schema"], "file": str(output.absolute()), "bytes": size}
    console.emit(said if as_json else f"{said['file']}: {size / 1e6:.2f} MB", None)

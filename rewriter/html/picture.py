"""Pictures of a piece: SVG, laid out by grandalf (Sugiyama's layers), and Mermaid."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from grandalf.graphs import Edge, Graph, Vertex
from grandalf.layouts import SugiyamaLayout
from grandalf.routing import EdgeViewer, route_with_lines

from k3fuse.rewriter.html.boxes import Box, Drawing, draw

LETTER, LINE, PAD = 6.7, 15, 7  # pixels of the 11 px monospaced font
GAP = 24  # pixels between boxes

STYLE = """
.pic{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.pic rect{fill:var(--box-bg,#f6f8fa);stroke:var(--box-line,#818b98)}
.pic text{fill:var(--box-fg,#1f2328)}.pic .h{font-weight:700}
.pic .in rect{stroke-dasharray:3 2}.pic .folded rect{stroke-width:2}
.pic .gone rect{fill:var(--gone-bg,#ffe3e0);stroke:var(--gone-line,#c33a30)}
.pic .gone text{fill:var(--gone-fg,#77110c)}
.pic .new rect{fill:var(--new-bg,#d8f5df);stroke:var(--new-line,#22863a);stroke-width:2}
.pic .new text{fill:var(--new-fg,#0d4a20)}
.pic path{fill:none;stroke:var(--box-line,#818b98);marker-end:url(#k3-arrow)}
"""
_DARK = """
@media (prefers-color-scheme:dark){svg{--box-bg:#1c2129;--box-fg:#e6edf3;--box-line:#8b949e;
--gone-bg:#431a1b;--gone-fg:#ffb8b1;--gone-line:#f2746b;--new-bg:#113a20;--new-fg:#8be9a8;
--new-line:#3fb950}}
"""
ARROW = (
    '<defs><marker id="k3-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:var(--box-line,#818b98);'
    'stroke:none;marker-end:none"/></marker></defs>'
)


@dataclass
class _View:
    """What grandalf reads and writes of a vertex: size, then centre."""

    w: float
    h: float
    xy: tuple[float, float] = (0.0, 0.0)


@dataclass
class _Placed:
    """Boxes with their places: left, top, width, height; paths of the edges."""

    boxes: list[tuple[Box, float, float, float, float]] = field(default_factory=list)
    paths: list[list[tuple[float, float]]] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


def _size(box: Box) -> tuple[float, float]:
    letters = max(len(box.title) + 2, *(len(line) for line in box.lines), 6)
    return letters * LETTER + 2 * PAD, (1 + len(box.lines)) * LINE + 2 * PAD - 4


def _place(drawing: Drawing) -> _Placed:
    views = [_View(*_size(b)) for b in drawing.boxes]
    vertices = [Vertex(i) for i in range(len(views))]
    edges = [Edge(vertices[a], vertices[b]) for a, b in drawing.edges]
    for vertex, view in zip(vertices, views, strict=True):
        vertex.view = view
    for edge in edges:
        edge.view = EdgeViewer()
    placed = _Placed()
    for component in Graph(vertices, edges).C:
        layout = SugiyamaLayout(component)
        layout.xspace, layout.yspace = GAP, GAP * 1.6
        layout.route_edge = route_with_lines
        layout.init_all()
        layout.draw(3)
        mine = [v for v in vertices if v.c is component]
        left = min(v.view.xy[0] - v.view.w / 2 for v in mine)
        top = min(v.view.xy[1] - v.view.h / 2 for v in mine)
        x0, y0 = placed.width + (GAP if placed.width else 0) - left, -top
        for vertex in mine:
            (x, y), w, h = vertex.view.xy, vertex.view.w, vertex.view.h
            placed.boxes.append((drawing.boxes[vertex.data], x - w / 2 + x0, y - h / 2 + y0, w, h))
            placed.width = max(placed.width, x + w / 2 + x0)
            placed.height = max(placed.height, y + h / 2 + y0)
        for edge in edges:
            if edge.v[0].c is component:
                points = [(x + x0, y + y0) for x, y in edge.view._pts]
                placed.paths.append(points)
                placed.width = max(placed.width, *(x for x, _ in points))
    return placed


def svg(piece: dict[str, Any], *, before: bool, name: str, alone: bool = False) -> str:
    """SVG of a piece. before: changed nodes go away, else they are new. name: for screen readers.

    alone: a file of its own, with its style and arrow head; a page brings both once.
    """
    placed = _place(draw(piece))
    width, height = round(placed.width) + 4, round(placed.height) + 4
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    out = [
        f'<svg{space} class="pic" width="{width}" height="{height}" '
        f'viewBox="-2 -2 {width} {height}" role="img" aria-label="{escape(name)}">'
    ]
    if alone:
        out.append(f"<style>{STYLE}{_DARK}</style>{ARROW}")
    out += [f'<path d="{_curve(points)}"/>' for points in placed.paths]
    for box, x, y, w, h in placed.boxes:
        kind = _kind(box, before=before)
        out.append(
            f"<g{f' class={chr(34)}{kind}{chr(34)}' if kind else ''} "
            f'transform="translate({x:.0f} {y:.0f})">'
            f'<rect width="{w:.0f}" height="{h:.0f}" rx="4"/>'
        )
        for i, text in enumerate([_mark(box, before=before) + box.title, *box.lines]):
            head = ' class="h"' if i == 0 else ""
            out.append(f'<text{head} x="{PAD}" y="{PAD + 8 + i * LINE}">{escape(text)}</text>')
        out.append("</g>")
    return "".join([*out, "</svg>"])


def _kind(box: Box, *, before: bool) -> str:
    kind = {"input": "in", "folded": "folded"}.get(box.kind, "")
    changed = ("gone" if before else "new") if box.changed else ""
    return " ".join(k for k in (kind, changed) if k)


def _mark(box: Box, *, before: bool) -> str:
    """A changed box is marked by a sign too, not by colour alone."""
    return ("- " if before else "+ ") if box.changed else ""


def _curve(points: list[tuple[float, float]]) -> str:
    """Bends between the points, level with the boxes at both ends."""
    (x, y), *rest = points
    parts = [f"M{x:.0f} {y:.0f}"]
    for nx, ny in rest:
        middle = (y + ny) / 2
        parts.append(f"C{x:.0f} {middle:.0f} {nx:.0f} {middle:.0f} {nx:.0f} {ny:.0f}")
        x, y = nx, ny
    return "".join(parts)


def mermaid(pieces: dict[str, dict[str, Any]]) -> str:
    """Mermaid flowchart of pieces by name ("before", "after"), for issues and docs."""
    out = ["flowchart TD"]
    for part, piece in pieces.items():
        drawing = draw(piece)
        out.append(f"  subgraph {part}")
        for i, box in enumerate(drawing.boxes):
            lines = [f"<b>{_quoted(_mark(box, before=part == 'before') + box.title)}</b>"]
            text = "<br/>".join([*lines, *(_quoted(line) for line in box.lines)])
            shape = '(["{}"])' if box.kind == "input" else '["{}"]'
            out.append(f"    {part}{i}{shape.format(text)}")
        out += [f"    {part}{a} --> {part}{b}" for a, b in drawing.edges]
        out.append("  end")
    return "\n".join(out) + "\n"


def _quoted(text: str) -> str:
    """Mermaid takes entities, and reads quotes and brackets otherwise."""
    return escape(text).replace("&quot;", "#quot;").replace("&#x27;", "'")

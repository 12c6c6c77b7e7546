"""What a dump and the page show beside the counts: graph pieces, model lines, bytes of a layer.

Costs time at 93 layers, so it is made only where somebody asked for a dump or a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from k3fuse.rewriter import pieces
from k3fuse.rewriter.costs import layer_costs
from k3fuse.rewriter.graph_text import node_lines
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.view import GraphView


@dataclass
class Recorder:
    """Reads the graph before the edit, and the new nodes behind it."""

    report: Report
    drafts: list[tuple[Site, pieces.Draft]] = field(default_factory=list)

    def before(self, view: GraphView, layers: dict[fx.Node, int]) -> None:
        """Read every site and near miss of the untouched graph. layers: nodes of known layer."""
        kept = pieces.Pieces()
        for site in self.report.sites:
            site.before = "\n".join(node_lines(site.own))
            site.frames = pieces.frames(site.anchor)
            site.lines = pieces.model_lines(site.own)
            self.drafts.append((site, pieces.draft(site.own)))
        for miss in self.report.near:
            miss.frames = pieces.frames(miss.anchor)
            miss.pieces["before"] = kept.keep(pieces.draft(pieces.around(miss.anchor)))
        self.report.graphs = kept.store
        self.report.layers = layer_costs(view.nodes, layers, self.report.sites)

    def after(self, made: dict[int, tuple[fx.Node, ...]]) -> None:
        """Keep the pieces. made: id of a site -> the nodes that stand in its place."""
        kept = pieces.Pieces()
        kept.store = self.report.graphs
        for site, draft in self.drafts:
            gone = [n for n in site.own if n._erased] if id(site) in made else []
            site.pieces["before"] = kept.keep(draft, set(gone))
            new = [n for n in made.get(id(site), ()) if not n._erased]
            if new:
                site.after = "\n".join(node_lines(new))
                site.pieces["after"] = kept.keep(pieces.draft(new), set(new))


def new_nodes(call: fx.Node, inserted: Iterable[str]) -> tuple[fx.Node, ...]:
    """Nodes of one edit in graph order: the op's call and the inserted ones around it."""
    names, todo = set(inserted), [call]
    found: dict[fx.Node, None] = {}
    while todo:
        node = todo.pop()
        if node not in found and node.name in names:
            found[node] = None
            todo += [*node.all_input_nodes, *node.users]
    return tuple(sorted(found))

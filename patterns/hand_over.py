"""Which router makes what which experts read: one layer's sites that are better off together.

The router's front kernel reads the row that the shared expert's gate and up read, so it makes the
shared hidden row in the same launch, and the experts' own launch for it falls away. That row is a
value of the graph. The route kernel has the latent row in its hands, so it also rounds it to MXFP8,
which every CTA of the experts' kernel would do for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from k3fuse.kernels.common.microscaling import BLOCK
from k3fuse.patterns.moe import GatedMlp, as_routed
from k3fuse.patterns.router import Router
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.recognise.experts import RoutedExperts
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.routing import Routing
from k3fuse.rewriter.site import Made, Site
from k3fuse.rewriter.view import GraphView, dtype_of, shape_of

# Of the router's results: weights, ids, latent row, shared hidden row, then E4M3 and E8M0.
_E4M3, _E8M0 = 4, 5


@dataclass(frozen=True)
class Taken:
    """What the experts take beside the shared hidden row. results: latent_q and latent_scale."""

    results: tuple[Made, ...]

    @property
    def note(self) -> str:
        """For the report."""
        more = " and the latent row in MXFP8" if self.results else ""
        return f"the router makes the shared hidden row{more}"


# The router's op without what only the experts read.
WITHOUT: Mapping[str, Any] = MappingProxyType({"quantize": False})


def pairs(view: GraphView, found: Sequence[Site], taker: str) -> Iterator[tuple[Site, Site]]:
    """Router site and experts site that belong together. taker: name of the experts' pattern."""
    routers = {
        view.strip(site.facts[2].ids): site
        for site in found
        if site.pattern == Router.name and site.facts[2] is not None
    }
    if not routers:
        return
    for site in found:
        if site.pattern != taker or site.facts[1] is None or site.facts[2] is None:
            continue
        routed, mlp = site.facts[1], site.facts[2]
        giver = routers.get(view.strip(routed.ids))
        if giver is not None and _belong(view, giver, routed, mlp):
            yield giver, site


def handing_over(view: GraphView, giver: Site, taker: Site) -> tuple[Site, Taken]:
    """The router's form with what it makes for the experts. Raises Refusal for the second ones."""
    routed: RoutedExperts = taker.facts[1]
    latent: Linear = giver.facts[1]
    if giver.facts[4] is not None:
        names = (giver.anchor.name, taker.anchor.name)
        sentence = "the router makes the hidden row of other experts already"
        raise Refusal(Reason(Code.SHADOWED_BY, sentence, names))
    width = latent.n
    quantize = routed.w13_scale is not None and isinstance(width, int) and width % BLOCK == 0
    results = tuple(Made(giver, i) for i in (_E4M3, _E8M0)) if quantize else ()
    return Router().with_shared(view, giver, taker.facts[2], quantize), Taken(results)


def _belong(view: GraphView, giver: Site, routed: RoutedExperts, mlp: GatedMlp) -> bool:
    """Whether the experts read the router's weights, ids and latent; gate and up, its row."""
    gate: Linear
    latent: Linear | None
    routing: Routing
    gate, latent, routing, *_ = giver.facts
    if latent is None:
        return False
    row: fx.Node = mlp.row
    return (
        view.same(as_routed(view, routed.weights), routing.weights)
        and view.same(routed.hidden, latent.out)
        and view.same(mlp.x, gate.x)
        and shape_of(row) == (shape_of(gate.x)[0], shape_of(row)[-1])
        and dtype_of(row) == gate.dtype
    )

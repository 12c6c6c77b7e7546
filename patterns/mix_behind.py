"""Which AttnRes reads which experts' delta: the tail's launch does it, too.

The tail leaves a layer's delta as whole rows, and the AttnRes in front of the next attention reads
them first of all. In one launch neither the row nor a grid has to wait for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from k3fuse.patterns.attn_res import AttnResAlone
from k3fuse.patterns.mix import bank_output, prefix_result, score_arguments
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.site import Output, Site
from k3fuse.rewriter.subgraph import OutputSpec
from k3fuse.rewriter.view import GraphView, dtype_of, shape_of


@dataclass(frozen=True)
class Behind:
    """An AttnRes that the experts' op does. prefix: the row that delta is added to."""

    site: Site
    prefix: fx.Node

    note = "does the AttnRes that reads delta, too"

    @property
    def mix(self) -> AttnRes:
        """As it was found."""
        found: AttnRes = self.site.facts
        return found

    @property
    def operands(self) -> Mapping[str, Any]:
        """Its operands but for delta, by name."""
        return {n: o for n, o in self.site.operands.items() if n != "delta"} | {
            "prefix": self.prefix
        }

    @property
    def arguments(self) -> tuple[Any, ...]:
        """From `prefix` on, in the order of the op's schema."""
        return (self.prefix, *score_arguments(self.mix))

    @property
    def results(self) -> list[OutputSpec]:
        """The op's results behind delta: the mix, the new prefix."""
        return [self.mix.out, prefix_result(self.mix)]

    @property
    def outputs(self) -> list[Output]:
        """What the graph reads of them."""
        found = [Output(self.mix.out, 1), *bank_output(self.mix, 2)]
        new = self.mix.new_prefix
        return found if new is None else [*found, Output(new, 2)]


def readers(view: GraphView, found: Sequence[Site], giver: str) -> Iterator[tuple[Site, Site]]:
    """Experts site and AttnRes site that reads its delta. giver: name of the experts' pattern."""
    givers = {
        view.strip(site.facts[0].out): site
        for site in found
        if site.pattern == giver and site.facts[1] is not None
    }
    for site in found if givers else ():
        if site.pattern == AttnResAlone.name:
            rows = (site.facts.delta, site.facts.prefix)
            made = {id(g): g for row in rows if (g := givers.get(view.strip(row))) is not None}
            yield from ((experts, site) for experts in made.values())


def joined(view: GraphView, giver: Site, taker: Site) -> Behind:
    """The AttnRes as a part of the experts' op. Raises Refusal where it has to stay apart."""
    mix: AttnRes = taker.facts
    tail, behind = giver.facts[0], giver.facts[4]
    names = (tail.out.name, mix.out.name)
    if behind is not None:
        other = behind.mix.out.name
        raise _refusal(Code.SHADOWED_BY, f"the op does the AttnRes of {other} already", names)
    if mix.delta is None:
        sentence = f"the AttnRes of {mix.out.name} reads delta and adds it to nothing"
        raise _refusal(Code.OP_MISMATCH, sentence, names)
    delta, prefix = mix.delta, mix.prefix
    if not view.same(delta, tail.out):
        delta, prefix = prefix, delta  # a sum has no order
    rows = (shape_of(tail.routed)[0], shape_of(tail.out)[-1])
    if shape_of(delta) != rows:
        sentence = f"the AttnRes reads delta as {shape_of(delta)}, the op makes {rows}"
        raise _refusal(Code.SHAPE_MISMATCH, sentence, names)
    if dtype_of(prefix) != dtype_of(tail.out):
        sentence = f"the prefix is {dtype_of(prefix)}, delta {dtype_of(tail.out)}"
        raise _refusal(Code.DTYPE_MISMATCH, sentence, names)
    found = Behind(taker, prefix)
    inner = {*giver.nodes, *taker.nodes}
    for node in (n for o in found.operands.values() for n in (o if isinstance(o, list) else [o])):
        if node is not None and (node in inner or view.strip(node) in inner):
            sentence = f"the AttnRes reads {node.name} beside delta, which the op makes itself"
            raise _refusal(Code.INTERPOSED_OP, sentence, (*names, node.name))
    return found


def _refusal(code: Code, sentence: str, names: tuple[str, ...]) -> Refusal:
    return Refusal(Reason(code, sentence, names))

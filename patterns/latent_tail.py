"""From a routed partial to a layer's delta: reduction, norm, up-projection, shared add."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.rms_norm import RmsNorm
from k3fuse.rewriter.view import GraphView, op_of, shape_of


@dataclass(frozen=True)
class Tail:
    """From the routed partial to the layer's delta.

    routed: rank partial [M, L]; norm and up are None where the experts work in the hidden width.
    shared: rank partial of the shared expert, or None.
    """

    routed: fx.Node
    reduce_routed: AllReduce | None
    norm: RmsNorm | None
    up: Linear | None
    shared: fx.Node | None
    reduce_shared: AllReduce | None
    out: fx.Node
    nodes: tuple[fx.Node, ...]


def read_tail(view: GraphView, routed: fx.Node) -> Tail | None:
    """Follow a routed partial on: reduction, norm, up-projection, shared add, each optional."""
    value, nodes = routed, []
    reduce = _reduction_of(view, value)
    if reduce is not None:
        value, nodes = reduce.out, [*reduce.nodes]
    norm = _norm_of(view, value)
    up = None
    if norm is not None:
        if norm.weight is None or shape_of(norm.out)[-1:] != shape_of(value)[-1:]:
            return None  # the op's norm has a weight and spans the row
        readers = [f for u in view.users(norm.out) if (f := view.find(Linear, u)) is not None]
        if len(readers) != 1 or readers[0].bias is not None:
            return None
        up = readers[0]
        value, nodes = up.out, [*nodes, *norm.nodes, *up.nodes]
    adds = [u for u in view.users(value) if view.canon(u).op == "aten.add"]
    if len(adds) != 1:
        return (
            Tail(routed, reduce, norm, up, None, None, value, tuple(nodes))
            if up is not None
            else None
        )
    a, b = view.canon(adds[0]).inputs
    other = b if view.same(a, value) else a
    if not isinstance(other, fx.Node) or shape_of(other) != shape_of(adds[0]):
        return None
    reduce_shared = view.producer(other, AllReduce)
    shared = reduce_shared.input if reduce_shared is not None else other
    nodes += [adds[0], *(reduce_shared.nodes if reduce_shared is not None else ())]
    nodes += view.path(other, view.strip(other))
    return Tail(routed, reduce, norm, up, shared, reduce_shared, adds[0], tuple(nodes))


def _reduction_of(view: GraphView, value: fx.Node) -> AllReduce | None:
    for user in view.users(value):
        direct = view.find(AllReduce, user)
        if direct is not None:
            return direct
        for waiter in user.users:
            found = view.find(AllReduce, waiter)
            if found is not None and view.same(found.input, value):
                return found
    return None


def _norm_of(view: GraphView, value: fx.Node) -> RmsNorm | None:
    frontier = [value]
    for _ in range(6):
        step: list[fx.Node] = []
        for node in frontier:
            for user in view.users(node):
                if op_of(user) in RmsNorm.anchors:
                    norm = view.find(RmsNorm, user)
                    if norm is not None and view.same(norm.x, value):
                        return norm
                elif view.canon(user).op in ("cast", "aten.square", "aten.mean", "aten.add"):
                    step.append(user)
        frontier = step
    return None

"""What the router and experts families share: opaque experts ops, gated MLPs, the TP group."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from k3fuse.rewriter.canonical import dtype_of
from k3fuse.rewriter.guards import Value, to_value
from k3fuse.rewriter.recognise.activation import GatedActivation
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.view import GraphView, bound_args, shape_of

_OPAQUE = ("vllm.moe_forward_shared", "vllm.moe_forward")


@dataclass(frozen=True)
class OpaqueExperts:
    """vLLM's experts op: weights, selection and shared expert are behind its layer argument.

    shared, routed: the rank's partials; shared is None for the form without a shared expert.
    """

    node: fx.Node
    hidden: fx.Node
    logits: fx.Node
    shared: fx.Node | None
    routed: fx.Node | None


def opaque_experts(view: GraphView) -> Iterator[OpaqueExperts]:
    """Every opaque experts op, in graph order."""
    for name in _OPAQUE:
        for node in view.by_op.get(name, ()):
            args = list(bound_args(node).values())
            if not isinstance(args[0], fx.Node) or not isinstance(args[1], fx.Node):
                continue
            if name.endswith("shared"):
                parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
                yield OpaqueExperts(node, args[0], args[1], parts.get(0), parts.get(1))
            else:
                yield OpaqueExperts(node, args[0], args[1], None, node)


@dataclass(frozen=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)): the shared expert of a rank, before its reduction."""

    x: fx.Node
    gate_up: tuple[Linear, ...]
    activation: GatedActivation
    down: Linear

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Covered nodes."""
        linears = [n for f in (*self.gate_up, self.down) for n in f.nodes]
        return (*linears, *self.activation.nodes)

    @property
    def row(self) -> fx.Node:
        """The hidden row: what the activation makes and `down` reads."""
        return self.activation.out


def sources(view: GraphView, activation: GatedActivation) -> tuple[Linear, ...]:
    """Linears whose results a gated activation reads: one merged, or gate and up. () if unclear."""
    if activation.merged is not None:
        merged = view.producer(activation.merged, Linear)
        return (merged,) if merged is not None else ()
    found = []
    bounds = []
    for half in (activation.gate, activation.up):
        node = view.strip(half)
        if isinstance(node, fx.Node) and view.canon(node).op == "slice":
            whole = view.canon(node).inputs[0]
            if view.canon(node).attr("dim") != -1 or shape_of(whole) != shape_of(view.strip(whole)):
                return ()  # halves of the rows, or of another grouping of them
            bounds.append((view.canon(node).attr("start"), view.canon(node).attr("stop")))
            node = view.strip(view.canon(node).inputs[0])
        linear = view.find(Linear, node)
        if linear is None:
            return ()
        found.append(linear)
    if found[0].out is not found[1].out:
        return () if bounds else tuple(found)
    n = found[0].n
    if len(bounds) == 2 and isinstance(n, int) and bounds == [(0, n // 2), (n // 2, n)]:
        return (found[0],)
    return ()


def gated_linears(view: GraphView) -> set[fx.Node]:
    """Results of every linear that feeds a gated activation."""
    return {f.out for a in view.each(GatedActivation) for f in sources(view, a)}


def gated_mlp(view: GraphView, value: fx.Node) -> GatedMlp | None:
    """Read a value as a gated MLP's down-projection."""
    down = view.producer(value, Linear)
    activation = view.producer(down.x, GatedActivation) if down is not None else None
    if down is None or activation is None:
        return None
    linears = sources(view, activation)
    if not linears or not all(view.same(f.x, linears[0].x) for f in linears):
        return None
    return GatedMlp(linears[0].x, linears, activation, down)


def row_nodes(view: GraphView, mlp: GatedMlp) -> list[fx.Node]:
    """Nodes that make the hidden row of the row that gate and up read."""
    linears = [n for f in mlp.gate_up for n in f.nodes]
    halves = (mlp.activation.gate, mlp.activation.up, mlp.activation.merged)
    return [*linears, *mlp.activation.nodes, *_views_of(view, mlp, halves)]


def slices_between(view: GraphView, mlp: GatedMlp) -> list[fx.Node]:
    """Slices and reshapes between the projections and the activation."""
    halves = (mlp.activation.gate, mlp.activation.up, mlp.activation.merged, mlp.down.x)
    return _views_of(view, mlp, halves)


def _views_of(view: GraphView, mlp: GatedMlp, values: Iterable[fx.Node | None]) -> list[fx.Node]:
    ends = {f.out for f in mlp.gate_up}
    found: list[fx.Node] = []
    for half in values:
        node = half
        while isinstance(node, fx.Node) and node not in ends:
            if view.canon(node).op not in ("slice", "reshape"):
                break
            found.append(node)
            source = node.args[0]
            if node.target is operator.getitem and isinstance(source, fx.Node):
                found.append(source)
            node = view.canon(node).inputs[0]
    return found


def as_routed(view: GraphView, weights: fx.Node) -> fx.Node:
    """Routing weights before they were widened to FP32: the experts multiply in FP32 anyhow."""
    wide = view.strip(weights)
    if not isinstance(wide, fx.Node) or view.canon(wide).op != "cast":
        return weights
    source = view.canon(wide).inputs[0]
    narrow = isinstance(source, fx.Node) and dtype_of(source) in (torch.bfloat16, torch.float16)
    widened = narrow and dtype_of(wide) == torch.float32
    return source if widened and shape_of(source) == shape_of(weights) else weights


def tp_group(view: GraphView) -> tuple[str, int | None]:
    """The group most reductions of the graph use, and its size; ("", 1) without a reduction."""
    found: tuple[str, int | None] | None = view.notes.get("tp_group")
    if found is None:
        groups = Counter((r.group, r.size) for r in view.each(AllReduce))
        found = groups.most_common(1)[0][0] if groups else ("", 1)
        view.notes["tp_group"] = found
    return found


# Nodes between an all-reduce and the row that is made of it: a norm and a mix over eight blocks,
# spelled out, are about 100.
_NEAR = 400


def equal_on_all_ranks(view: GraphView, row: fx.Node, group: str) -> bool:
    """Whether a row [.., M, H] is made of an all-reduce over `group` with as many tokens.

    Ranks that add up their rows hold the same tokens, and so does what is computed of the sum. A
    chunk of the tokens, as sequence parallelism has it, has another count.
    """
    tokens = _tokens(row)
    waiting, seen = deque([row]), {row}
    while waiting and len(seen) < _NEAR:
        node = waiting.popleft()
        reduced = view.find(AllReduce, node)
        if reduced is not None and reduced.group == group:
            # The nearest one decides.
            return bool(_tokens(reduced.out) == tokens)
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return False


def _tokens(rows: fx.Node) -> Value:
    """The number of rows: a symbolic one is compared as an expression, without a new guard."""
    return to_value(math.prod(shape_of(rows)[:-1]))

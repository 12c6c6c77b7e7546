"""Routed experts, shared expert, latent all-reduce, norm, up-projection and the final sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from sympy import Eq, Or
from torch import fx

from k3fuse.kernels.experts.op import experts
from k3fuse.kernels.experts.policy import TABLE as EXPERTS_TABLE
from k3fuse.kernels.experts.policy import TAKING
from k3fuse.kernels.tail.op import tail
from k3fuse.kernels.tail.policy import TABLE as TAIL_TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import replacement
from k3fuse.patterns.hand_over import Taken, pairs
from k3fuse.patterns.moe import (
    GatedMlp,
    as_routed,
    gated_mlp,
    opaque_experts,
    row_nodes,
    slices_between,
)
from k3fuse.patterns.policy import ahead, others_share, pick
from k3fuse.rewriter.canonical import dtype_of
from k3fuse.rewriter.guards import Guard, Value
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.recognise.experts import RoutedExperts
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.rms_norm import RmsNorm
from k3fuse.rewriter.site import (
    Ahead,
    HandOver,
    Kernel,
    NearMiss,
    Output,
    Replacement,
    Site,
    in_order,
)
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, op_of, shape_of

_E, _I, _L, _TOP_K = sympy.symbols("E I L top_k", integer=True, nonnegative=True)
_ACTIVATION, _SHARED, _EXPERTS_DTYPE, _GROUPS, _ROUNDING = sympy.symbols(
    "activation shared_activation experts_dtype groups latent_norm_rounding"
)
_HIDDEN = s.name("hidden")


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


class Experts(Pattern):
    """One site a MoE layer: everything spelled out, or the tail behind an opaque experts op."""

    name: ClassVar[str] = "experts"
    summary: ClassVar[str] = (
        "routed and shared experts, latent all-reduce, norm, up-projection, sum"
    )
    priority: ClassVar[int] = 10
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        s.HIDDEN_SIZE,
        Guard(Eq(_L, 3584), Code.SHAPE_MISMATCH, "Kimi K3's latent width", scope="kernel"),
        Guard(
            Or(Eq(_E, 896), Eq(_E, 0)),
            Code.SHAPE_MISMATCH,
            "Kimi K3's experts; 0 = hidden",
            scope="kernel",
        ),
        Guard(
            Or(Eq(_I * s.TP, 3072), Eq(_I, 0)),
            Code.SHAPE_MISMATCH,
            "width of one expert over all ranks; 0 = hidden",
            scope="kernel",
        ),
        Guard(
            Or(Eq(_TOP_K, 16), Eq(_TOP_K, 0)),
            Code.SHAPE_MISMATCH,
            "16 a token; 0 = hidden",
            scope="kernel",
        ),
        s.TP_SIZE,
        Guard(
            Eq(_GROUPS, s.name("one")),
            Code.GROUP_MISMATCH,
            "routed and shared partials are reduced over one group",
        ),
        Guard(
            Or(Eq(_ACTIVATION, s.name("situ")), Eq(_ACTIVATION, _HIDDEN)),
            Code.ATTR_MISMATCH,
            "the kernels compute SiTU",
            scope="kernel",
        ),
        Guard(
            Eq(_SHARED, s.name("same")),
            Code.ATTR_MISMATCH,
            "the shared expert has the routed experts' activation, with the same betas",
        ),
        Guard(
            Or(Eq(_EXPERTS_DTYPE, s.name("uint8")), Eq(_EXPERTS_DTYPE, _HIDDEN)),
            Code.DTYPE_MISMATCH,
            "experts are MXFP4 in uint8 pairs",
            scope="kernel",
        ),
        Guard(
            Or(Eq(_ROUNDING, s.name("before_weight")), Eq(_ROUNDING, s.name("as_given"))),
            Code.ATTR_MISMATCH,
            "behind an opaque op the latent row is rounded before the norm's weight, as vLLM does",
        ),
        s.ROWS_BF16,
        s.WEIGHTS_BF16,
        s.IN_PLACE,
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """Experts spelled out, then opaque ops."""
        for routed in view.each(RoutedExperts):
            site = self._spelled_out(view, routed)
            yield site if site is not None else self._no_tail(routed.out)
        for node, refusal in view.misses(RoutedExperts):
            yield NearMiss(self.name, node, refusal.reason)
        for opaque in opaque_experts(view):
            found = read_tail(view, opaque.routed) if opaque.routed is not None else None
            same = found is not None and opaque.shared is not None and found.shared is opaque.shared
            if found is None or found.up is None or not same:
                yield self._no_tail(opaque.node)
                continue
            yield self._tail(view, found)

    def _no_tail(self, node: fx.Node) -> NearMiss:
        reason = Reason(
            Code.OP_MISMATCH,
            f"{node.name}: no all-reduce, norm, up-projection and shared add follow the experts",
            (node.name,),
            expected="[all-reduce] -> [RMSNorm -> linear] -> add of the shared expert",
            actual=", ".join(op_of(u) for u in node.users) or "no reader",
        )
        return NearMiss(self.name, node, reason)

    def _tail_values(self, view: GraphView, found: Tail) -> dict[sympy.Symbol, Value]:
        groups = {
            (r.group, r.size) for r in (found.reduce_routed, found.reduce_shared) if r is not None
        }
        lonely = (found.reduce_routed is None) != (found.reduce_shared is None)
        one = len(groups) <= 1 and not (lonely and found.shared is not None)
        size = next(iter(groups))[1] if groups else 1
        weights = [w for w in (found.up.weight if found.up else None,) if w is not None]
        values = {
            s.M: s.value(shape_of(found.routed)[0]),
            s.H: s.value(shape_of(found.out)[-1]),
            _L: s.value(shape_of(found.routed)[-1]),
            _GROUPS: s.name("one" if one else "several"),
            s.X_DTYPE: s.common_dtype(found.routed),
            s.W_DTYPE: s.common_dtype(*weights, found.norm.weight if found.norm else None)
            if weights
            else s.value(dtype_of(found.routed)),
            s.WEIGHT_ROWS_CONTIGUOUS: s.rows_contiguous(*weights)
            if found.up is None or found.up.transposed
            else s.NO,
        }
        if size is not None:
            values[s.TP] = s.value(size)
        return values

    def _tail(self, view: GraphView, found: Tail) -> Site:
        values = self._tail_values(view, found)
        values |= {_E: s.value(0), _I: s.value(0), _TOP_K: s.value(0)}
        values |= {_ACTIVATION: _HIDDEN, _SHARED: s.name("same"), _EXPERTS_DTYPE: _HIDDEN}
        before = found.norm is None or found.norm.round_before_weight
        values[_ROUNDING] = s.name("before_weight" if before else "after_weight")
        norm, up = found.norm, found.up
        return Site(
            self.name,
            "tail",
            found.out,
            in_order(found.nodes, view.index),
            {
                "routed": found.routed,
                "shared": found.shared,
                "norm": norm.weight if norm is not None else None,
                "up": up.weight if up is not None else None,
            },
            (found.out,),
            values,
            ("experts hidden in an opaque op are no part of it",),
            facts=(found, None, None, None),
        )

    def _spelled_out(self, view: GraphView, routed: RoutedExperts) -> Site | None:
        found = read_tail(view, routed.out)
        if found is None:
            return None
        mlp = gated_mlp(view, found.shared) if found.shared is not None else None
        if found.shared is not None and mlp is None:
            return None
        linears = [*mlp.gate_up, mlp.down, found.up] if mlp is not None else []
        if any(f.bias is not None for f in linears if f is not None):
            return None
        return self._site(view, found, routed, mlp, None)

    def _site(
        self,
        view: GraphView,
        found: Tail,
        routed: RoutedExperts,
        mlp: GatedMlp | None,
        taken: Taken | None,
    ) -> Site:
        values = self._tail_values(view, found)
        packed = routed.w13_scale is not None
        values |= {
            _E: s.value(shape_of(routed.w13)[0]),
            _I: s.value(shape_of(routed.w13)[1] // 2),
            _TOP_K: s.value(shape_of(routed.ids)[1]),
            _ACTIVATION: s.name(routed.activation),
            _ROUNDING: s.name("as_given"),
            _EXPERTS_DTYPE: s.value(dtype_of(routed.w13)) if packed else s.common_dtype(routed.w13),
        }
        same = mlp is None or (
            mlp.activation.kind == routed.activation
            and mlp.activation.beta == routed.beta
            and mlp.activation.linear_beta == routed.linear_beta
        )
        values[_SHARED] = s.name("same" if same else "other")
        covered = [*routed.nodes, *found.nodes]
        if mlp is not None:
            inside = {*mlp.nodes, *slices_between(view, mlp)}
            covered += inside if taken is None else inside - set(row_nodes(view, mlp))
            first = mlp.gate_up if taken is None else ()
            linears = [*first, mlp.down, *([found.up] if found.up else [])]
            values[s.W_DTYPE] = s.common_dtype(*(f.weight for f in linears))
            straight = all(f.transposed for f in linears)
            values[s.WEIGHT_ROWS_CONTIGUOUS] = (
                s.rows_contiguous(*(f.weight for f in linears)) if straight else s.NO
            )
        operands: dict[str, Any] = {
            "hidden": routed.hidden, "weights": as_routed(view, routed.weights), "ids": routed.ids,
            "w13": routed.w13, "w13_scale": routed.w13_scale, "w2": routed.w2,
            "w2_scale": routed.w2_scale,
            "shared_x": mlp.x if mlp is not None and taken is None else None,
            "gate_up": [f.weight for f in mlp.gate_up] if mlp and taken is None else [],
            "row": mlp.row if mlp is not None and taken is not None else None,
            "down": mlp.down.weight if mlp is not None else None,
            "norm": found.norm.weight if found.norm is not None else None,
            "up": found.up.weight if found.up is not None else None,
        }  # fmt: skip
        return Site(
            self.name,
            f"{'mxfp4' if packed else 'plain'} {routed.form}"
            + (" + shared" if mlp is not None else "")
            + (" row" if taken is not None else ""),
            found.out,
            in_order(covered, view.index),
            operands,
            (found.out,),
            values,
            () if taken is None else (taken.note,),
            facts=(found, routed, mlp, taken),
        )

    def hand_overs(self, view: GraphView, found: Sequence[Site]) -> Iterator[HandOver]:
        """The router of the same rows makes the shared hidden row, and the latent row in MXFP8."""
        for giver, taker, gives, taken in pairs(view, found, self.name):
            tail_found, routed, mlp, _ = taker.facts
            takes = self._site(view, tail_found, routed, mlp, taken)
            yield HandOver(giver, taker, gives, takes, {"quantize": False})

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """experts(...), or tail(...) behind an opaque op."""
        found: Tail
        routed: RoutedExperts | None
        taken: Taken | None
        found, routed, _, taken = site.facts
        reduce = found.reduce_routed or found.reduce_shared
        group = reduce.group if reduce is not None else ""
        o = site.operands
        eps = found.norm.eps if found.norm is not None else 0.0
        tokens = shape_of(found.routed)[0]
        width = found.up.n if found.up is not None else shape_of(found.routed)[-1]
        args: tuple[Any, ...]
        if routed is None:
            args, op = (o["routed"], o["shared"], o["norm"], o["up"], eps), tail
        else:
            rounding = (
                "round_before_weight" if found.norm and found.norm.round_before_weight else ""
            )
            args = (
                o["hidden"], o["weights"], o["ids"], o["w13"], o["w13_scale"], o["w2"],
                o["w2_scale"], o["shared_x"], o["gate_up"], o["down"], o["norm"], o["up"],
                routed.activation, routed.beta, routed.linear_beta, eps, rounding,
            )  # fmt: skip
            args += () if taken is None else (o["row"], *taken.results)
            op = experts
        return replacement(
            site, view, op, args, results=[found.out], shapes=[(tokens, width)],
            outputs=[Output(found.out, 0)], target=target, group=group,
        )  # fmt: skip

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M; the other ranks read their rows of the up-projection."""
        found: Tail = site.facts[0]
        up = found.up
        unread = 0 if up is None else others_share([up.n], up.k, up.dtype, target)
        table = TAKING if site.facts[3] is not None else EXPERTS_TABLE
        return pick(TAIL_TABLE if site.form == "tail" else table, site, target, unread=unread)

    def ahead(self, site: Site, target: Target) -> Ahead | None:
        """Beside the tail's exchange; without one there is nothing to wait for."""
        found: Tail = site.facts[0]
        reduce = found.reduce_routed or found.reduce_shared
        return None if reduce is None else ahead(site, target, reduce.group)

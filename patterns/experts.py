"""Routed experts, shared expert, latent all-reduce, norm, up-projection and the final sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import sympy
from sympy import Eq, Le, Or
from torch import fx

from k3fuse.kernels.experts.op import experts
from k3fuse.kernels.experts.policy import MIX_MOST, MIXING, TAKING, TAKING_MIXING
from k3fuse.kernels.experts.policy import TABLE as EXPERTS_TABLE
from k3fuse.kernels.tail.op import tail
from k3fuse.kernels.tail.policy import TABLE as TAIL_TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import replacement
from k3fuse.patterns.hand_over import WITHOUT, Taken, handing_over, pairs
from k3fuse.patterns.latent_tail import Tail, read_tail
from k3fuse.patterns.mix_behind import Behind, joined, readers
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
from k3fuse.rewriter.recognise.experts import RoutedExperts
from k3fuse.rewriter.site import (
    Absorption,
    Ahead,
    HandOver,
    Kernel,
    Link,
    NearMiss,
    Output,
    Replacement,
    Site,
    in_order,
)
from k3fuse.rewriter.subgraph import OutputSpec
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, op_of, shape_of

_E, _I, _L, _TOP_K, _MIXED = sympy.symbols(
    "E I L top_k mixed_tokens", integer=True, nonnegative=True
)
_ACTIVATION, _SHARED, _EXPERTS_DTYPE, _GROUPS, _ROUNDING = sympy.symbols(
    "activation shared_activation experts_dtype groups latent_norm_rounding"
)
_HIDDEN = s.name("hidden")
# By whether a router makes the shared hidden row, and whether the op does an AttnRes, too.
_TABLES = {
    (False, False): EXPERTS_TABLE,
    (True, False): TAKING,
    (False, True): MIXING,
    (True, True): TAKING_MIXING,
}


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
        Guard(
            Le(_MIXED, MIX_MOST),
            Code.M_OUT_OF_RANGE,
            "tokens whose AttnRes the tail's launch does, too; 0 = none is joined",
            scope="kernel",
            proof="reachable",
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
            _MIXED: s.value(0),
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
            facts=(found, None, None, None, None),
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
        return self._site(view, found, routed, mlp, None, None)

    def _site(
        self,
        view: GraphView,
        found: Tail,
        routed: RoutedExperts,
        mlp: GatedMlp | None,
        taken: Taken | None,
        behind: Behind | None,
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
        outputs: tuple[fx.Node, ...] = (found.out,)
        if behind is not None:
            covered += behind.site.nodes
            operands |= behind.operands
            outputs += behind.site.outputs
            values[_MIXED] = values[s.M]
        return Site(
            self.name,
            f"{'mxfp4' if packed else 'plain'} {routed.form}"
            + (" + shared" if mlp is not None else "")
            + (" row" if taken is not None else "")
            + (" + mix" if behind is not None else ""),
            found.out,
            in_order(covered, view.index),
            operands,
            outputs,
            values,
            tuple(part.note for part in (taken, behind) if part is not None),
            facts=(found, routed, mlp, taken, behind),
        )

    def links(self, view: GraphView, found: Sequence[Site]) -> Iterator[Link]:
        """What a router makes for the experts; the AttnRes that their op does, too."""
        for giver, taker in pairs(view, found, self.name):
            yield HandOver(giver, taker, partial(self._taking, view, giver, taker), WITHOUT)
        for giver, taker in readers(view, found, self.name):
            yield Absorption(giver, taker, partial(self._mixing, view, giver, taker))

    def _taking(self, view: GraphView, giver: Site, taker: Site) -> tuple[Site, Site]:
        gives, taken = handing_over(view, giver, taker)
        found, routed, mlp, _, behind = taker.facts
        return gives, self._site(view, found, routed, mlp, taken, behind)

    def _mixing(self, view: GraphView, giver: Site, taker: Site) -> Site:
        found, routed, mlp, taken, _ = giver.facts
        return self._site(view, found, routed, mlp, taken, joined(view, giver, taker))

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """experts(...), or tail(...) behind an opaque op."""
        found: Tail
        routed: RoutedExperts | None
        taken: Taken | None
        behind: Behind | None
        found, routed, _, taken, behind = site.facts
        reduce = found.reduce_routed or found.reduce_shared
        group = reduce.group if reduce is not None else ""
        o = site.operands
        eps = found.norm.eps if found.norm is not None else 0.0
        tokens = shape_of(found.routed)[0]
        width = found.up.n if found.up is not None else shape_of(found.routed)[-1]
        results: list[OutputSpec] = [found.out]
        outputs = [Output(found.out, 0)]
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
            made = () if taken is None else (o["row"], *taken.results)
            op = experts
            if behind is not None:
                made = (*made, None, None, None)[:3]
                args = (*args, *made, *behind.arguments)
                results += behind.results
                outputs += behind.outputs
            else:
                args += made
        return replacement(
            site, view, op, args, results=results, shapes=[(tokens, width)] * len(results),
            outputs=outputs, target=target, group=group,
        )  # fmt: skip

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M; the other ranks read their rows of the up-projection."""
        found: Tail = site.facts[0]
        up = found.up
        unread = 0 if up is None else others_share([up.n], up.k, up.dtype, target)
        taken, behind = (part is not None for part in site.facts[3:])
        table = _TABLES[taken, behind]
        return pick(TAIL_TABLE if site.form == "tail" else table, site, target, unread=unread)

    def ahead(self, site: Site, target: Target) -> Ahead | None:
        """Beside the tail's exchange; without one there is nothing to wait for."""
        found: Tail = site.facts[0]
        reduce = found.reduce_routed or found.reduce_shared
        return None if reduce is None else ahead(site, target, reduce.group)

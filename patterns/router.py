"""Gate linear, top-k routing, and the latent down-projection that reads the same row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import sympy
from sympy import Eq
from torch import fx

from k3fuse.kernels.router.op import router, router_front
from k3fuse.kernels.router.policy import TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import replacement
from k3fuse.patterns.moe import (
    GatedMlp,
    OpaqueExperts,
    equal_on_all_ranks,
    gated_linears,
    opaque_experts,
    row_nodes,
    tp_group,
)
from k3fuse.patterns.policy import others_share, pick, read
from k3fuse.rewriter.canonical import dtype_of
from k3fuse.rewriter.guards import Guard, Value
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.routing import Routing
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Read, Replacement, Site, in_order
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, shape_of

_E, _TOP_K, _L, _S = sympy.symbols("E top_k L S", integer=True, nonnegative=True)
_SCORING, _LOGITS, _BIAS_DTYPE = sympy.symbols("scoring logits_dtype bias_dtype")
_REDUCED = sympy.Symbol("row_all_reduced")
_NONE = s.name("none")


class Router(Pattern):
    """One site a MoE layer."""

    name: ClassVar[str] = "router"
    summary: ClassVar[str] = "gate linear with FP32 logits, top-k routing, latent down-projection"
    priority: ClassVar[int] = 20
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        Guard(Eq(_E, 896), Code.SHAPE_MISMATCH, "Kimi K3's experts", scope="kernel"),
        Guard(Eq(s.K, s.HIDDEN), Code.SHAPE_MISMATCH, "Kimi K3's hidden size", scope="kernel"),
        Guard(
            sympy.Or(Eq(_TOP_K, 16), Eq(_TOP_K, 0)),
            Code.SHAPE_MISMATCH,
            "16 experts a token; 0 where the selection is hidden in an opaque op",
            scope="kernel",
        ),
        Guard(
            sympy.Or(Eq(_L, 3584), Eq(_L, 0)),
            Code.SHAPE_MISMATCH,
            "latent width; 0 where no latent projection reads the row",
            scope="kernel",
        ),
        Guard(
            sympy.Or(Eq(_S * s.TP, 6144), Eq(_S, 0)),
            Code.SHAPE_MISMATCH,
            "shared expert's width over all ranks; 0 where its gate and up stay with the experts",
            scope="kernel",
        ),
        s.TP_SIZE,
        Guard(
            Eq(_REDUCED, s.YES),
            Code.GROUP_MISMATCH,
            "every rank multiplies a share of the weights, so all need the same row",
            scope="kernel",
            hint="the row has to come from an all-reduce over the group in the same graph",
        ),
        Guard(
            Eq(_LOGITS, s.FP32),
            Code.DTYPE_MISMATCH,
            "logits rounded to BF16 change the chosen experts of about 5 % of tokens",
        ),
        Guard(
            sympy.Or(Eq(_SCORING, s.name("sigmoid")), Eq(_SCORING, _NONE)),
            Code.ATTR_MISMATCH,
            "K3 scores with a sigmoid",
            scope="kernel",
        ),
        Guard(
            sympy.Or(Eq(_BIAS_DTYPE, s.FP32), Eq(_BIAS_DTYPE, _NONE)),
            Code.DTYPE_MISMATCH,
            "the correction bias is FP32",
            scope="kernel",
        ),
        s.ROWS_BF16,
        s.WEIGHTS_BF16,
        s.NO_BIAS,
        s.IN_PLACE,
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """Routing spelled out, then logits that feed an opaque experts op."""
        shared = gated_linears(view)
        for routing in view.each(Routing):
            beside = _latent(view, routing.linear, shared)
            yield self._site(view, routing.linear, beside, routing)
        for node, refusal in view.misses(Routing):
            yield NearMiss(self.name, node, refusal.reason)
        for opaque in opaque_experts(view):
            gate = view.producer(opaque.logits, Linear)
            if gate is None:
                continue
            latent = view.producer(opaque.hidden, Linear)
            same = latent is not None and view.same(latent.x, gate.x) and latent.out is not gate.out
            yield self._site(view, gate, latent if same else None, None, opaque)

    def _site(
        self,
        view: GraphView,
        gate: Linear,
        latent: Linear | None,
        routing: Routing | None,
        opaque: OpaqueExperts | None = None,
    ) -> Site:
        group, size = tp_group(view)
        values: dict[sympy.Symbol, Value] = {
            s.M: s.value(shape_of(gate.out)[0]),
            _E: s.value(gate.n),
            s.K: s.value(gate.k),
            _TOP_K: s.value(routing.top_k if routing is not None else 0),
            _L: s.value(latent.n if latent is not None else 0),
            _S: s.value(0),
            _LOGITS: s.value(gate.out_dtype),
            _SCORING: s.name(routing.scoring) if routing is not None else _NONE,
            _BIAS_DTYPE: s.common_dtype(routing.bias)
            if routing is not None and routing.bias
            else _NONE,
            _REDUCED: s.yes(equal_on_all_ranks(view, view.strip(gate.x), group)),
            s.X_DTYPE: s.value(gate.dtype),
            s.W_DTYPE: s.common_dtype(gate.weight, latent.weight if latent else None),
            s.BIAS: s.yes(
                gate.bias is not None or (latent is not None and latent.bias is not None)
            ),
            s.WEIGHT_ROWS_CONTIGUOUS: s.rows_contiguous(
                gate.weight, *([latent.weight] if latent else [])
            )
            if gate.transposed and (latent is None or latent.transposed)
            else s.NO,
        }
        if size is not None:
            values[s.TP] = s.value(size)
        made = [routing.weights, routing.ids] if routing is not None else [gate.out]
        covered = [*(routing.nodes if routing is not None else gate.nodes)]
        if latent is not None:
            made.append(latent.out)
            covered += latent.nodes
        notes = () if opaque is None else (hidden(opaque),)
        return Site(
            self.name,
            ("router" if routing is not None else "front")
            + (" + latent" if latent else ""),
            gate.out,
            in_order(covered, view.index),
            {
                "x": gate.x, "gate": gate.weight,
                "bias": routing.bias if routing is not None else None,
                "latent": latent.weight if latent is not None else None,
            },
            tuple(made),
            values,
            notes,
            facts=(gate, latent, routing, group, None, False),
        )  # fmt: skip

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """router_front where the selection is hidden, router otherwise."""
        gate, latent, routing, group, shared, quantize = site.facts
        m = shape_of(gate.x)[0]
        latent_weight = latent.weight if latent is not None else None
        extra = [latent.out] if latent is not None else []
        extra_shape = [(m, latent.n)] if latent is not None else []
        args: tuple[Any, ...]
        if routing is None:
            args = (gate.x, gate.weight, latent_weight)
            results, shapes, op = [gate.out, *extra], [(m, gate.n), *extra_shape], router_front
        else:
            args = (
                gate.x, gate.weight, routing.bias, latent_weight, routing.top_k, routing.scoring,
                routing.renormalize, routing.scale, routing.renorm_eps, dtype_of(routing.weights),
            )  # fmt: skip
            results = [routing.weights, routing.ids, *extra]
            shapes = [(m, routing.top_k), (m, routing.top_k), *extra_shape]
            op = router
        if shared is not None:
            activation = shared.activation
            args += (
                [f.weight for f in shared.gate_up], activation.kind, activation.beta,
                activation.linear_beta,
            )  # fmt: skip
            results, shapes = [*results, shared.row], [*shapes, shape_of(shared.row)]
        outputs = [Output(node, i) for i, node in enumerate(results)]
        return replacement(
            site, view, op, args, results=results, shapes=shapes, outputs=outputs, target=target,
            group=group, more={"quantize": True} if quantize else None,
        )  # fmt: skip

    def with_shared(self, view: GraphView, site: Site, shared: GatedMlp, quantize: bool) -> Site:
        """The site with the shared expert's gate and up; quantize: and MXFP8 of the latent row.

        Results behind the latent row: the shared hidden row; E4M3 and E8M0 of the latent row.
        """
        gate, latent, routing, group, *_ = site.facts
        linears = [f for f in (gate, latent, *shared.gate_up) if f is not None]
        weights = [f.weight for f in linears]
        in_place = all(f.transposed for f in linears) and s.rows_contiguous(*weights) == s.YES
        more = " and the latent row in MXFP8" if quantize else ""
        return replace(
            site,
            form=f"{site.form} + shared",
            nodes=in_order([*site.nodes, *row_nodes(view, shared)], view.index),
            operands={**site.operands, "shared": [f.weight for f in shared.gate_up]},
            outputs=(*site.outputs, shared.row),
            values={
                **site.values,
                _S: s.value(shape_of(shared.row)[-1]),
                s.W_DTYPE: s.common_dtype(*weights),
                s.BIAS: s.yes(any(f.bias is not None for f in linears)),
                s.WEIGHT_ROWS_CONTIGUOUS: s.yes(in_place),
            },
            notes=(*site.notes, f"makes the shared hidden row{more} for the experts"),
            facts=(gate, latent, routing, group, shared, quantize),
            reasons=[],
            guards=[],
        )

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M; the other ranks read their rows of the whole weights."""
        gate, latent, *_ = site.facts
        rows = [f.n for f in (gate, latent) if f is not None]
        unread = others_share(rows, gate.k, gate.dtype, target)
        return pick(TABLE, site, target, unread=unread)

    def reads(self, site: Site, target: Target) -> list[Read]:
        """This rank's rows of gate and latent weight; gate and up of its shared expert, whole."""
        gate, latent, _, group, *_ = site.facts
        split = [read(f.weight, target, group, f.n) for f in (gate, latent) if f is not None]
        return split + [read(weight, target) for weight in site.operands.get("shared", ())]


def hidden(opaque: OpaqueExperts) -> str:
    """What an opaque experts op keeps to itself, for the report."""
    shared = ", the shared expert's gate and up" if opaque.shared is not None else ""
    return f"hidden in an opaque experts op: the selection{shared}"


def _latent(view: GraphView, gate: Linear, shared: set[fx.Node]) -> Linear | None:
    """The one other linear of the row that is not a shared expert's gate or up projection."""
    row = view.strip(gate.x)
    others = {
        f.out: f
        for u in view.users(row)
        if (f := view.find(Linear, u)) is not None
        and f.out is not gate.out
        and f.out not in shared
        and view.same(f.x, row)
        and f.out_dtype == f.dtype
    }
    return next(iter(others.values())) if len(others) == 1 else None

"""o-proj -> all-reduce over the TP group -> residual: AttnRes, or add + RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from sympy import Eq, Le
from torch import fx

from k3fuse.kernels.output_projection.op import (
    output_projection_add_rms_norm,
    output_projection_attn_res,
)
from k3fuse.kernels.output_projection.policy import TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import as_rows, replacement
from k3fuse.patterns.mix import bank_output, buffers, norm_dtype, prefix_result, score_arguments
from k3fuse.patterns.policy import ahead, pick, read
from k3fuse.rewriter.guards import Guard, Value
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.recognise.activation import GatedActivation
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.rms_norm import AddRmsNorm
from k3fuse.rewriter.site import (
    Ahead,
    Kernel,
    NearMiss,
    Output,
    Read,
    Replacement,
    Site,
    in_order,
)
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, op_of, shape_of

_BLOCKS = sympy.Symbol("num_blocks", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Projected:
    """A row-parallel linear and the reduction of its partials (none at TP1)."""

    linear: Linear
    reduce: AllReduce | None

    @property
    def out(self) -> fx.Node:
        """The node that holds the reduced rows."""
        return self.reduce.out if self.reduce is not None else self.linear.out

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Covered nodes."""
        return (*self.linear.nodes, *(self.reduce.nodes if self.reduce is not None else ()))


def projected(view: GraphView, value: Any) -> Projected | None:
    """Read a value as all-reduce(linear(x)), or linear(x) alone; never an MLP's down-projection.

    A down-projection reads a gated activation; the experts family and stock kernels own it.
    """
    reduce = view.producer(value, AllReduce)
    linear = view.producer(reduce.input if reduce is not None else value, Linear)
    if linear is None or view.producer(linear.x, GatedActivation) is not None:
        return None
    if view.is_weight(linear.x) and op_of(view.strip(linear.x)) == "get_attr":
        return None
    return Projected(linear, reduce)


def projected_mixes(view: GraphView) -> dict[fx.Node, tuple[Projected, fx.Node | None]]:
    """AttnRes result -> the projected row it adds, and the other addend (None: block write).

    A block-write layer's projected row is also the prefix of the next mixes; the first mix in graph
    order is the one its output projection ends in.
    """
    found: dict[fx.Node, tuple[Projected, fx.Node | None]] | None = view.notes.get(
        "projected_mixes"
    )
    if found is None:
        found, taken = {}, set()
        for mix in view.each(AttnRes):
            addends = [mix.delta, mix.prefix] if mix.delta is not None else [mix.prefix]
            if mix.delta is not None and view.same(mix.delta, mix.prefix):
                continue  # a row added to itself: no residual
            for i, added in enumerate(addends):
                row = projected(view, added)
                if row is not None and row.linear.out not in taken:
                    taken.add(row.linear.out)
                    found[mix.out] = (row, addends[1 - i] if len(addends) == 2 else None)
                    break
        view.notes["projected_mixes"] = found
    return found


class OutputProjection(Pattern):
    """One site a layer."""

    name: ClassVar[str] = "output_projection"
    summary: ClassVar[str] = "o-proj, all-reduce, then AttnRes or add + RMSNorm"
    priority: ClassVar[int] = 40
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        s.HIDDEN_SIZE,
        Guard(
            Eq(s.K * s.TP, s.ATTENTION_WIDTH),
            Code.SHAPE_MISMATCH,
            "96 heads of 128",
            scope="kernel",
        ),
        s.TP_SIZE,
        Guard(
            Le(_BLOCKS, 8), Code.SHAPE_MISMATCH, "93 layers write at most 8 blocks", scope="kernel"
        ),
        s.SAME_DTYPE,
        s.ROWS_BF16,
        s.NORM_BF16,
        s.NO_BIAS,
        s.IN_PLACE,
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """AttnRes and add + RMSNorm whose added row is projected; then reductions left over."""
        used: set[fx.Node] = set()
        for mix in view.each(AttnRes):
            site = self._attn_res(view, mix)
            if site is not None:
                used.add(site.anchor)
                yield site
        seen: set[fx.Node] = set()
        for norm in view.each(AddRmsNorm):
            if norm.out in seen:
                continue
            seen.add(norm.out)
            site = self._add_rms_norm(view, norm)
            if site is not None:
                used.add(site.anchor)
                yield site
        yield from self._left_over(view, used)

    def _left_over(self, view: GraphView, used: set[fx.Node]) -> Iterator[NearMiss]:
        for reduce in view.each(AllReduce):
            found = projected(view, reduce.out)
            if found is None or found.linear.out in used or shape_of(found.linear.out)[-1:] == ():
                continue
            readers = view.users(reduce.out)
            mixed = next((r for n in readers for c in (AttnRes,) if (r := view.miss(c, n))), None)
            reason = (
                mixed.reason
                if mixed is not None
                else Reason(
                    Code.OP_MISMATCH,
                    f"{reduce.out.name}: neither AttnRes nor add + RMSNorm reads the reduced row",
                    (reduce.out.name, *(r.name for r in readers[:2])),
                    expected="AttnRes or add + RMSNorm",
                    actual=", ".join(op_of(r) for r in readers[:3]) or "no reader",
                )
            )
            yield NearMiss(self.name, reduce.out, reason)

    # --- forms --------------------------------------------------------------------------------

    def _attn_res(self, view: GraphView, mix: AttnRes) -> Site | None:
        row = projected_mixes(view).get(mix.out)
        if row is None:
            return None
        found, rest = row
        outputs = [mix.out]
        if mix.new_prefix is not None:
            outputs.append(mix.new_prefix)
        if rest is None:
            outputs.append(found.out)
        if mix.blocks_out is not None:
            outputs.append(mix.blocks_out)
        operands = {
            "x": found.linear.x, "weight": found.linear.weight, "prefix": rest,
            "blocks": list(mix.blocks), "score_norm": mix.score_norm_weight,
            "score_proj": mix.score_proj_weight, "out_norm": mix.out_norm_weight,
        }  # fmt: skip
        values = self._values(view, found, mix.num_blocks)
        values[s.NORM_DTYPE] = norm_dtype(mix)
        return Site(
            self.name,
            "attn_res" if rest is not None else "attn_res block write",
            found.linear.out,
            in_order([*found.nodes, *mix.nodes, *buffers(mix)], view.index),
            operands,
            tuple(outputs),
            values,
            facts=(found, mix),
        )

    def _add_rms_norm(self, view: GraphView, norm: AddRmsNorm) -> Site | None:
        found, rest = projected(view, norm.a), norm.b
        if found is None:
            found, rest = projected(view, norm.b), norm.a
        if found is None or norm.weight is None or view.same(norm.a, norm.b):
            return None
        values = self._values(view, found, 0)
        values[s.NORM_DTYPE] = s.common_dtype(norm.weight)
        return Site(
            self.name,
            "add + rms_norm",
            found.linear.out,
            in_order([*found.nodes, *norm.nodes], view.index),
            {
                "x": found.linear.x,
                "weight": found.linear.weight,
                "residual": rest,
                "norm": norm.weight,
            },
            (norm.out, *([norm.sum] if norm.sum is not None else [])),
            values,
            facts=(found, norm),
        )

    def _values(self, view: GraphView, found: Projected, blocks: int) -> dict[sympy.Symbol, Value]:
        linear, reduce = found.linear, found.reduce
        values = {
            s.M: s.value(shape_of(linear.out)[0]),
            s.K: s.value(linear.k),
            s.H: s.value(linear.n),
            _BLOCKS: s.value(blocks),
            s.X_DTYPE: s.value(linear.dtype),
            s.W_DTYPE: s.value(linear.weight_dtype),
            s.BIAS: s.yes(linear.bias is not None),
            s.WEIGHT_ROWS_CONTIGUOUS: s.rows_contiguous(linear.weight)
            if linear.transposed
            else s.NO,
        }
        size = 1 if reduce is None else reduce.size
        if size is not None:
            values[s.TP] = s.value(size)
        return values

    # --- replacement --------------------------------------------------------------------------

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """One op for the form."""
        found: Projected = site.facts[0]
        x, weight = found.linear.x, found.linear.weight
        row = (shape_of(x)[0], shape_of(weight)[0])
        group = found.reduce.group if found.reduce is not None else ""
        if site.form == "add + rms_norm":
            norm: AddRmsNorm = site.facts[1]
            residual = as_rows(view, site.operands["residual"], row)
            args: tuple[Any, ...] = (x, weight, residual, norm.weight, norm.eps, norm.rounding)
            results: list[Any] = [norm.out, norm.sum if norm.sum is not None else norm.out]
            outputs = [Output(norm.out, 0)]
            if norm.sum is not None:
                outputs.append(Output(norm.sum, 1))
            op = output_projection_add_rms_norm
        else:
            mix: AttnRes = site.facts[1]
            prefix = site.operands["prefix"]
            args = (x, weight, prefix, *score_arguments(mix))
            results = [mix.out, found.out if prefix is None else prefix_result(mix)]
            outputs = [Output(mix.out, 0), *bank_output(mix, 1)]
            if mix.new_prefix is not None:
                outputs.append(Output(mix.new_prefix, 1))
            if prefix is None:
                outputs.append(Output(found.out, 1))
            op = output_projection_attn_res
        return replacement(
            site, view, op, args, results=results, shapes=[row, row], outputs=outputs,
            target=target, group=group,
        )  # fmt: skip

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M."""
        return pick(TABLE, site, target)

    def reads(self, site: Site, target: Target) -> tuple[Read, ...]:
        """The weight, whole."""
        return (read(site.operands["weight"], target),)

    def ahead(self, site: Site, target: Target) -> Ahead | None:
        """Beside its exchange; without one there is nothing to wait for."""
        found: Projected = site.facts[0]
        return None if found.reduce is None else ahead(site, target, found.reduce.group)

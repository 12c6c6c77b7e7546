"""What happens to one row once it is whole: AttnRes, or add and RMSNorm, by a cluster of CTAs.

A cluster of CTAS CTAs serves one token; each of its threads that take part owns eight neighbouring
columns. All that does not need the row is done before it arrives: loads, the blocks' scores, their
softmax and their mix. When the row is there, four sums cross the cluster once. The roundings are
those of `attn_res/reference.py` and `output_projection/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from k3fuse.kernels.common.device import ptx, vector
from k3fuse.kernels.common.device.cluster import Exchange
from k3fuse.kernels.common.geometry import (
    CLUSTER,
    COLUMNS,
    CONSUMER_WARPS,
    HIDDEN,
    exchange_bytes,
    quads,
    residual_bytes,
)

__all__ = ["COLUMNS", "HIDDEN", "Form", "Residual"]

# The norm of the mix comes from sums that are known before the mix is: it is the difference of
# large terms where blocks and row cancel. Below this part of the terms it is summed directly.
CANCELLED = 2.0**-10
_HUGE = 3.0e38
_NOTHING = float("-inf")


@dataclass(frozen=True)
class Form:
    """What is done with the row.

    blocks: number of AttnRes blocks, or -1 for add + RMSNorm. norm: an output norm follows the mix.
    round_mix: the mix is rounded before the norm; for add + RMSNorm: the sum is. round_before: the
    normalised row is rounded before it is multiplied (add + RMSNorm only). packed: use f32x2.
    """

    blocks: int
    norm: bool = True
    round_mix: bool = False
    round_before: bool = False
    packed: bool = False

    @property
    def attn_res(self) -> bool:
        """AttnRes, not add + RMSNorm."""
        return self.blocks >= 0


class Residual:
    """One thread's part in one row.

    eps, out_eps are the bits of floats; `memory` is `residual_bytes(blocks)` of shared memory.
    """

    def __init__(
        self, form: Form, memory: Any, lane: Any, warp: Any, cta: Any, eps: Any, out_eps: Any
    ) -> None:
        self.form, self.lane, self.warp, self.cta = form, lane, warp, cta
        self.eps, self.out_eps = ptx.as_f32(eps), ptx.as_f32(out_eps)
        barriers = memory + Int32(residual_bytes(form.blocks) - 32)
        # The sum of squares of what is normalised; four sums with the row; the blocks' sums.
        self.squares: Any = None
        self.row: Any = None
        self.bank: Any = None
        if form.norm:
            place = memory + Int32(exchange_bytes(1))
            self.squares = Exchange(place, barriers, 0, CLUSTER, CONSUMER_WARPS)
        if form.blocks > 0:
            self.row = Exchange(memory, barriers + Int32(8), 1, CLUSTER, CONSUMER_WARPS)
            place = memory + Int32(exchange_bytes(1) + exchange_bytes(0))
            self.bank = Exchange(
                place, barriers + Int32(16), quads(form.blocks), CLUSTER, CONSUMER_WARPS
            )
        self.exchanges = [x for x in (self.squares, self.row, self.bank) if x is not None]

    def arm(self) -> None:
        """Initialise the barriers; one thread of the CTA."""
        for exchange in self.exchanges:
            exchange.arm()
        ptx.barrier_init_fence()

    def prepare(self) -> None:
        """Clear what no warp fills; one warp of the CTA. The cluster's barrier comes after."""
        for exchange in self.exchanges:
            exchange.prepare(self.lane)

    def send(self, exchange: Exchange, values: list[Any]) -> None:
        """Push the sums of 4 x quads values of every lane to all CTAs."""
        exchange.send(values, self.lane, self.cta, self.warp)

    def send_blocks(self, blocks: list[list[Any]], weight: list[Any]) -> None:
        """Sums of squares and of products with the score weight, of each block; push them."""
        values = []
        for words in blocks:
            v = ptx.unpack(words)
            values += [self.dot(v, v), self.dot(v, weight)]
        values += [Float32(0.0)] * (4 * quads(self.form.blocks) - len(values))
        self.send(self.bank, values)

    def mix_blocks(self, blocks: list[list[Any]]) -> tuple[list[Any], Any, Any]:
        """The mix of the blocks relative to their best score: (sum of e_j v_j, best, sum of e_j).

        e_j = exp(score_j - best).
        """
        width = quads(self.form.blocks)
        total = self.bank.receive(self.lane)
        quad = self.lane % Int32(width)
        scores = []
        for i in range(2):
            score = self.score(total[2 * i], total[2 * i + 1])
            known = quad * Int32(2) + Int32(i) < Int32(self.form.blocks)
            scores.append(ptx.select(known, score, Float32(_NOTHING)))
        best = ptx.most_f32(*scores)
        steps = [step for step in (1, 2) if step < width]
        for step in steps:
            best = ptx.most_f32(best, ptx.shuffle_xor(best, step))
        powers = [ptx.exp(score - best) for score in scores]
        weight = powers[0] + powers[1]
        for step in steps:
            weight = weight + ptx.shuffle_xor(weight, step)
        mix: list[Any] = []
        for j, words in enumerate(blocks):
            e = ptx.shuffle_from(powers[j % 2], j // 2)
            v = ptx.unpack(words)
            if mix:
                mix = vector.fma([e] * len(v), v, mix, self.form.packed)
            else:
                mix = vector.scaled(v, e, self.form.packed)
        return mix, best, weight

    def score(self, squares: Any, product: Any) -> Any:
        """Score of a source from its sums over the whole row."""
        return product * ptx.rsqrt(squares * Float32(1.0 / HIDDEN) + self.eps)

    @cute.jit
    def finish(
        self,
        row: list[Any],
        weight: list[Any],
        norm: list[Any],
        mix: list[Any],
        best: Float32,
        sum_e: Float32,
    ) -> Any:
        """The output of the row: eight Float32 before their last rounding.

        row: the new prefix; weight: score weight; norm: output norm weight (unused without one);
        mix, best, sum_e: of `mix_blocks` (unused without blocks). All lists of eight Float32.
        """
        form = self.form
        if cutlass.const_expr(form.blocks == 0):
            out = row
            if cutlass.const_expr(form.norm):
                out = self.normalised(row, self.scale(self.sum_squares(row)), norm)
            return out
        sums = [self.dot(mix, row), self.dot(mix, mix), self.dot(row, row), self.dot(row, weight)]
        self.send(self.row, sums)
        mix_row, mix_mix, row_row, row_weight = self.row.receive(self.lane)
        score = self.score(row_row, row_weight)
        top = ptx.most_f32(best, score)
        old, new = ptx.exp(best - top), ptx.exp(score - top)
        share = ptx.reciprocal(sum_e * old + new)
        old, new = old * share, new * share
        if cutlass.const_expr(not form.norm):
            return vector.combine(old, mix, new, row, form.packed)
        if cutlass.const_expr(form.round_mix):
            mixed = ptx.unpack(ptx.pack(vector.combine(old, mix, new, row, form.packed)))
            return self.normalised(mixed, self.scale(self.sum_squares(mixed)), norm)
        terms = old * old * mix_mix + new * new * row_row
        squares = terms + Float32(2.0) * old * new * mix_row
        scale = self.scale(squares)
        # The same bits in all threads of the cluster: all of them go one way. NaN goes in.
        if not (squares > terms * Float32(CANCELLED) and terms < Float32(_HUGE)):
            scale = self.scale(self.sum_squares(vector.combine(old, mix, new, row, form.packed)))
        mixed = vector.combine(old * scale, mix, new * scale, row, form.packed)
        return vector.mul(mixed, norm, form.packed)

    def dot(self, a: list[Any], b: list[Any]) -> Any:
        """The sum of products over the thread's columns."""
        return vector.dot(a, b, self.form.packed)

    def normalised(self, values: list[Any], scale: Any, norm: list[Any]) -> list[Any]:
        """(values scale) norm, each product rounded to FP32."""
        return vector.mul(vector.scaled(values, scale, self.form.packed), norm, self.form.packed)

    def sum_squares(self, values: list[Any]) -> Any:
        """The sum of squares over the whole row."""
        self.send(self.squares, [self.dot(values, values)])
        return self.squares.receive(self.lane)[0]

    def scale(self, squares: Any) -> Any:
        """1 / RMS from the sum of squares of the whole row."""
        return ptx.rsqrt(squares * Float32(1.0 / HIDDEN) + self.out_eps)

    @cute.jit
    def add_norm(self, total: list[Any], norm: list[Any]) -> Any:
        """RMSNorm of the FP32 sum of row and residual: eight Float32 before their last rounding."""
        form = self.form
        source = total
        if cutlass.const_expr(form.round_mix):
            source = ptx.unpack(ptx.pack(total))
        scale = self.scale(self.sum_squares(source))
        scaled = vector.scaled(source, scale, form.packed)
        if cutlass.const_expr(form.round_before):
            scaled = ptx.unpack(ptx.pack(scaled))
        return vector.mul(scaled, norm, form.packed)

"""AttnRes where it stands alone: before attention, and behind the last layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import sympy
from sympy import Eq, Le

from k3fuse.kernels.attn_res.op import attn_res
from k3fuse.kernels.attn_res.policy import TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import replacement
from k3fuse.patterns.mix import bank_output, buffers, norm_dtype, prefix_result, score_arguments
from k3fuse.patterns.output_projection import projected_mixes
from k3fuse.patterns.policy import pick
from k3fuse.rewriter.canonical import dtype_of
from k3fuse.rewriter.guards import Guard
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Replacement, Site, in_order
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, shape_of

_BLOCKS = sympy.Symbol("num_blocks", integer=True, nonnegative=True)


class AttnResAlone(Pattern):
    """One site before each attention, one behind the last layer."""

    name: ClassVar[str] = "attn_res"
    summary: ClassVar[str] = "AttnRes mix of block rows and prefix, then RMSNorm"
    priority: ClassVar[int] = 30
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        s.HIDDEN_SIZE,
        Guard(
            Le(_BLOCKS, 8), Code.SHAPE_MISMATCH, "93 layers write at most 8 blocks", scope="kernel"
        ),
        s.ROWS_BF16,
        Guard(
            Eq(s.NORM_DTYPE, s.BF16), Code.DTYPE_MISMATCH, "score weights are BF16", scope="kernel"
        ),
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """Every AttnRes that no output projection feeds."""
        for mix in view.each(AttnRes):
            if mix.out in projected_mixes(view):
                continue
            operands = {
                "prefix": mix.prefix, "delta": mix.delta, "blocks": list(mix.blocks),
                "score_norm": mix.score_norm_weight, "score_proj": mix.score_proj_weight,
                "out_norm": mix.out_norm_weight,
            }  # fmt: skip
            made = [n for n in (mix.out, mix.new_prefix, mix.blocks_out) if n is not None]
            final = mix.round_mix or mix.out_norm_weight is None
            yield Site(
                self.name,
                "final" if final else "before attention",
                mix.out,
                in_order([*mix.nodes, *buffers(mix)], view.index),
                operands,
                tuple(made),
                {
                    s.M: s.value(shape_of(mix.prefix)[0]),
                    s.H: s.value(shape_of(mix.prefix)[-1]),
                    _BLOCKS: s.value(mix.num_blocks),
                    s.X_DTYPE: s.value(dtype_of(mix.prefix)),
                    s.NORM_DTYPE: norm_dtype(mix),
                },
                facts=mix,
                outside_layers=final,
            )
        for node, refusal in view.misses(AttnRes):
            yield NearMiss(self.name, node, refusal.reason)

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """attn_res(prefix, delta, blocks, ...)."""
        mix: AttnRes = site.facts
        row = shape_of(mix.prefix)
        outputs = [Output(mix.out, 0)]
        if mix.delta is None:
            # The op adds nothing, so the prefix afterwards is the prefix before.
            results = [mix.out]
            outputs += bank_output(mix, mix.prefix)
            if mix.new_prefix is not None:
                outputs.append(Output(mix.new_prefix, mix.prefix))
        else:
            results = [mix.out, prefix_result(mix)]  # type: ignore[list-item]
            outputs += bank_output(mix, 1)
            if mix.new_prefix is not None:
                outputs.append(Output(mix.new_prefix, 1))
        return replacement(
            site, view, attn_res, (mix.prefix, mix.delta, *score_arguments(mix)),
            results=results, shapes=[row] * len(results), outputs=outputs, target=target,
            group=None,
        )  # fmt: skip

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M."""
        return pick(TABLE, site, target)

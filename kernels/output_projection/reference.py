"""The meaning of the output projection and its residual, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.common.collective import all_reduce
from k3fuse.kernels.common.numerics import linear, rms_norm

# round_sum: the norm reads the sum rounded to the dtype, not the FP32 sum.
# round_before_weight: the normalised row is rounded, then multiplied by the weight.
ROUNDING = ("round_sum", "round_before_weight")


def output_projection_attn_res(
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm_weight: Tensor,
    score_proj_weight: Tensor,
    out_norm_weight: Tensor | None,
    eps: float,
    out_eps: float,
    round_mix: bool,
    group: str,
) -> list[Tensor]:
    """[out, new_prefix], [M, H] each; x [M, K] is this rank's heads, weight [H, K].

    The rank partial is rounded, the all-reduced row too, before it is added to the prefix. Without
    a prefix (the block-write form) the all-reduced row is the new prefix.
    """
    row = all_reduce(linear(x, weight), group)
    rest = (
        blocks,
        num_blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
        eps,
        out_eps,
        round_mix,
    )
    if prefix is None:
        return [*attn_res(row, None, *rest), row]
    return attn_res(prefix, row, *rest)


def output_projection_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    rounding: frozenset[str],
    group: str,
) -> list[Tensor]:
    """[out, new_residual], [M, H] each; x [M, K] is this rank's heads, weight [H, K].

    new_residual = all-reduced row + residual, rounded once; `rounding` is a subset of ROUNDING.
    """
    total = all_reduce(linear(x, weight), group).float() + residual.float()
    new_residual = total.to(x.dtype)
    source = new_residual if "round_sum" in rounding else total
    out = rms_norm(source, norm_weight, eps, x.dtype, "round_before_weight" in rounding)
    return [out, new_residual]

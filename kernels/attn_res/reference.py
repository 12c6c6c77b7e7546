"""The meaning of AttnRes, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3fuse.kernels.common.numerics import rms_norm


def sources(blocks: Sequence[Tensor], num_blocks: int, prefix: Tensor) -> Tensor:
    """The num_blocks + 1 residual sources [M, S, H] in FP32, the prefix last.

    `blocks` is one bank [>= M, >= num_blocks, H], of which the first slots are read, or
    `num_blocks` tensors [M, H].
    """
    if num_blocks and blocks[0].dim() == 3:
        bank = blocks[0][: prefix.shape[0], :num_blocks]
        return torch.cat([bank, prefix.unsqueeze(1)], dim=1).float()
    return torch.stack([*blocks[:num_blocks], prefix], dim=1).float()


def mix(values: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Mix of un-normalised sources [M, S, H] -> [M, H], FP32.

    score_j = sum_d v_j[d] * w_norm[d] * w_proj[d] * rsqrt(mean(v_j^2) + eps); the weights of the
    mix are the softmax of the scores over the sources.
    """
    dot = (values * (norm_weight.float() * proj_weight.float())).sum(-1)
    scores = dot * torch.rsqrt(values.square().mean(-1) + eps)
    return (torch.softmax(scores, dim=-1).unsqueeze(-1) * values).sum(1)


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm_weight: Tensor,
    score_proj_weight: Tensor,
    out_norm_weight: Tensor | None,
    eps: float,
    out_eps: float,
    round_mix: bool,
) -> list[Tensor]:
    """[out], or [out, new_prefix] with a delta; both [M, H] in the dtype of `prefix`.

    new_prefix = prefix + delta, rounded once, and read rounded by the mix. `round_mix` rounds the
    mix before the output norm, which is FP32 with one rounding; without an output norm the mix is
    the output.
    """
    current = prefix if delta is None else (prefix.float() + delta.float()).to(prefix.dtype)
    mixed = mix(sources(blocks, num_blocks, current), score_norm_weight, score_proj_weight, eps)
    if round_mix or out_norm_weight is None:
        mixed = mixed.to(prefix.dtype)
    out = mixed
    if out_norm_weight is not None:
        out = rms_norm(mixed, out_norm_weight, out_eps, prefix.dtype, round_before_weight=False)
    return [out] if delta is None else [out, current]

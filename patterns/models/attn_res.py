"""AttnRes: the residual of Kimi K3, a learned softmax mix of earlier block rows and the prefix."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from k3fuse.patterns.models.parallel import ShardedModule, TensorParallel, Vector, rms_norm

AttnResForm = Literal["list", "bank"]


def attn_res_mix(sources: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Mix the un-normalised sources: BF16 [M, S, H] and two [H] weights to FP32 [M, H].

    score_j = sum_d v_j[d] w_norm[d] w_proj[d] * rsqrt(mean(v_j^2) + eps); softmax over j.
    """
    wide = sources.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    score = (wide * (norm_weight.float() * proj_weight.float())).sum(-1) * scale
    weights = torch.softmax(score, -1)
    return (weights.unsqueeze(-1) * wide).sum(1)


class Blocks:
    """The block rows of one step: a Python list of [M, H] rows, or one bank [M, S, H]."""

    def __init__(self, form: AttnResForm, like: Tensor, slots: int) -> None:
        self.count = 0
        self.rows: list[Tensor] = []
        self.bank: Tensor | None = None
        if form == "bank":
            self.bank = like.new_zeros(like.shape[0], slots, like.shape[1])

    def write(self, row: Tensor) -> None:
        """Store `row` [M, H] as the next block."""
        if self.bank is None:
            self.rows.append(row)
        else:
            self.bank[:, self.count] = row
        self.count += 1

    def sources(self, prefix: Tensor) -> Tensor:
        """[M, count + 1, H]: the written blocks in order, then the prefix."""
        if self.bank is None:
            return torch.stack([*self.rows, prefix], dim=1)
        if self.count == 0:
            return prefix.unsqueeze(1)
        return torch.cat([self.bank[:, : self.count], prefix.unsqueeze(1)], dim=1)


class AttnRes(ShardedModule):
    """One AttnRes with its score weights; the norm that follows belongs to the caller."""

    def __init__(self, tp: TensorParallel, key: str, hidden: int, eps: float) -> None:
        super().__init__(tp)
        self.eps = eps
        self.norm = Vector(tp, f"{key}.norm", hidden)
        # Scores of unit spread, so that every source takes part in the mix of a seeded model.
        self.proj = Vector(tp, f"{key}.proj", hidden, "normal", hidden**-0.5)

    def forward(
        self, blocks: Blocks, prefix: Tensor, out_norm_weight: Tensor, round_mix: bool = False
    ) -> Tensor:
        """Mix, then RMSNorm with `out_norm_weight` [H]: BF16 [M, H].

        `round_mix` rounds the mix to BF16 before the norm (the boundary of the final AttnRes).
        """
        mix = attn_res_mix(blocks.sources(prefix), self.norm.weight, self.proj.weight, self.eps)
        if round_mix:
            mix = mix.to(torch.bfloat16)
        return rms_norm(mix, out_norm_weight, self.eps)

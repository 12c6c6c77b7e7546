"""The AttnRes of the next layer, as one launch of the tail takes it along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """Operands of `k3fuse::attn_res`, in its order; the tail's finished row is the delta.

    prefix [M, H]: the residual stream that the row is added to. blocks: one bank
    [>= M, >= num_blocks, H], of which the first slots are read, or num_blocks rows [M, H].
    score_norm_weight, score_proj_weight, out_norm_weight [H]; None for no output norm. eps of the
    scores, out_eps of the output norm. round_mix: the mix is rounded before that norm.
    """

    prefix: Tensor
    blocks: Sequence[Tensor]
    num_blocks: int
    score_norm_weight: Tensor
    score_proj_weight: Tensor
    out_norm_weight: Tensor | None
    eps: float
    out_eps: float
    round_mix: bool

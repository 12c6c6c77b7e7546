"""The meaning of the MoE router front, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse.kernels.common.microscaling import quantize_mxfp8
from k3fuse.kernels.common.numerics import linear, linear_fp32
from k3fuse.kernels.router.units import expert_plan

SCORINGS = ("sigmoid", "softmax")


def router_front(x: Tensor, gate_weight: Tensor, latent_weight: Tensor | None) -> list[Tensor]:
    """[logits] or [logits, latent]: x [M, K], gate_weight [E, K], latent_weight [L, K].

    logits [M, E] are FP32 (operands in their dtype, FP32 sums, no rounding); latent [M, L] is in
    the dtype of x.
    """
    logits = linear_fp32(x, gate_weight)
    return [logits] if latent_weight is None else [logits, linear(x, latent_weight)]


def score(logits: Tensor, scoring: str) -> Tensor:
    """FP32 scores [M, E]; a NaN becomes 0. ValueError for a scoring other than SCORINGS."""
    if scoring == "sigmoid":
        scores = torch.sigmoid(logits.float())
    elif scoring == "softmax":
        scores = torch.softmax(logits.float(), dim=-1)
    else:
        raise ValueError(f"scoring={scoring!r}; known: {', '.join(SCORINGS)}")
    return torch.where(scores.isnan(), torch.zeros_like(scores), scores)


def select(logits: Tensor, bias: Tensor | None, scoring: str, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids [M, k] (int64) and scores [M, k] (FP32) of the k largest keys, key = score + bias.

    Descending by key; equal keys by ascending id; NaN keys (a NaN logit or bias) after every other
    one, also after -inf. Ids of a token are distinct.
    """
    scores = score(logits, scoring)
    keys = scores if bias is None else scores + bias.float()
    keys = keys + 0.0  # -0.0 and +0.0 are one key, for every sort implementation
    last = keys.isnan() | logits.isnan()
    keys = keys.masked_fill(last, -torch.inf)
    # Two stable sorts, the major key second: first by key, then the NaN keys behind the rest.
    by_key = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    by_nan = torch.sort(last.gather(-1, by_key).to(torch.uint8), dim=-1, stable=True).indices
    ids = by_key.gather(-1, by_nan)[..., :top_k].contiguous()
    return ids, scores.gather(-1, ids)


def router(
    x: Tensor,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    latent_weight: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
    weights_dtype: torch.dtype,
) -> list[Tensor]:
    """[weights [M, k], ids [M, k] int64] and latent [M, L] if there is a latent weight.

    Selection by score + bias; weights from the score alone: score * scale, over (sum of the k
    scores + renorm_eps) if `renormalize`, FP32, rounded once to `weights_dtype`.
    """
    logits, *latent = router_front(x, gate_weight, latent_weight)
    ids, chosen = select(logits, correction_bias, scoring, top_k)
    weights = chosen * scale
    if renormalize:
        weights = weights / (chosen.sum(-1, keepdim=True) + renorm_eps)
    return [weights.to(weights_dtype), ids, *latent]


def quantized(outputs: list[Tensor]) -> list[Tensor]:
    """What `quantize` adds to [weights, ids, latent]: latent_q, latent_scale and the expert plan.

    latent_q [M, L] and latent_scale [M, L / 32] are uint8: E4M3 and E8M0 by the round-up rule.
    """
    if len(outputs) != 3:
        return outputs  # not the op's: whoever asked refuses them
    _, ids, latent = outputs
    values, scales = quantize_mxfp8(latent)
    return [*outputs, values.view(torch.uint8), scales, expert_plan(ids)]

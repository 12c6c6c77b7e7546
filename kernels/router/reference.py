"""The meaning of the MoE router front, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.kernels.common.microscaling import BLOCK, quantize_mxfp8
from k3fuse.kernels.common.numerics import gated_row, linear, linear_fp32
from k3fuse.kernels.router.units import expert_plan

SCORINGS = ("sigmoid", "softmax")


@dataclass(frozen=True)
class Shared:
    """Gate and up of the shared expert on this rank, which read the router's row.

    weights: one merged [2 S, K], or gate and up [S, K]. activation: of `numerics.ACTIVATIONS`.
    """

    weights: Sequence[Tensor]
    activation: str
    beta: float
    linear_beta: float

    @property
    def columns(self) -> int:
        """S, the columns of the shared hidden row."""
        return self.weights[0].shape[0] * len(self.weights) // 2

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Gate and up, views of a merged weight."""
        gate, up = self.weights[0].chunk(2) if len(self.weights) == 1 else self.weights
        return gate, up

    def __call__(self, x: Tensor) -> Tensor:
        """The shared hidden row [M, S] of x [M, K]; gate and up are rounded first."""
        return gated_row(x, self.weights, self.activation, self.beta, self.linear_beta)


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
    shared: Shared | None = None,
) -> list[Tensor]:
    """[weights [M, k], ids [M, k] int64], latent [M, L] if there is a latent weight, shared row.

    Selection by score + bias; weights from the score alone: score * scale, over (sum of the k
    scores + renorm_eps) if `renormalize`, FP32, rounded once to `weights_dtype`.
    """
    logits, *latent = router_front(x, gate_weight, latent_weight)
    ids, chosen = select(logits, correction_bias, scoring, top_k)
    weights = chosen * scale
    if renormalize:
        weights = weights / (chosen.sum(-1, keepdim=True) + renorm_eps)
    return [weights.to(weights_dtype), ids, *latent, *([shared(x)] if shared is not None else [])]


def completed(outputs: list[Tensor], quantize: bool, plan: bool, read: bool = True) -> list[Tensor]:
    """What the graph does not have, behind [weights, ids, latent, ...].

    quantize: latent_q [M, L] and latent_scale [M, L / 32], uint8: E4M3 and E8M0 by the round-up
    rule; without `read`, for counts at which the experts run their composition and nobody looks at
    them, they are not filled. plan: the expert plan.
    """
    if len(outputs) < 2 + quantize:
        return outputs  # not the op's: whoever asked refuses them
    more = []
    if quantize and read:
        values, scales = quantize_mxfp8(outputs[2])
        more = [values.view(torch.uint8), scales]
    elif quantize:
        m, columns = outputs[2].shape
        more = [outputs[2].new_empty(m, n, dtype=torch.uint8) for n in (columns, columns // BLOCK)]
    return [*outputs, *more, *([expert_plan(outputs[1])] if plan else [])]

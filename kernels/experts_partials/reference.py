"""The meaning of the partials, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.kernels.experts.layouts import ROWS, plain
from k3fuse.kernels.experts.reference import (
    Activation,
    routed_rows,
    shared_expert,
    weighted_sum,
)
from k3fuse.kernels.router.reference import select

# Of kernels/experts/reference.py, what comes before the all-reduce.
ROUNDING = ("hidden_floor",)


@dataclass(frozen=True)
class Choice:
    """How logits become ids and weights: `top_k` by score + bias, weights from the score alone."""

    top_k: int
    scoring: str
    renormalize: bool
    scale: float
    renorm_eps: float
    weights_dtype: torch.dtype

    def __call__(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights [M, k] and ids [M, k] (int64) of logits [M, E], as `router` gives them."""
        ids, chosen = select(logits, bias, self.scoring, self.top_k)
        weights = chosen * self.scale
        if self.renormalize:
            weights = weights / (chosen.sum(-1, keepdim=True) + self.renorm_eps)
        return weights.to(self.weights_dtype), ids


def experts_partials(
    hidden: Tensor,
    logits: Tensor,
    correction_bias: Tensor | None,
    shared_hidden: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shared_gate_up: Sequence[Tensor],
    shared_down: Tensor,
    *,
    choice: Choice,
    activation: Activation,
    layout: str,
    width: int,
    rounding: frozenset[str],
) -> list[Tensor]:
    """[shared [M, H], routed [M, L]]: this rank's partials, nothing reduced.

    hidden [M, L] feeds the routed MXFP4 experts that logits [M, E] choose, shared_hidden [M, H] the
    shared expert. Weights lie as `layout` says; only the experts that are used are put in order.
    """
    weights, ids = choice(logits, correction_bias)
    used, places = torch.unique(ids, return_inverse=True)
    stored = w13[used], w13_scale[used], w2[used], w2_scale[used]
    ordered = stored if layout == ROWS else plain(*stored, width)
    rows = routed_rows(hidden, places, *ordered, activation, "hidden_floor" in rounding)
    shared = shared_expert(shared_hidden, shared_gate_up, shared_down, activation)
    return [shared, weighted_sum(rows, weights)]

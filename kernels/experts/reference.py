"""The meaning of the experts, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.kernels.common.collective import all_reduce
from k3fuse.kernels.common.microscaling import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    round_mxfp8,
)
from k3fuse.kernels.common.numerics import activate, gated_row, linear, rms_norm

# round_before_weight: the normalised latent is rounded, then multiplied by the norm's weight.
# hidden_floor: the MXFP8 scale of the activated hidden row takes the floor rule, as vLLM's TP8
# kernels do; the default is the round-up rule, as its TP16 kernels do.
ROUNDING = ("round_before_weight", "hidden_floor")


@dataclass(frozen=True)
class Activation:
    """A gated activation: "situ" with its two betas, or "silu"."""

    name: str
    beta: float
    linear_beta: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """FP32 result for gate and up of one shape."""
        return activate(self.name, gate, up, self.beta, self.linear_beta)


def expert_bf16(x: Tensor, w13: Tensor, w2: Tensor, activation: Activation) -> Tensor:
    """Rows x [R, L] through one unquantised expert, w13 [2I, L] (gate, up) and w2 [L, I]; [R, L].

    Gate and up, the activated row and the result are rounded to the dtype of x.
    """
    gate, up = linear(x, w13).chunk(2, dim=-1)
    return linear(activation(gate, up).to(x.dtype), w2)


def expert_mxfp4(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: Activation,
    hidden_floor: bool,
    rounded: Tensor | None = None,
) -> Tensor:
    """Rows x [R, L] through one MXFP4 expert; packed w13 [2I, L/2], w2 [L, I/2]; -> [R, L].

    Rows and activated rows go through MXFP8; gate and up stay FP32; the result is rounded to the
    dtype of x. rounded: x after MXFP8, FP32, where somebody has rounded it.
    """
    rounded = round_mxfp8(x) if rounded is None else rounded
    gate_up = rounded @ dequantize_mxfp4(w13, w13_scale).t()
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = round_mxfp8(activation(gate, up), hidden_floor)
    return (hidden @ dequantize_mxfp4(w2, w2_scale).t()).to(x.dtype)


def routed_rows(
    hidden: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    activation: Activation,
    hidden_floor: bool,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Expert results [M, k, L] of hidden [M, L], one row per token and slot, before the weights.

    quantized: E4M3 [M, L] and E8M0 [M, L/32] of hidden, uint8, read in its place.
    """
    rows = hidden.new_zeros((*topk_ids.shape, hidden.shape[-1]))
    rounded = None
    if quantized is not None:
        values, scales = quantized
        rounded = dequantize_mxfp8(values.view(torch.float8_e4m3fn), scales)
    for expert in torch.unique(topk_ids).tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        x = hidden[token]
        if w13_scale is None or w2_scale is None:
            result = expert_bf16(x, w13[expert], w2[expert], activation)
        else:
            result = expert_mxfp4(
                x,
                w13[expert],
                w13_scale[expert],
                w2[expert],
                w2_scale[expert],
                activation,
                hidden_floor,
                None if rounded is None else rounded[token],
            )
        rows[token, slot] = result
    return rows


def weighted_sum(rows: Tensor, topk_weights: Tensor) -> Tensor:
    """Rows [M, k, L] times weights [M, k], added slot by slot in FP32, rounded once -> [M, L]."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for slot in range(rows.shape[1]):
        total = total + rows[:, slot].float() * topk_weights[:, slot, None].float()
    return total.to(rows.dtype)


def shared_expert(
    x: Tensor, gate_up: Sequence[Tensor], down: Tensor, activation: Activation
) -> Tensor:
    """x [M, H] through the shared expert, this rank's share: [M, H], rounded at every step.

    `gate_up` is one merged weight [2S, H] or the two weights [S, H]; down [H, S].
    """
    row = gated_row(x, gate_up, activation.name, activation.beta, activation.linear_beta)
    return linear(row, down)


def experts(
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    shared_hidden: Tensor | None,
    shared_gate_up: Sequence[Tensor],
    shared_down: Tensor | None,
    latent_norm_weight: Tensor | None,
    up_weight: Tensor | None,
    *,
    activation: Activation,
    eps: float,
    rounding: frozenset[str],
    group: str,
    shared_row: Tensor | None = None,
    latent_q: Tensor | None = None,
    latent_scale: Tensor | None = None,
) -> Tensor:
    """delta [M, H]: routed experts -> all-reduce -> (norm) -> (up) + all-reduced shared expert.

    hidden [M, L] feeds the routed experts; the shared expert reads shared_hidden [M, H], or hidden
    where that is None; or its hidden row is given as shared_row [M, S]. Without a latent norm or an
    up-projection these steps are skipped. latent_q, latent_scale: as `quantized` of `routed_rows`.
    """
    quantized = None
    if latent_q is not None and latent_scale is not None:
        quantized = latent_q, latent_scale
    rows = routed_rows(
        hidden,
        topk_ids,
        w13,
        w13_scale,
        w2,
        w2_scale,
        activation,
        "hidden_floor" in rounding,
        quantized,
    )
    delta = all_reduce(weighted_sum(rows, topk_weights), group)
    if latent_norm_weight is not None:
        rounded = "round_before_weight" in rounding
        delta = rms_norm(delta, latent_norm_weight, eps, delta.dtype, rounded)
    if up_weight is not None:
        delta = linear(delta, up_weight)
    if shared_down is None:
        return delta
    if shared_row is not None:
        return delta + all_reduce(linear(shared_row, shared_down), group)
    x = hidden if shared_hidden is None else shared_hidden
    return delta + all_reduce(shared_expert(x, shared_gate_up, shared_down, activation), group)

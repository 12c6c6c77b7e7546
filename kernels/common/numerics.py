"""Arithmetic shared by the references: FP32 inside, rounded where the stock models round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed: FP32 sums, one rounding to x.dtype.

    The stock GEMM itself, so that a reference differs from the graph it replaces in nothing else.
    """
    return torch.nn.functional.linear(x, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """As `linear`, kept in FP32 (the router's logits)."""
    return x.float() @ weight.float().t()


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype, round_before_weight: bool
) -> Tensor:
    """RMSNorm over the last dimension of `x` (FP32 or a narrower float), in `dtype`.

    Statistics and scaling are FP32. With `round_before_weight` the normalised row is rounded to
    `dtype` and multiplied by the weight in their common dtype; otherwise the weight multiplies in
    FP32 and the product is rounded once.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(dtype)
    if round_before_weight:
        return (normed.to(dtype) * weight).to(dtype)
    return (normed * weight.float()).to(dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU in FP32: beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta)."""
    g, u = gate.float(), up.float()
    squashed = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return squashed * (linear_beta * torch.tanh(u / linear_beta))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in FP32."""
    g = gate.float()
    return g * torch.sigmoid(g) * up.float()


ACTIVATIONS = ("situ", "silu")


def activate(name: str, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The gated activation `name` of ACTIVATIONS in FP32; ValueError for another name."""
    if name == "situ":
        return situ(gate, up, beta, linear_beta)
    if name == "silu":
        return silu_mul(gate, up)
    raise ValueError(f"activation={name!r}; known: {', '.join(ACTIVATIONS)}")


def gated_row(
    x: Tensor, gate_up: Sequence[Tensor], name: str, beta: float, linear_beta: float
) -> Tensor:
    """x [M, H] through gate and up and the activation `name`: [M, S], rounded at every step.

    gate_up: one merged weight [2 S, H] or the two weights [S, H].
    """
    if len(gate_up) == 1:
        gate, up = linear(x, gate_up[0]).chunk(2, dim=-1)
    else:
        gate, up = (linear(x, weight) for weight in gate_up)
    return activate(name, gate, up, beta, linear_beta).to(x.dtype)

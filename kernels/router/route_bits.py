"""The bits that the route kernel computes, in NumPy: every step rounds as the kernel's does.

A second description of `reference.py`'s meaning, to compare with exactly: the kernel's exp is its
own, so a score may be an ULP or two away from torch's, here it is not. Also constants of that exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3fuse.kernels.common.microscaling import quantize_mxfp8
from k3fuse.kernels.simulator.formats import fma_f32

SLOPE = -1.4426950408889634  # -log2 e
MAGIC = 12582911.0  # 1.5 * 2**23 - 1: added to a small number, the lowest bits hold it less one
LN2_HIGH = 0.693145751953125  # 15 bits
LN2_LOW = 1.428606765330187e-06
# q of exp(-r) = 1 - r + r**2 q(r).
POLYNOMIAL = (
    0.4999999340339546,
    -0.1666651997315352,
    0.04166839580106821,
    -0.008368796713766552,
    0.0013814432907275512,
)
LEAST, MOST = -89.0, 64.0  # beyond them a sigmoid is 0 and 1
SMALLEST = 86.0  # exp(-86) is the least power of e that is not 0

F32 = Any  # a NumPy array of float32


def _fma(a: F32, b: Any, c: Any) -> F32:
    """a b + c, rounded once."""
    flat = (np.broadcast_to(np.float32(v), a.shape).reshape(-1) for v in (a, b, c))
    return fma_f32(*flat).reshape(a.shape)


def _half_of_exp(c: F32) -> F32:
    """exp(-c) / 2."""
    z = _fma(c, SLOPE, MAGIC)
    n = z - np.float32(MAGIC)
    r = _fma(n, LN2_LOW, _fma(n, LN2_HIGH, c))
    h = np.full_like(c, POLYNOMIAL[-1])
    for q in (*reversed(POLYNOMIAL[:-1]), -1.0, 1.0):
        h = _fma(h, r, q)
    return (h.view(np.uint32) + (z.view(np.uint32) << np.uint32(23))).view(np.float32)


def sigmoid(logits: F32) -> F32:
    """Scores; 0 for a NaN."""
    c = np.fmin(np.fmax(logits, np.float32(LEAST)), np.float32(MOST))
    with np.errstate(over="ignore"):
        return np.float32(1) / _fma(_half_of_exp(c), 2.0, 1.0)


def softmax(logits: F32) -> F32:
    """Scores of rows [M, E]; 0 in a row that has a NaN or an infinity on top."""
    m, experts = logits.shape
    threads = -(-experts // 128) * 32
    known = np.full((m, 4 * threads), -np.inf, np.float32)
    known[:, :experts] = logits
    with np.errstate(invalid="ignore"):
        most = np.fmax.reduce(known, axis=1, keepdims=True)
        away = most - known
        powers = _half_of_exp(np.fmin(away, np.float32(SMALLEST))) * np.float32(2)
        powers = np.where(away > SMALLEST, np.float32(0), powers)
        powers = np.where(np.isnan(away), away, powers).astype(np.float32)
        four = powers.reshape(m, threads, 4)
        total = (four[..., 0] + four[..., 1]) + (four[..., 2] + four[..., 3])
        lanes = total.reshape(m, -1, 32)
        for step in (16, 8, 4, 2, 1):
            lanes = lanes + lanes[..., np.arange(32) ^ step]
        whole = lanes[:, 0, 0]
        for warp in range(1, lanes.shape[1]):
            whole = whole + lanes[:, warp, 0]
        scores = powers[:, :experts] / whole[:, None]
    return np.where(np.isnan(scores), np.float32(0), scores).astype(np.float32)


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    eps: float = 1e-20,
    weights_dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """[weights, ids] of logits [M, E] FP32, bias [E] FP32: the kernel's bits."""
    x = logits.numpy()
    scores = sigmoid(x) if scoring == "sigmoid" else softmax(x)
    keys = scores if bias is None else scores + bias.numpy()
    last = np.isnan(keys) | np.isnan(x)
    # Stable: equal keys stay in the order of ids; a NaN is behind everything.
    order = np.lexsort((np.where(last, np.float32(0), -keys), last), axis=-1)[:, :top_k]
    chosen = np.take_along_axis(scores, order, axis=1)
    lanes = np.zeros((len(x), 32), np.float32)
    lanes[:, :top_k] = chosen
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, np.arange(32) ^ step]
    weights = chosen * np.float32(scale)
    if renormalize:
        weights = weights / (lanes[:, :top_k] + np.float32(eps))
    return [torch.from_numpy(weights).to(weights_dtype), torch.from_numpy(order.astype(np.int64))]


def quantized(latent: Tensor) -> list[Tensor]:
    """[latent_q, latent_scale], uint8, of rows [M, L] BF16: the round-up rule."""
    values, scales = quantize_mxfp8(latent)
    return [values.view(torch.uint8), scales]


def expert_plan(ids: Tensor) -> Tensor:
    """The units of ids [M, k]: int32 [1 + 10 units], the number first.

    A unit is an expert, a count of 1 to 8, and the places token * k + slot in order of tokens, -1
    behind the last. Units are in order of experts, then of tokens.
    """
    flat = ids.reshape(-1)
    units = []
    for expert in sorted(set(flat.tolist())):
        places = (flat == expert).nonzero()[:, 0].tolist()
        for first in range(0, len(places), 8):
            part = places[first : first + 8]
            units += [expert, len(part), *part, *[-1] * (8 - len(part))]
    return torch.tensor([len(units) // 10, *units], dtype=torch.int32)

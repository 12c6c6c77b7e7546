"""The ops' meaning again, in float64 NumPy, written from the formulas and not from the references.

No intermediate rounding except where a format is part of the meaning (MXFP4, MXFP8). Results are
float64; the caller rounds them to the op's dtype and allows for the op's roundings.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compare import wide

F64: TypeAlias = Any  # a float64 array


def rms(x: F64, eps: float) -> F64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def situ(g: F64, u: F64, beta: float, linear_beta: float) -> F64:
    return beta * np.tanh(g / beta) * sigmoid(g) * linear_beta * np.tanh(u / linear_beta)


def silu_mul(g: F64, u: F64) -> F64:
    return g * sigmoid(g) * u


def attention_projection(x: Tensor, weights: list[Tensor]) -> list[F64]:
    return [wide(x) @ wide(w).T for w in weights]


def attn_res(
    p: F64,
    blocks: list[Tensor],
    n: int,
    norm: Tensor,
    proj: Tensor,
    out_norm: Tensor | None,
    eps: float,
    out_eps: float,
) -> F64:
    """`p` is the prefix row that the mix reads (with the delta already in it)."""
    out = np.empty_like(p)
    for row in range(len(p)):
        bank = len(blocks) == 1 and blocks[0].dim() == 3
        slots = [wide(blocks[0][row, j]) if bank else wide(blocks[j][row]) for j in range(n)]
        values = [*slots, p[row]]
        scores = np.array(
            [(v * wide(norm) * wide(proj)).sum() / np.sqrt((v**2).mean() + eps) for v in values]
        )
        share = np.exp(scores - scores.max())
        share /= share.sum()
        mixed = sum(s * v for s, v in zip(share, values, strict=True))
        out[row] = mixed if out_norm is None else rms(mixed, out_eps) * wide(out_norm)
    return out


# Non-negative E4M3 values in order of their code; 0x7F, which would be 480, is NaN.
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:-1]


def nearest(x: F64, table: F64) -> F64:
    """Nearest table value of |x| with the sign of x; ties to the even index; saturating."""
    magnitude = np.minimum(np.abs(x), table[-1])
    high = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low = high - 1
    down, up = magnitude - table[low], table[high] - magnitude
    pick = np.where(down < up, low, np.where(up < down, high, np.where(low % 2 == 0, low, high)))
    return np.copysign(table[pick], x)


def mxfp8(x: F64, floor: bool) -> F64:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.floor(np.log2(np.where(amax > 0, amax, 1.0)))
    over = 0 if floor else (amax / 2.0**exponent > 1.75)
    scale = 2.0 ** np.clip(exponent - 8 + over, -127, 127)
    return (nearest(blocks / scale, E4M3) * scale).reshape(x.shape)


def mxfp4(packed: Tensor, scales: Tensor) -> F64:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = packed.numpy().astype(int)
    out = np.empty((*codes.shape[:-1], codes.shape[-1] * 2))
    out[..., 0::2], out[..., 1::2] = values[codes % 16], values[codes // 16]
    return out * np.repeat(2.0 ** (scales.numpy().astype(float) - 127), 32, axis=-1)


def experts(args: tuple[Any, ...], partials: bool = False) -> Any:
    (hidden, weights, ids, w13, s13, w2, s2, shared_x, gate_up, down, norm, up) = args[:12]
    name, beta, linear_beta, eps, rounding = args[12:]

    def act(g: F64, u: F64) -> F64:
        return situ(g, u, beta, linear_beta) if name == "situ" else silu_mul(g, u)

    x = wide(hidden)
    routed = np.zeros_like(x)
    for e in range(len(w13)):
        first = wide(w13[e]) if s13 is None else mxfp4(w13[e], s13[e])
        second = wide(w2[e]) if s2 is None else mxfp4(w2[e], s2[e])
        for token, slot in (ids == e).nonzero().tolist():
            row = x[token] if s13 is None else mxfp8(x[token], False)
            g, u = np.split(first @ row, 2)
            h = act(g, u)
            if s2 is not None:
                h = mxfp8(h, "hidden_floor" in rounding)
            routed[token] += float(weights[token, slot]) * (second @ h)
    shared = None
    if down is not None:
        s = x if shared_x is None else wide(shared_x)
        w = np.concatenate([wide(t) for t in gate_up])
        g, u = np.split(s @ w.T, 2, axis=-1)
        shared = act(g, u) @ wide(down).T
    if partials:
        return routed, shared
    return finish_experts(routed, shared, norm, up, eps)


def finish_experts(
    routed: F64, shared: F64 | None, norm: Tensor | None, up: Tensor | None, eps: float
) -> F64:
    if norm is not None:
        routed = rms(routed, eps) * wide(norm)
    if up is not None:
        routed = routed @ wide(up).T
    return routed if shared is None else routed + shared


def rounded(x: F64, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)

"""Functions of a row and a weight to make compositions of, and how they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from traced import define_mutable_op, trace

define_mutable_op()
F = torch.nn.functional


def linears(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    return torch.split(y, [3, 5], dim=-1)


def norm(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
    return y.to(x.dtype), y.amax(-1), y.argmax(-1)


def views(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w).view(-1, 4, 2)
    z = y.transpose(0, 1).reshape(4, -1)
    heads = y.reshape(x.shape[0] * 4, 2)
    return z.t().unsqueeze(0), heads, y[:, 1:3].flatten(), torch.cat([heads, heads])


def sizes(x: Tensor, w: Tensor) -> Any:
    m = x.shape[0]
    index = torch.arange(m, device=x.device, dtype=torch.int64)
    y = x.new_full((m, w.shape[0]), 0.5) * m
    mask = torch.full((12 * m, 2), float("-inf"), dtype=torch.float32, device=x.device)
    return index, y, mask[: m // 2], x.expand(3, m, x.shape[1])


def topk(x: Tensor, w: Tensor) -> Any:
    scores = torch.sigmoid(torch.mm(x, w.t()).to(torch.float32))
    values, ids = scores.topk(3, dim=-1, sorted=False)
    return values / (values.sum(-1, keepdim=True) + 1e-20), ids.to(torch.int32)


def mutation(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    out = torch.empty_like(y)
    bank = torch.zeros(x.shape[0], 3, y.shape[1], dtype=x.dtype, device=x.device)
    torch.ops.k3fuse_test.accumulate_(out, bank, y, 1, 0.5)
    torch.ops.k3fuse_test.accumulate_(out, bank, out + 1, 2, 2.0)
    return out, bank


def mutated_views(x: Tensor, w: Tensor) -> Any:
    bank = torch.zeros(4 * x.shape[0], 3, x.shape[1], dtype=x.dtype, device=x.device)
    out = torch.zeros(x.shape[0], 2, x.shape[1], dtype=x.dtype, device=x.device)
    torch.ops.k3fuse_test.accumulate_(out[:, 1], bank[: x.shape[0]], x, 0, 3.0)
    return out, bank


FUNCTIONS: list[Callable[..., Any]] = [
    linears,
    norm,
    views,
    sizes,
    topk,
    mutation,
    mutated_views,
]


def arguments(m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(m, 16, generator=rng).bfloat16()
    return x, torch.randn(8, 16, generator=rng).bfloat16()


def traced(function: Callable[..., Any], m: int = 6, **kwargs: Any) -> fx.Graph:
    x, w = arguments(m)
    if kwargs.get("dynamic") is None:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return trace(function, (x, w), **kwargs)


def bit_equal(actual: list[Tensor], expected: Any) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert torch.equal(a, e)

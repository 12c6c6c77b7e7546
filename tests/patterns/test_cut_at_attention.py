"""A graph that an engine cut at attention: its entry in one piece, the output projection before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from build import BF16, LEVELS, run, trace
from build import rows as values
from tolerances import assert_close

M, H, W, INNER, Q, KV, HEADS = 4, 64, 48, 96, 16, 32, 80


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(BF16)


def piece(latent: bool = True, mlp_last: bool = False, apart: bool = False) -> Callable[..., Any]:
    """From one layer's attention output to the next layer's attention inputs."""

    def f(
        out: Tensor, residual: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, a: Tensor,
        q_b: Tensor, n1: Tensor, n2: Tensor, nq: Tensor, nkv: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        first = F.linear(out, o) + residual
        both = F.linear(norm(first, n1), gate_up)
        if mlp_last:
            return first, both
        gate, up = both[:, :INNER], both[:, INNER:]
        second = F.linear(F.silu(gate) * up, down) + first
        row = norm(second, n2)
        if apart:
            q, kv = F.linear(row, a[:Q]), F.linear(row, a[Q:])
        else:
            q, kv = F.linear(row, a).split([Q, KV], -1)
        q, kv = (norm(q, nq), norm(kv, nkv)) if latent else (q * 2, kv * 2)
        return second, F.linear(q, q_b), kv

    return f


def inputs() -> list[Tensor]:
    shapes = [(M, W), (M, H), (H, W), (2 * INNER, H), (H, INNER), (Q + KV, H), (HEADS, Q)]
    rows = [values(*s, seed=i) * s[-1] ** -0.5 for i, s in enumerate(shapes)]
    return [*rows, *(values(n, seed=9 + i) for i, n in enumerate((H, H, Q, KV)))]


def counts(module: Any) -> dict[str, int]:
    return {name: c.found for name, c in run(module, "reference").counts().items() if c.found}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("apart", [False, True])
def test_both_projections_of_a_piece_are_found(apart: bool, level: str) -> None:
    module = trace(piece(apart=apart), *inputs(), level=level)
    original = copy.deepcopy(module)
    assert counts(module) == {"attention_projection": 1, "output_projection": 1}
    for got, wanted in zip(module(*inputs()), original(*inputs()), strict=True):
        assert_close(got, wanted, k=INNER, roundings=6)


@pytest.mark.parametrize("what", [{"latent": False}, {"mlp_last": True}])
def test_what_only_looks_like_an_entry_is_left(what: dict[str, bool]) -> None:
    """Linears whose parts nobody normalises, and an MLP that the cut left half."""
    module = trace(piece(**what), *inputs(), level="aot")
    assert counts(module) == {"output_projection": 1}

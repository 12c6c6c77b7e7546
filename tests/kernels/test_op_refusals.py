"""Arguments that ops refuse, each in one line that says what fits; controls that they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from op_cases import (
    Case,
    Draw,
    attention_projection,
    attn_res,
    experts,
    faked,
    mixed,
    output_add_rms_norm,
    replaced,
    router,
    tail,
)


def _prefetching(weights: list[Tensor], split: list[int]) -> Case:
    case = output_add_rms_norm(Draw(1), 2, 4, 8, "")
    return Case(case.op, case.args, {**case.kwargs, "prefetch": weights, "prefetch_split": split})


def _projection() -> Case:
    return attention_projection(Draw(1), 2, 8, 4)


def _mixed() -> Case:
    case = experts(Draw(1), 2, 4, 4, 2, 1, hidden=8, shared=4)
    return mixed(case, Draw(2), 3, bank=False, norm=True, mix=False)


REFUSALS: dict[str, tuple[Case, type[Exception], str]] = {
    "columns not dense": (
        replaced(_projection(), 0, torch.zeros(8, 2, dtype=torch.bfloat16).t()),
        ValueError,
        r"x has strides \(1, 2\).*contiguous\(\)",
    ),
    "weight not dense": (
        replaced(_projection(), 1, [torch.zeros(8, 4, dtype=torch.bfloat16).t()]),
        ValueError,
        r"weights\[0\] has strides",
    ),
    "three dimensions": (
        replaced(_projection(), 0, torch.zeros(1, 2, 8, dtype=torch.bfloat16)),
        ValueError,
        r"x has shape \(1, 2, 8\); expected 2 dimensions",
    ),
    "other K": (
        replaced(_projection(), 1, [torch.zeros(4, 9, dtype=torch.bfloat16)]),
        ValueError,
        r"weights\[0\] has shape \(4, 9\); dim 1 must be 8",
    ),
    "other dtype": (
        replaced(_projection(), 1, [torch.zeros(4, 8)]),
        TypeError,
        r"weights\[0\] is torch.float32; expected torch.bfloat16",
    ),
    "integer x": (
        replaced(_projection(), 0, torch.zeros(2, 8, dtype=torch.int32)),
        TypeError,
        r"x is torch.int32",
    ),
    "no weights": (replaced(_projection(), 1, []), ValueError, r"weights is empty"),
    "missing blocks": (
        replaced(attn_res(Draw(1), 2, 8, 3, delta=True, bank=False, norm=True, mix=False), 3, 4),
        ValueError,
        r"blocks holds 3 tensors for num_blocks=4",
    ),
    "short bank": (
        replaced(attn_res(Draw(1), 2, 8, 1, delta=True, bank=True, norm=True, mix=False), 3, 9),
        ValueError,
        r"blocks\[0\] has \d slots; num_blocks=9",
    ),
    "bank with too few rows": (
        replaced(
            attn_res(Draw(1), 2, 8, 1, delta=False, bank=True, norm=True, mix=False),
            2,
            [torch.zeros(1, 1, 8, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"blocks\[0\] has 1 rows for M=2 tokens; pass at least 2",
    ),
    "top_k": (
        replaced(router(Draw(1), 2, 8, 4, 0, 2), 4, 5),
        ValueError,
        r"top_k=5; it must be within 1..4",
    ),
    "scoring": (
        replaced(router(Draw(1), 2, 8, 4, 0, 2), 5, "tanh"),
        ValueError,
        r"scoring='tanh'; known: sigmoid, softmax",
    ),
    "one scale": (
        replaced(experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True), 6, None),
        ValueError,
        r"pass both of w13_scale and w2_scale",
    ),
    "scale shape": (
        replaced(
            experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True),
            4,
            torch.zeros(2, 64, 2, dtype=torch.uint8),
        ),
        ValueError,
        r"w13_scale has shape \(2, 64, 2\); expected \(2, 64, 1\)",
    ),
    "expert id": (
        replaced(experts(Draw(1), 2, 4, 4, 2, 1), 2, torch.tensor([[0], [2]])),
        ValueError,
        r"topk_ids spans 0..2; ids must be within 0..1",
    ),
    "rounding": (
        replaced(experts(Draw(1), 2, 4, 4, 2, 1), 16, "floor"),
        ValueError,
        r"rounding='floor' holds \['floor'\]; known.*hidden_floor",
    ),
    "activation": (
        replaced(experts(Draw(1), 2, 4, 4, 2, 1), 12, "gelu"),
        ValueError,
        r"activation='gelu'; known: situ, silu",
    ),
    "shared down without gate": (
        replaced(experts(Draw(1), 2, 4, 4, 2, 1, shared=4), 8, []),
        ValueError,
        r"shared_gate_up holds 0 weights, shared_row is absent and shared_down is given",
    ),
    "row and gate and up": (
        replaced(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            8,
            [torch.zeros(8, 8, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"shared_row is given with shared_hidden or shared_gate_up",
    ),
    "values without scales": (
        replaced(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True), 19, None
        ),
        ValueError,
        r"pass both of latent_q and latent_scale",
    ),
    "scales of other columns": (
        replaced(
            experts(Draw(1), 2, 64, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            19,
            torch.zeros(2, 1, dtype=torch.uint8),
        ),
        ValueError,
        r"latent_scale has shape \(2, 1\); dim 1 must be 2",
    ),
    "row of other columns": (
        replaced(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            17,
            torch.zeros(2, 5, dtype=torch.bfloat16),
        ),
        ValueError,
        r"shared_down has shape \(8, 4\); dim 1 must be 5",
    ),
    "mix without a prefix": (
        replaced(_mixed(), 20, None),
        ValueError,
        r"prefix not given, but score_norm_weight",
    ),
    "mix without a projection": (
        replaced(_mixed(), 24, None),
        ValueError,
        r"score_proj_weight not given, but prefix",
    ),
    "blocks alone": (
        Case(_mixed().op, (*_mixed().args[:20], None, _mixed().args[21]), _mixed().kwargs),
        ValueError,
        r"not given, but blocks",
    ),
    "mix of other blocks": (
        replaced(_mixed(), 22, 4),
        ValueError,
        r"blocks holds 3 tensors for num_blocks=4",
    ),
    "prefix of other columns": (
        replaced(_mixed(), 20, torch.zeros(2, 4, dtype=torch.bfloat16)),
        ValueError,
        r"prefix has shape \(2, 4\); dim 1 must be 8",
    ),
    "prefix of other tokens": (
        replaced(_mixed(), 20, torch.zeros(3, 8, dtype=torch.bfloat16)),
        ValueError,
        r"prefix has 3 rows for M=2",
    ),
    "prefix of another type": (
        replaced(_mixed(), 20, torch.zeros(2, 8)),
        TypeError,
        r"prefix is torch.float32",
    ),
    "three gate and up": (
        replaced(
            router(Draw(1), 2, 4, 4, 4, 2, shared=3),
            10,
            3 * [torch.zeros(6, 4, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"shared_gate_up holds 3 weights",
    ),
    "odd gate and up": (
        replaced(
            router(Draw(1), 2, 4, 4, 4, 2, shared=3), 10, [torch.zeros(5, 4, dtype=torch.bfloat16)]
        ),
        ValueError,
        r"shared_gate_up\[0\] has 5 rows; merged gate and up have even",
    ),
    "activation of the router": (
        replaced(router(Draw(1), 2, 4, 4, 4, 2, shared=3), 11, "gelu"),
        ValueError,
        r"activation='gelu' for shared_gate_up; known: situ, silu",
    ),
    "prefetch not dense": (
        _prefetching([torch.zeros(8, 4).t()], []),
        ValueError,
        r"prefetch\[0\] has strides \(1, 4\)",
    ),
    "rows that a prefetched weight has not": (
        _prefetching([torch.zeros(8, 4)], [9]),
        ValueError,
        r"prefetch_split\[0\]=9; prefetch\[0\] has 8 rows",
    ),
    "other M": (
        replaced(tail(Draw(1), 2, 4, 4), 1, torch.zeros(3, 4, dtype=torch.bfloat16)),
        ValueError,
        r"shared has 3 rows for M=2 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_arguments(name: str) -> None:
    case, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        case()


@pytest.mark.parametrize(
    "name", ["columns not dense", "other K", "top_k", "one scale", "prefetch not dense"]
)
def test_shape_errors_appear_while_tracing(name: str) -> None:
    case, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        faked(case)()


def test_controls_of_the_refusals_run() -> None:
    for case in (
        _projection(),
        attn_res(Draw(1), 2, 8, 3, delta=True, bank=False, norm=True, mix=False),
        attn_res(Draw(1), 2, 8, 1, delta=True, bank=True, norm=True, mix=False),
        router(Draw(1), 2, 8, 4, 0, 2),
        experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True),
        experts(Draw(1), 2, 4, 4, 2, 1, shared=4),
        _mixed(),
        tail(Draw(1), 2, 4, 4),
        _prefetching([torch.zeros(8, 4)], [8]),
        _prefetching([], []),
    ):
        assert all(t.isfinite().all() for t in case())

"""Every E8M0 scale, extreme FP4 codes, rows that hold no numbers."""

from __future__ import annotations

import pytest
import torch
from expert_runs import BF16, check, exact_rows, launch, small
from torch import Tensor

from k3fuse.kernels.experts.cases import Problem, problem

pytest.importorskip("cutlass")

EXPERTS = 4  # as many as slots: every token visits each of them
# The twin, and the block-scaled engine.
ENGINES = pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.nightly)])


def alone(block: int, m: int, seed: int) -> Problem:
    """Every slot's row can be seen: the tokens visit the experts in order."""
    made = problem(small(8, block=block), m, seed=seed, experts=EXPERTS)
    made.ids.copy_(torch.arange(EXPERTS).expand(m, -1))
    return made


def near(actual: Tensor, expected: Tensor) -> None:
    """Equal within one unit of BF16 of each element, zeros, infinities and NaN in their places."""
    have, want = actual.double(), expected.double()
    same = (have == want) | (have.isnan() & want.isnan())
    assert ((have - want).abs()[~same] <= 2.0**-7 * want.abs()[~same]).all()


def rows_are_right(made: Problem, block: int) -> None:
    launch(small(8, block=block), made)
    for expert in range(EXPERTS):
        near(made.rows[:, expert], exact_rows(made, expert))


@ENGINES
def test_every_scale_of_the_second_matrix(block: int) -> None:
    made = alone(block, 2, seed=1)
    made.w13_scale.sub_(6)  # a small hidden row, so that 2**127 does not overflow
    rows = made.w2_scale.shape[1]
    made.w2_scale.copy_((torch.arange(rows) % 256).to(torch.uint8)[None, :, None])
    rows_are_right(made, block)
    assert made.rows.isnan().any(2).all()
    assert int(made.rows.isnan().sum()) == 2 * EXPERTS * len(range(255, rows, 256))
    # A scale of 2**-127 is a subnormal number, and no zero.
    assert (made.rows[..., 0].abs() > 2.0**-133).any()
    assert (made.rows[..., 254].float().abs() > 2.0**120).any()


@ENGINES
def test_every_scale_of_the_first_matrix(block: int) -> None:
    made = alone(block, 3, seed=2)
    made.x.copy_((made.x.float() * 2.0**-30).to(BF16))  # so that 2**127 does not overflow
    rows = made.w13_scale.shape[1]
    codes = torch.arange(EXPERTS * rows) % 255
    made.w13_scale.copy_(codes.to(torch.uint8).reshape(EXPERTS, rows, 1))
    assert set(codes.tolist()) == set(range(255))
    rows_are_right(made, block)
    assert made.rows.isfinite().all()
    assert (made.rows != 0).any(2).all()


@ENGINES
def test_a_scale_of_nan_spoils_the_expert_and_nothing_else(block: int) -> None:
    made = alone(block, 2, seed=3)
    made.w13_scale[1, 70, 27] = 255
    made.w2_scale[2, 5, 1] = 255
    rows_are_right(made, block)
    nan = made.rows.isnan()
    assert nan[:, 1].all()
    assert nan[:, 2, 5].all()
    assert int(nan.sum()) == 2 * (made.config.latent + 1)


@ENGINES
@pytest.mark.parametrize("code", [0x77, 0xFF, 0x88, 0x00, 0x1F, 0x90])
def test_extreme_codes(code: int, block: int) -> None:
    """Largest values, both zeros, the subnormal ones."""
    made = alone(block, 2, seed=4)
    made.w13[0].fill_(code)
    made.w2[1].fill_(code)
    made.w13[2].fill_(code)
    made.w2[2].fill_(code)
    rows_are_right(made, block)
    check(made)


@ENGINES
@pytest.mark.parametrize("m", [3, 13])
def test_rows_of_no_numbers_stay_alone(m: int, block: int) -> None:
    variant = small(8 if m <= 8 else 64, block=block)

    def fresh() -> Problem:
        made = problem(variant, m, seed=5, experts=EXPERTS)
        made.ids.copy_(torch.arange(EXPERTS).expand(m, -1))
        return made

    clean, made = fresh(), fresh()
    launch(variant, clean)
    made.x[1, 37], made.x[2, 0] = float("nan"), float("inf")
    made.x[0] = 0
    if made.shared is not None:
        made.shared[0][1, 3] = float("nan")
    launch(variant, made)
    assert made.routed[1].isnan().all()
    assert made.routed[2].isnan().all()
    assert (made.routed[0] == 0).all()
    assert torch.equal(made.routed[3:], clean.routed[3:])
    assert made.shared is not None
    assert clean.shared is not None
    assert made.shared[2][1].isnan().all()
    assert torch.equal(made.shared[2][2:], clean.shared[2][2:])

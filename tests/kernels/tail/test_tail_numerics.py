"""What the tail computes, a cluster a rank: order of sums, roundings, special values, no batch."""

from __future__ import annotations

import pytest
import torch
from tail_runs import check, kernel, problem_of, rows_of, run, same

from k3fuse.kernels.tail.problem import ARMED, BF16

pytest.importorskip("cutlass")

BIG = 2.0**24
# 2^24 + 1 is 2^24 in FP32: the 1 survives only where the large terms have met before it.
ORDERS: list[tuple[tuple[float, ...], float]] = [
    ((BIG, 1.0, -BIG), 0.0),
    ((BIG, -BIG, 1.0), 1.0),
    ((1.0, BIG, -BIG), 0.0),
    ((-BIG, BIG, -0.0, 1.0), 1.0),
]
BASE = {"max_m": 16}


@pytest.mark.parametrize("two_shot", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_ranks_are_added_in_order(two_shot: int) -> None:
    variant = kernel(4, 8, two_shot=two_shot, **BASE)
    problem = problem_of(variant, 5)
    width = problem.config.hidden
    tokens = [values for values, _ in ORDERS]
    # Tokens 0 to 3 have nothing but the latent sum; the last one nothing but the shared one.
    problem.routed = rows_of(4, 3584, [*tokens, (0.0,)])
    problem.shared = rows_of(4, width, [*[(0.0,)] * 4, (BIG, 1.0, -BIG, 2.0)])
    run(variant, problem)
    check(problem)
    for token, (_, total) in enumerate(ORDERS):
        assert bool((problem.out[0][token] != 0).any()) == bool(total), token
    assert (problem.out[0][4] == 2.0).all()


@pytest.mark.parametrize("wrong", ["rows", "scaled", "stale", "partial dropped", "norm of another"])
def test_garbage_fails(wrong: str) -> None:
    variant = kernel(4, 8, **BASE)
    problem = problem_of(variant, 2)
    # The kernel is run once for the control, the first of the wrong results.
    if wrong == "rows":
        run(variant, problem)
        check(problem)
    else:
        problem.out = [problem.expected() for _ in problem.out]
    if wrong == "rows":
        problem.out = [row.roll(1, 0) for row in problem.out]
    elif wrong == "scaled":
        problem.out = [(row.float() * 1.01).to(BF16) for row in problem.out]
    elif wrong == "stale":
        problem.out = [torch.zeros_like(row) for row in problem.out]
    elif wrong == "partial dropped":
        problem.routed[3] = torch.zeros_like(problem.routed[3])
    else:
        problem.norm = problem.norm.roll(1)
    with pytest.raises(AssertionError):
        check(problem)


def test_special_values_stay_in_their_row() -> None:
    variant = kernel(4, 8, **BASE)
    clean = problem_of(variant, 4, seed=3)
    run(variant, clean)
    problem = problem_of(variant, 4, seed=3)
    for rows in (problem.routed, problem.shared):
        rows[:] = [row.clone() for row in rows]
    problem.routed[2][0, 100] = float("nan")
    problem.routed[1][1, 7] = float("inf")
    problem.shared[3][1, 9] = -float("inf")
    # NaNs of all signs and payloads around the sentinel, and a row of nothing but -0.0.
    odd = [0x80000001, 0x8000FFFF, 0xFF808000, 0x7FC08000, 0xFFC0FFC0, 0x7F817F81, 0x80008000]
    words = torch.tensor([w - (1 << 32) if w >> 31 else w for w in odd], dtype=torch.int32)
    problem.shared[0][2, : 2 * len(odd)] = words.view(BF16)
    for row in problem.routed:
        row[2] = -0.0
    run(variant, problem)
    assert problem.disarmed() == ""
    assert problem.unequal() == ""
    out = problem.out[0]
    assert out[0].isnan().all()
    assert out[1].isnan().any()
    wanted = problem.expected()
    # Without a latent row the shared sum is all there is, exact but for the sign of zeros.
    assert same(torch.where(out[2] == 0, 0, out[2]), torch.where(wanted[2] == 0, 0, wanted[2]))
    assert out[2].isnan().any()
    assert not out[2].isnan().all()
    assert same(out[3], clean.out[0][3])
    assert not any((box[: problem.config.box.normed // 4] != ARMED).any() for box in problem.boxes)


@pytest.mark.parametrize(
    "forms",
    [
        [{"units": 1}, {"units": 2, "two_shot": 1, "multicast": 0}],
        pytest.param(
            [{"units": 2}, {"units": 1, "multicast": 0}, {"units": 1, "packed": 0}],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_form_has_the_same_bits(forms: list[dict[str, int]]) -> None:
    """A batch of nine in forms of the kernel, and its tokens alone."""
    batch = None
    for tuning in forms:
        variant = kernel(4, 16, 128, **tuning, **BASE)
        problem = problem_of(variant, 9, seed=1)
        run(variant, problem)
        check(problem)
        batch = batch or problem
        assert all(same(out, batch.out[0]) for out in problem.out), tuning
    assert batch is not None
    variant = kernel(4, 8, 128, units=forms[0]["units"], **BASE)
    for token in (0, 8):
        one = problem_of(variant, 1, seed=1)
        rows_ = slice(token, token + 1)
        one.routed = [row[rows_] for row in batch.routed]
        one.shared = [row[rows_] for row in batch.shared]
        one.norms, one.weights = batch.norms, batch.weights
        run(variant, one)
        assert same(one.out[0][0], batch.out[0][token])


@pytest.mark.parametrize("round_before", [0, 1])
def test_the_normalised_row_is_rounded_before_the_weight_or_not(round_before: int) -> None:
    variant = kernel(2, 8, round_before=round_before)
    problem = problem_of(variant, 3, seed=2)
    run(variant, problem)
    check(problem)
    layout = problem.config.box
    start = layout.normed_at(0) // 4
    got = problem.boxes[1][start : start + 3 * 1792].view(BF16).reshape(3, 3584)
    problem.config = type(problem.config)(
        **{**vars(problem.config), "round_before": not problem.config.round_before}
    )
    other = problem.normed()
    problem.config = type(problem.config)(
        **{**vars(problem.config), "round_before": bool(round_before)}
    )
    wanted = problem.normed()
    # rsqrt is within two units of FP32, so a rounding may fall the other way now and then.
    assert (got != wanted).sum() < 10
    assert (wanted != other).sum() > 1000


def test_rows_may_lie_apart() -> None:
    variant = kernel(4, 8, **BASE)
    problem = problem_of(variant, 3, seed=4)
    for rows in (problem.routed, problem.shared):
        for rank, row in enumerate(rows):
            wide = torch.full((3, row.shape[1] + 16), float("nan"), dtype=BF16)
            wide[:, : row.shape[1]] = row
            rows[rank] = wide[:, : row.shape[1]]
    run(variant, problem)
    check(problem)

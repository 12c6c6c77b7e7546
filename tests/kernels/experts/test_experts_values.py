"""Values of the experts kernel: routings, batches, ids that are no experts, wrong results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_runs import check, core, judge, launch, small, weights_once

from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.experts.builder import k3
from k3fuse.kernels.experts.cases import Problem, kernel, problem
from k3fuse.kernels.experts.reference import Activation

pytest.importorskip("cutlass")


@pytest.mark.parametrize(
    ("m", "kind"),
    [(1, "uniform"), (2, "same"), (8, "skewed"), (9, "uniform"), (16, "same"), (33, "skewed"),
     (64, "same")],
)  # fmt: skip
def test_routings(m: int, kind: str) -> None:
    variant = small(8 if m <= 8 else 64)
    made = problem(variant, m, seed=m, experts=7, kind=kind)
    # An expert without a token is not touched: its scales are NaN.
    for expert in set(range(7)) - set(made.ids.flatten().tolist()):
        made.w13_scale[expert] = 255
    report = launch(variant, made)
    check(made)
    weights_once(made, report)
    if kind == "same":
        assert made.used == 4


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    whole = problem(small(64), 33, seed=4, experts=6)
    launch(small(64), whole)
    for m, first in ((1, 0), (1, 32), (7, 3), (8, 20)):
        rows = slice(first, first + m)
        part = problem(small(8), m, seed=4, experts=6)
        part = replace(
            part, x=whole.x[rows], ids=whole.ids[rows], weights=whole.weights[rows],
            w13=whole.w13, w13_scale=whole.w13_scale, w2=whole.w2, w2_scale=whole.w2_scale,
        )  # fmt: skip
        launch(small(8), part)
        assert torch.equal(part.routed, whole.routed[rows]), (m, first)


def test_an_expert_may_have_any_number_of_slots() -> None:
    """A token's slots name one expert several times; up to 256 pairs of one expert."""
    for m, variant in ((3, small(8)), (64, small(64))):
        made = problem(variant, m, seed=m, experts=4)
        made.ids.fill_(1)
        launch(variant, made)
        check(made)


@pytest.mark.parametrize("m", [2, 12])
def test_ids_out_of_range_add_nothing(m: int) -> None:
    variant = small(8 if m <= 8 else 64)
    made = problem(variant, m, seed=1, experts=5)
    kept = made.ids.clone(), made.weights.clone()
    made.ids[0, 1], made.ids[0, 3], made.ids[1, 0] = -1, 5, (1 << 32) + 1
    made.ids[m - 1] = torch.tensor([896, -(2**63), 2**31, 1023])
    launch(variant, made)
    wrong = (made.ids < 0) | (made.ids >= 5)
    assert int(wrong.sum()) == (6 if m == 2 else 7)
    kept[1][wrong] = 0
    assert judge(made, replace(made, ids=kept[0], weights=kept[1]).expected()).ok
    assert not judge(made, replace(made, ids=kept[0]).expected()).ok  # the control
    assert (made.routed[m - 1] == 0).all()
    assert made.idle() == ""


def test_options() -> None:
    """The floor rule, FP32 weights and 32-bit ids; rows of x lie apart."""
    variant = small(8, floor=1, float_weights=1, wide_ids=0)
    made = problem(variant, 5, seed=2, experts=6)
    assert (made.ids.dtype, made.weights.dtype) == (torch.int32, torch.float32)
    buffer = torch.full((5, 904), float("nan"), dtype=torch.bfloat16)
    buffer[:, :896] = made.x
    made = replace(made, x=buffer[:, :896])
    values = {**made.values(), "x": buffer}
    assert values["x_pitch"] == 904
    run_sequence([Launch(variant, [values])])
    check(made)
    up = problem(small(8), 5, seed=2, experts=6)
    up = replace(up, ids=made.ids.long(), weights=made.weights)
    assert not torch.equal(up.expected(), made.expected())  # the rules differ here


def test_scratch_serves_layers_of_any_size() -> None:
    """Four launches in a row, M from 17 to 1 and up again, with one scratch."""
    variant = small(64)
    layers = [problem(variant, m, seed=m, experts=5) for m in (17, 1, 9, 24)]
    last = layers[-1]
    layers = [replace(layer, rows=last.rows, arrivals=last.arrivals) for layer in layers]
    run_sequence([Launch(variant, [layer.values()], layer.needed()) for layer in layers])
    for layer in layers:
        check(layer)


def wrong_ones(made: Problem) -> dict[str, Problem]:
    """The same problem, understood wrongly."""
    inter = made.config.inter
    scale13, scale2 = made.w13_scale.clone(), made.w2_scale.clone()
    scale13[:, : inter // 2] += 1
    scale2[:, :, 0] += 1
    return {
        "wrong expert": replace(made, ids=(made.ids + 1) % made.w13.shape[0]),
        "swapped gate and up": replace(
            made, w13=made.w13.roll(inter, 1), w13_scale=made.w13_scale.roll(inter, 1)
        ),
        "wrong beta": replace(made, activation=Activation("situ", 5.0, 25.0)),
        "wrong linear beta": replace(made, activation=Activation("situ", 4.0, 20.0)),
        "no linear beta": replace(made, activation=Activation("silu", 0.0, 0.0)),
        "gate scales off by one": replace(made, w13_scale=scale13),
        "a block's scale off by one": replace(made, w2_scale=scale2),
        "weights of another slot": replace(made, weights=made.weights.roll(1, 1)),
    }


def test_wrong_results_are_refused() -> None:
    variant = small(8)
    made = problem(variant, 6, seed=3, experts=6)
    launch(variant, made)
    check(made)  # the control
    for name, wrong in wrong_ones(made).items():
        assert not judge(made, wrong.expected()).ok, name


# (tp, m, experts, kind, most warp-instructions without moves)
REAL = [(16, 1, 16, "uniform", 5_700_000)]
WIDE = [
    (tp, m, 18, kind, None)
    for tp in (8, 16)
    for m in (1, 2, 8, 9, 16, 33, 64)
    for kind in ("uniform", "skewed", "same")
]


@pytest.mark.parametrize(
    ("tp", "m", "experts", "kind", "instructions"),
    [*REAL, *(pytest.param(*row, marks=pytest.mark.nightly) for row in WIDE)],
)
def test_real_size(tp: int, m: int, experts: int, kind: str, instructions: int | None) -> None:
    from k3fuse.kernels.experts.cases import most

    variant = kernel("sm_103a", k3(tp, most(m)))
    made = problem(variant, m, seed=m, experts=experts, kind=kind)
    report = launch(variant, made)
    check(made)
    weights_once(made, report)
    if m == 1:  # with few experts for many tokens most of the bytes are rows of x
        asked = sum(traffic.requested for traffic in report.traffic.values())
        assert asked <= sum(report.needed.values()) * 1.06
    if instructions is not None:
        assert core(report) <= instructions

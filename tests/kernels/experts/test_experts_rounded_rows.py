"""Rows that a router has rounded to MXFP8: the same bits as rows that the kernel rounds itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from block_runs import HALVES, LINES, block
from expert_runs import check, core, judge, launch, small
from torch import Tensor

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.common.microscaling import quantize_mxfp8
from k3fuse.kernels.experts.builder import BUILDER, k3
from k3fuse.kernels.experts.cases import Problem, kernel, most, problem
from stored import store

pytest.importorskip("cutlass")


def special(x: Tensor) -> None:
    """NaN, infinity, zeros, the ends of the exponent, -0.0."""
    x[0, 3], x[0, 40], x[0, 70] = float("nan"), float("inf"), -0.0
    for place, factor in enumerate((0.0, 2.0**-125, 2.0**-133, 2.0**118, 2.0**126)):
        x[1, 64 + 32 * place : 96 + 32 * place] *= factor


def both(
    m: int, seed: int, shape: dict[str, int] | None = None, **how: str
) -> tuple[Problem, Problem, RunReport, RunReport]:
    """One problem on rows in BF16 and in MXFP8, and the reports of its runs.

    shape: of the block-scaled engine, else the twin.
    """
    size = 8 if m <= 8 else 64
    plain, rounded = small(size), small(size, mxfp8=1)
    if shape is not None:
        plain, rounded = block(shape, size), block(shape, size, mxfp8=1)
    mine = problem(plain, m, seed, experts=7, **how)  # type: ignore[arg-type]
    other = problem(rounded, m, seed, experts=7, **how)  # type: ignore[arg-type]
    if m > 1:
        special(mine.x)
        special(other.x)
    return mine, other, launch(plain, mine), launch(rounded, other)


def requested(report: RunReport, *names: str) -> int:
    """Bytes asked for, of some parameters."""
    return sum(t.requested for (_, name, _, _), t in report.traffic.items() if name in names)


@pytest.mark.parametrize(
    ("m", "kind"), [(1, "uniform"), (3, "skewed"), (12, "same"), (33, "uniform")]
)
def test_the_bits_are_the_same_and_less_is_read(m: int, kind: str) -> None:
    mine, other, plain, rounded = both(m, seed=m, kind=kind)
    assert torch.equal(mine.routed.view(torch.int16), other.routed.view(torch.int16))
    if m > 1:
        assert bool(mine.routed[0].isnan().all())
        assert not bool(mine.routed[2:].isnan().any())
    else:
        check(other)
    # A row of 896 columns: 1792 bytes in BF16, 896 and 28 in MXFP8.
    assert requested(rounded, "x", "x_scale") * 1792 == requested(plain, "x") * (896 + 28)
    assert core(rounded) <= 0.88 * core(plain)


@pytest.mark.parametrize(
    ("m", "shape"),
    [(3, LINES), pytest.param(33, LINES, marks=pytest.mark.nightly)]
    + [pytest.param(m, HALVES, marks=pytest.mark.nightly) for m in (1, 12, 33)],
)
def test_the_block_scaled_engine_takes_them_too(m: int, shape: dict[str, int]) -> None:
    """Each row once a pair and CTA, as from scratch; nothing is read in BF16 or written."""
    mine, other, plain, rounded = both(m, m, shape)
    assert torch.equal(mine.routed.view(torch.int16), other.routed.view(torch.int16))
    if m > 1:
        assert bool(mine.routed[0].isnan().all())
        assert not bool(mine.routed[2:].isnan().any())
    rows = ("x8_tiles", "x8_scale")
    fetched = sum(
        t.requested for (_, name, _, how), t in plain.traffic.items()
        if name in ("x8", *rows) and how == "read"
    )  # fmt: skip
    assert requested(rounded, *rows) == fetched
    left = requested(plain, "x", "x8", *rows) - fetched
    assert left == m * shape["latent"] * 2 + m * shape["latent"] * 33 // 32
    assert core(rounded) < core(plain)


def test_rows_of_another_rounding_are_noticed() -> None:
    """The control: an exponent off by one, values of another row."""
    variant = small(8, mxfp8=1)
    made = problem(variant, 4, seed=1, experts=7)
    launch(variant, made)
    right = made.routed.clone()
    values, scales = quantize_mxfp8(made.x)
    codes = values.view(torch.uint8)
    for wrong in (
        {"x": codes, "x_scale": scales + (torch.arange(28) == 5).to(torch.uint8)},
        {"x": codes.roll(1, 0).contiguous(), "x_scale": scales},
        {"x": codes, "x_scale": scales.roll(1, 1).contiguous()},
    ):
        run_sequence([Launch(variant, [{**made.values(), **wrong}])])
        assert not torch.equal(made.routed, right)
        assert not judge(made).ok
    launch(variant, replace(made))
    assert torch.equal(made.routed, right)


def test_the_option_is_checked() -> None:
    with pytest.raises(VariantError) as error:
        BUILDER.variant("sm_103a", {}, {"mxfp8": 2})
    assert re.search("mxfp8=2", str(error.value))
    plan = BUILDER.plan(BUILDER.variant("sm_103a", {}, {"mxfp8": 1}))
    names = [p.name for p in plan.parameters]
    assert names[:3] == ["x", "x_scale", "ids"]
    assert "x_pitch" not in names
    assert "x_pitch" in [
        p.name for p in BUILDER.plan(BUILDER.variant("sm_103a", {}, {})).parameters
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64])
@pytest.mark.parametrize("engine", [0, 1])
def test_real_sizes(tp: int, m: int, engine: int) -> None:
    found = []
    for mxfp8 in (0, 1):
        variant = kernel("sm_103a", k3(tp, most(m)), mxfp8=mxfp8, block=engine)
        made = problem(variant, m, seed=m, kind="skewed")
        report = launch(variant, made)
        check(made)
        assert store().get(variant).resources.spill_bytes == 0
        found.append((made.routed, core(report), requested(report, "x", "x_scale")))
    (plain, some, wide), (rounded, fewer, narrow) = found
    assert torch.equal(plain, rounded)
    assert fewer < some
    if engine == 0:
        assert narrow * 7168 == wide * (3584 + 112)

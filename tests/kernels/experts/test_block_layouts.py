"""The block-scaled engine on weights as vLLM keeps them for its TRTLLM kernels.

The same bits as in the checkpoint's order; each byte of an expert once, but for scales of FC2 whose
piece is not all of one CTA's; what lies in the padding is neither asked for nor used.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_runs import block
from expert_runs import BF16, check, core, judge, launch
from test_experts_values import wrong_ones
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.experts.builder import config_of, k3
from k3fuse.kernels.experts.cases import Problem, kernel, most, problem
from k3fuse.kernels.experts.config import CLUSTER, PIECE
from k3fuse.kernels.experts.layouts import pieces
from k3fuse.kernels.simulator import TensorMap

pytest.importorskip("cutlass")

# As on 16 ranks: padded rows, half a block of columns, two blocks in a tile of FC1.
PADDED = {"latent": 1792, "inter": 192, "hidden": 0, "shared": 0, "top_k": 2}
# As on 8 ranks: three blocks of columns, one in a tile of FC1.
WHOLE = {**PADDED, "inter": 384}
SHAPES = pytest.mark.parametrize("shape", [PADDED, WHOLE], ids=["padded", "whole"])
EXPERTS = 3


class Spoiled(Problem):
    """Garbage in the padding: the largest weights, and scales that are NaN."""

    def values(self) -> dict[str, Value]:
        found, config = super().values(), self.config
        w13, w13_scale, w2, w2_scale = (
            tensor_of(found[name]) for name in ("w13", "w13_scale", "w2", "w2_scale")
        )
        rows = torch.arange(2 * config.stored)[None, :, None].expand(w13_scale.shape)
        blocks = torch.arange(config.stored // 32).expand(w2_scale.shape)
        w13[:, 2 * config.inter :] = 0x77
        w2[:, :, config.inter // 2 :] = 0x77
        w13_scale[pieces(rows) >= 2 * config.inter] = 255
        w2_scale[pieces(blocks) >= config.blocks2] = 255
        return found


def tensor_of(value: Value) -> Tensor:
    found = value.tensor if isinstance(value, TensorMap) else value
    assert isinstance(found, Tensor)
    return found


def both(shape: dict[str, int], m: int, **config: int) -> tuple[Variant, Variant]:
    """The kernels of the two orders."""
    plain, other = (block(shape, most(m), shuffled=order, **config) for order in (0, 1))
    return plain, other


def in_order(made: Problem, variant: Variant) -> Spoiled:
    """The same call in the other order of weights, with outputs of its own."""
    fresh = {"rows": torch.empty_like(made.rows), "routed": torch.empty_like(made.routed)}
    given = {**vars(replace(made, config=config_of(variant))), **fresh}
    return Spoiled(**{**given, "arrivals": torch.zeros_like(made.arrivals)})


def same_bits(one: Problem, two: Problem) -> None:
    """Rows of slots and their sums; NaN equals itself."""
    for a, b in ((one.rows, two.rows), (one.routed, two.routed)):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    assert two.idle() == ""


def asked_once(made: Problem, report: RunReport) -> None:
    """Each byte of the experts that have a token is asked for once, and no other byte.

    Of the scales of FC2 whole pieces of 128 rows: those that lie in two CTAs' rows, twice.
    """
    for name in ("w13", "w13_scale", "w2"):
        read = report.traffic[0, name, 0, "read"]
        assert read.requested == read.distinct == made.needed()[name], name
    rows = made.config.rows2
    groups = sum(
        (part * rows + rows - 1) // 128 - part * rows // 128 + 1 for part in range(CLUSTER)
    )
    read = report.traffic[0, "w2_scale", 0, "read"]
    size = made.config.stored // 128 * PIECE
    assert read.requested == made.used * groups * size
    assert read.distinct == made.used * made.config.latent // 128 * size


def compared(shape: dict[str, int], m: int, kind: str, **config: int) -> Problem:
    plain, other = both(shape, m, **config)
    one = problem(plain, m, seed=m, experts=EXPERTS, kind=kind)
    two = in_order(one, other)
    launch(plain, one)
    report = launch(other, two)
    same_bits(one, two)
    asked_once(two, report)
    return two


def test_the_bits_are_those_of_the_checkpoints_order() -> None:
    """Nine tokens in two units; garbage in the padding."""
    made = compared(PADDED, 9, "skewed")
    check(made)
    for name, wrong in wrong_ones(made).items():
        assert not judge(made, wrong.expected()).ok, name


def test_every_scale_is_the_scale_of_its_row() -> None:
    """All bytes in both matrices, each row with its own; NaN where a row's byte is 255."""
    m, (plain, other) = 3, both(PADDED, 9)
    one = problem(plain, m, seed=2, experts=EXPERTS)
    one.x.copy_((one.x.float() * 2.0**-30).to(BF16))
    rows13, rows2 = one.w13_scale.shape[1], one.w2_scale.shape[1]
    codes = torch.arange(EXPERTS * rows13) % 255
    one.w13_scale.copy_(codes.to(torch.uint8).reshape(EXPERTS, rows13, 1))
    one.w2_scale.copy_((torch.arange(rows2) % 256).to(torch.uint8)[:, None])
    assert set(codes.tolist()) == set(range(255))
    two = in_order(one, other)
    launch(plain, one)
    launch(other, two)
    same_bits(one, two)
    assert int(two.rows.isnan().sum()) == m * 2 * rows2 // 256
    two.w13_scale.copy_(two.w13_scale.roll(1, 1))  # the control: those of the next rows
    launch(other, two)
    with pytest.raises(AssertionError):
        same_bits(one, two)


def test_a_row_of_no_numbers_stays_alone() -> None:
    _, other = both(PADDED, 9)
    clean, made = (problem(other, 9, seed=5, experts=EXPERTS, kind="same") for _ in range(2))
    made.x[1, 37], made.x[2, 0] = float("nan"), float("inf")
    launch(other, clean)
    launch(other, made)
    assert made.routed[1:3].isnan().all()
    others = [0, *range(3, 9)]
    assert torch.equal(made.routed[others], clean.routed[others])
    assert clean.routed.isfinite().all()


@pytest.mark.nightly
@SHAPES
@pytest.mark.parametrize("mxfp8", [0, 1])
@pytest.mark.parametrize("m", [1, 9, 33])
@pytest.mark.parametrize("kind", ["uniform", "skewed", "same"])
def test_routings(shape: dict[str, int], kind: str, m: int, mxfp8: int) -> None:
    check(compared(shape, m, kind, mxfp8=mxfp8))


# (ranks, most warp-instructions without moves): fewer than in the checkpoint's order.
@pytest.mark.nightly
@pytest.mark.parametrize("mxfp8", [0, 1])
@pytest.mark.parametrize(("tp", "instructions"), [(8, 1_750_000), (16, 1_380_000)])
def test_real_size(tp: int, instructions: int, mxfp8: int) -> None:
    plain, other = (
        kernel("sm_103a", k3(tp, 8), block=1, shuffled=order, mxfp8=mxfp8) for order in (0, 1)
    )
    one = problem(plain, 1, seed=1, experts=16)
    two = in_order(one, other)
    launch(plain, one)
    report = launch(other, two)
    check(two)
    same_bits(one, two)
    asked_once(two, report)
    asked = sum(traffic.requested for traffic in report.traffic.values())
    assert asked <= sum(report.needed.values()) * 1.052
    assert core(report) <= instructions


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize(("m", "kind"), [(9, "skewed"), (33, "uniform"), (64, "same")])
def test_real_size_of_many_tokens(tp: int, m: int, kind: str) -> None:
    variant = kernel("sm_103a", k3(tp, most(m)), block=1, shuffled=1, mxfp8=1)
    made = problem(variant, m, seed=m, experts=18, kind=kind)
    report = launch(variant, made)
    check(made)
    asked_once(made, report)

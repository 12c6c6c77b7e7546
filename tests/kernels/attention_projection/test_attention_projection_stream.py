"""The stream kernel: values at the real sizes, bits that do not depend on the batch, odd rows."""

from __future__ import annotations

import pytest
import torch
from attention_runs import (
    BF16,
    HIDDEN,
    band,
    core,
    exact,
    kernel,
    operands,
    project,
    requested,
)
from torch import Tensor

from k3fuse.kernels.attention_projection.builder import KDA, MLA
from k3fuse.kernels.attention_projection.cases import values
from k3fuse.kernels.check import run
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.common.tolerances import compare
from stored import store

pytest.importorskip("cutlass")

REAL = {sum(rows): rows for rows in (KDA[8][0], KDA[16][0], MLA[8][0], MLA[16][0])}
# Of upstream's kernels, without moves: rows -> instructions at M = 8, 16, 32, 64.
# Source: docs/kernels/attention_projection.md.
UPSTREAM = {
    6288: (491_522, 508_294, 538_638, 991_827),
    3216: (571_851, 515_433, 527_445, 555_753),
    3648: (639_141, 576_099, 589_551, 617_823),
    2880: (504_585, 454_815, 465_435, 487_755),
}
SIZES = (8, 16, 32, 64)
MOST_BYTES = dict(zip(SIZES, (1.06, 1.12, 1.20, 1.40), strict=True))
TOKENS = (9, 15, 16, 17, 31, 32, 33, 63, 64)
# Two clusters at most, three blocks under way, the last tiles' sums in the place of x.
TIGHT = {"stream": 1, "clusters": 2, "stages": 3, "early": 1}


def merged(rows: tuple[int, ...]) -> int:
    """Rows of the merged weights that these are apart; KDA's are padded."""
    return next(n for n in REAL if n - 16 < sum(rows) <= n)


def full_size(rows: tuple[int, ...], m: int) -> RunReport:
    """A run at the real size, its values and counts judged."""
    size = next(s for s in SIZES if m <= s)
    x, weights = operands(m, rows)
    outs, report = project(kernel(size, rows, stream=1), x, weights)
    for out, weight in zip(outs, weights, strict=True):
        found = compare(out, exact(x, weight), band(HIDDEN))
        assert found.ok, found
        assert not compare((out.double() * 1.01).to(BF16), exact(x, weight), band(HIDDEN)).ok
    assert requested(report) <= MOST_BYTES[size]
    assert core(report) <= UPSTREAM[merged(rows)][SIZES.index(size)]
    for i, weight in enumerate(weights):
        read = report.traffic[0, f"weight{i}", 0, "read"]
        assert read.requested == read.distinct == weight.nbytes
    x_read = report.traffic[0, "x", 0, "read"]
    assert x_read.distinct == x.nbytes
    assert x_read.requested == 16 * x.nbytes
    return report


@pytest.mark.parametrize(("rows", "m"), [(KDA[16][1], 17), (MLA[16][0], 64)])
def test_full_size(rows: tuple[int, ...], m: int) -> None:
    full_size(rows, m)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [*KDA[8], *KDA[16], *MLA[8], *MLA[16]])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, *TOKENS])
def test_every_size(rows: tuple[int, ...], m: int) -> None:
    full_size(rows, m)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool((a.view(torch.int16) == b.view(torch.int16)).all())


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    rows, k = (130, 6), 2048
    x, weights = operands(64, rows, k)
    whole, _ = project(kernel(64, rows, k, **TIGHT), x, weights)
    for out, weight in zip(whole, weights, strict=True):
        assert compare(out, exact(x, weight), band(k)).ok
    for m, most in ((1, 8), (8, 8), (9, 16), (33, 64)):
        first = 64 - m
        part, _ = project(kernel(most, rows, k, **TIGHT), x[first:].contiguous(), weights)
        for got, want in zip(part, whole, strict=True):
            assert same_bits(got, want[first:]), m


def test_merged_and_separate_weights_have_the_same_bits() -> None:
    rows, k = (64, 40, 6, 12), 1024
    x, weights = operands(13, rows, k)
    apart, _ = project(kernel(16, rows, k, stream=1), x, weights)
    (whole,), _ = project(kernel(16, (sum(rows),), k, stream=1), x, [torch.cat(weights)])
    assert torch.equal(torch.cat(apart, dim=1), whole)


@pytest.mark.parametrize("rows", [(1,), (31, 33, 2), (16,) * 8, (140, 30)])
@pytest.mark.parametrize("m", [1, 18])
def test_any_number_of_rows(rows: tuple[int, ...], m: int) -> None:
    x, weights = operands(m, rows, 512, seed=sum(rows))
    outs, _ = project(kernel(32, rows, 512, stream=1), x, weights, seed=m)
    for out, weight in zip(outs, weights, strict=True):
        assert compare(out, exact(x, weight), band(512)).ok


@pytest.mark.parametrize("m", [3, 17, 64])
def test_neighbours_do_not_matter(m: int) -> None:
    """NaN and infinity in one token stay there; rows lie apart, with NaN between and behind."""
    rows, made = (70,), kernel(64, (70,), 512, stream=1)
    x, weights = operands(m, rows, 512)
    clean, _ = project(made, x, weights)
    wide = torch.full((m + 9, 520), float("nan"), dtype=BF16)
    wide[:m, :512] = x
    wide[1, 7], wide[2, 100] = float("nan"), float("inf")
    big = torch.full((rows[0] + 9, 528), float("nan"), dtype=BF16)
    big[: rows[0], :512] = weights[0]
    out = torch.empty(m, 70, dtype=BF16)
    given = values(made, wide[:m, :512], [big[: rows[0], :512]], [out])
    run(made, [given], cache=store())
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    kept = [i for i in range(m) if i not in (1, 2)]
    assert torch.equal(out[kept], clean[0][kept])


def test_the_engines_differ_by_their_order_of_sums_alone() -> None:
    """The stationary kernel is the oracle: sums of other groups of 16 columns, one rounding."""
    rows, k = (256,), HIDDEN
    x, weights = operands(16, rows, k, seed=3)
    (one,), _ = project(kernel(16, rows, k, stream=1), x, weights)
    (other,), _ = project(kernel(16, rows, k), x, weights)
    steps = (ordered(one) - ordered(other)).abs()
    large = one.abs() > 2.0**-6
    assert steps[large].max() <= 1
    assert (steps > 0).float().mean() < 0.01
    assert (one.double() - other.double()).abs().max() <= 2.0**-7


def ordered(values_: Tensor) -> Tensor:
    """BF16 as integers in their order: neighbours differ by 1."""
    bits = values_.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)

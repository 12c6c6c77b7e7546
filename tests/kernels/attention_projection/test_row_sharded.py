"""The row-sharded kernel: values at the real sizes, bits of the whole kernel, odd numbers."""

from __future__ import annotations

import pytest
import torch
from attention_runs import BF16, core, project, requested
from attention_runs import kernel as whole_kernel
from sharded_runs import full, problem, run, same_bits, share_of, small, wrong, wrong_values

from k3fuse.kernels.attention_projection.builder import MLA
from k3fuse.kernels.attention_projection.reference import published
from k3fuse.kernels.attention_projection.sharded_builder import SPLIT
from k3fuse.kernels.attention_projection.sharded_problem import Problem
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.tolerances import compare, tolerance

pytest.importorskip("cutlass")

# Bytes requested over needed of one rank, and its warp-instructions without moves where nothing
# has to be waited for. Source: docs/kernels/attention_projection.md.
MOST_BYTES = {8: 1.15, 16: 1.25, 32: 1.47, 64: 1.86}
REAL = [(rows, stream) for tp in (8, 16) for rows in MLA[tp] for stream in (1, 0)]


def alone(rows: tuple[int, ...], m: int, rank: int, stream: int) -> None:
    """One rank at the real size, the others' columns delivered, beside the whole kernel."""
    variant = full(rows, m, stream)
    given = problem(variant, m, seed=m, ranks=(rank,))
    made = whole_kernel(variant.size("m"), rows, stream=stream)
    outs, _ = project(made, given.x, given.weights[rank])
    wanted = published(outs, SPLIT[rows])
    given.deliver(wanted)
    report = run(variant, given).reports[0]
    assert wrong(given) == ""
    assert same_bits(given.outs[0], wanted)
    if stream:
        assert requested(report) <= MOST_BYTES[variant.size("m")]
    parts = [part.rows for part in given.share.parts]
    # A tensor map has an allocation of its own; two parts of one weight are one allocation.
    reads = [
        t for (_, name, _, kind), t in report.traffic.items()
        if name.startswith("weight") and kind == "read"
    ]  # fmt: skip
    assert sum(read.distinct for read in reads) == sum(parts) * 7168 * 2
    if stream:
        assert [read.distinct for read in reads] == [rows * 7168 * 2 for rows in parts]
        assert all(read.requested == read.distinct for read in reads)
    assert core(report) < (330_000 if stream else 800_000)
    scaled = (given.outs[0][0].double() * 1.01).to(BF16)
    assert not compare(scaled, given.expected(rank)[0], tolerance(BF16, given.k)).ok


def test_a_rank_at_the_real_size() -> None:
    # Rank 11 of 16 has columns of two weights, and one share of 36 rows.
    alone(MLA[16][1], m=9, rank=11, stream=1)


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "stream"), REAL)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64])
def test_every_count(rows: tuple[int, ...], m: int, stream: int) -> None:
    alone(rows, m, m % share_of(full(rows, m)).tp, stream)


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "stream"), REAL)
@pytest.mark.parametrize("m", [1, 8, 17, 64])
def test_all_ranks_at_the_real_size(rows: tuple[int, ...], m: int, stream: int) -> None:
    variant = full(rows, m, stream)
    given = problem(variant, m, seed=m)
    run(variant, given)
    assert wrong(given) == ""


@pytest.mark.parametrize(
    ("stream", "multicast"),
    [(1, 1), (0, 0), *(pytest.param(*k, marks=pytest.mark.nightly) for k in ((1, 0), (0, 1)))],
)
def test_both_engines_and_both_ways_to_publish(stream: int, multicast: int) -> None:
    variant = small(8, stream=stream, multicast=multicast)
    for m, seed in ((3, None), (8, 1)):
        given = problem(variant, m, seed=m)
        run(variant, given, seed=seed)
        assert wrong(given) == "", (m, seed)


@pytest.mark.parametrize("stream", [1, 0])
def test_a_token_has_the_same_bits_alone_in_batches_and_without_shares(stream: int) -> None:
    variant = small(16, stream=stream)
    batch = problem(variant, 16)
    run(variant, batch)
    rows, split = batch.share.rows, batch.share.split
    for rank in range(2):
        made = whole_kernel(16, rows, 512, stream=stream)
        outs, _ = project(made, batch.x, batch.weights[rank])
        assert same_bits(batch.outs[rank], published(outs, split))
    few = small(8, stream=stream)
    one = problem(few, 1, weights=batch)
    one.x = batch.x[11:12].contiguous()
    run(few, one)
    assert wrong(one) == ""
    assert same_bits(one.outs[1], [out[11:12].contiguous() for out in batch.outs[1]])


@pytest.mark.parametrize("stream", [1, 0])
def test_numbers_like_the_sentinel_do_not_stop_it(stream: int) -> None:
    """A published -0.0 is +0.0, so no pair is the sentinel; NaN and infinity stay in a token."""
    variant = small(8, stream=stream)
    given = problem(variant, 5)
    # Token 0: +0.0 in even rows, -0.0 in odd ones, where -2^-140 is rounded to BF16.
    given.x[0] = 0
    given.x[0, 0] = 2.0**-100
    for weights in given.weights:
        weights[0][:48:2, 0], weights[0][1:48:2, 0] = 0, -(2.0**-40)
    (plain,), _ = project(whole_kernel(8, (88,), 512, stream=stream), given.x, given.weights[0][:1])
    pairs = plain[0, :48].contiguous().view(torch.int32)
    assert (pairs == -(2**31)).all()  # the control: without the exchange they are the sentinel
    given.x[1, 3], given.x[2, 5] = float("nan"), float("inf")
    run(variant, given)
    said = given.unequal() or given.disarmed() or given.miscounted()
    assert said == ""
    for outs in given.outs:
        assert not outs[0][0, :48].view(torch.int16).any()
        assert outs[0][1].isnan().all()
        assert not outs[0][2].isfinite().any()
        assert outs[0][3:].isfinite().all()


def kept(given: Problem, change: str) -> Problem:
    """The problem with something wrong in its outputs."""
    out = given.outs[1][0]
    if change == "shifted rows":
        out.copy_(out.roll(1, 0))
    elif change == "a rank's share missing":
        out[:, 24:48] = 0
    elif change == "shares swapped":
        out[:, :48] = out[:, :48].roll(24, 1)
    else:
        out.copy_((out.double() * 1.01).to(BF16))
    return given


@pytest.mark.parametrize(
    "change", ["shifted rows", "a rank's share missing", "shares swapped", "times 1.01"]
)
def test_wrong_rows_are_refused(change: str) -> None:
    variant: Variant = small(8, stream=0)
    given = problem(variant, 4)
    run(variant, given)
    assert wrong_values(given) == ""  # the control
    assert wrong_values(kept(given, change)) != ""

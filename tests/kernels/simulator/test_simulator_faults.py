"""Planted faults in kernels compiled from CuTe DSL: each is found under 20 seeds, by name; the
correct twin of each passes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from k3fuse.kernels.build.residency import Footprint, Member, co_residency
from k3fuse.kernels.simulator import (
    DeadlockError,
    Fresh,
    Launch,
    MemoryAccessError,
    Multicast,
    OverlapError,
    Owned,
    simulate,
    simulate_sequence,
)

cutlass: Any = pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

import dsl_kernels as dsl  # noqa: E402  (needs the DSL)
import fault_kernels as faults  # noqa: E402

SEEDS = range(20)
CELLS = faults.CTAS * faults.THREADS
F32, I32 = cutlass.Float32, cutlass.Int32


@cache
def produce(**options: bool) -> str:
    return dsl.ptx_of(faults.Produce(**options), dsl.fake(F32, CELLS))


@cache
def consume(early: bool) -> str:
    return dsl.ptx_of(faults.Consume(early), *[dsl.fake(F32, CELLS)] * 3)


def launch(text: str, tensors: Sequence[Any], label: str, names: str) -> Launch:
    return Launch(
        text, (faults.CTAS, 1, 1), (faults.THREADS, 1, 1), [tensors], names=names.split(),
        pdl=label != "produce", label=label,
    )  # fmt: skip


def pair(early: bool, seed: int) -> None:
    x, w, y = torch.arange(CELLS) * 1.0, torch.randn(CELLS), torch.zeros(CELLS)
    report = simulate_sequence(
        [
            launch(produce(), [x], "produce", "x"),
            launch(consume(early), [x, w, Fresh(y)], "consume", "x w y"),
        ],
        seed=seed,
    )
    assert torch.equal(y, 2 * (torch.arange(CELLS) + 1.0) + w)
    assert report.launches[1].opcodes["griddepcontrol.wait"] == 2 * faults.CTAS
    assert not report.notes


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_before_the_wait(seed: int) -> None:
    pair(False, seed)
    with pytest.raises(OverlapError) as caught:
        pair(True, seed)
    message = str(caught.value)
    assert "launch 1 'consume' may run before launch 0 'produce' is complete" in message
    assert "buffer 'x' of rank 0" in message
    assert message.count("`ld.global") == message.count("`st.global") == 1, "both lines are named"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_early_trigger(seed: int) -> None:
    """The middle kernel may trigger only after its wait: the last one relies on that."""
    for trigger_first in (False, True):
        x, other, w = (torch.zeros(CELLS) for _ in "xow")
        y = torch.zeros(CELLS)
        chain = [
            launch(produce(), [x], "produce", "x"),
            launch(produce(waits=True, trigger_first=trigger_first), [other], "middle", "other"),
            launch(consume(True), [x, w, y], "consume", "x w y"),
        ]
        if not trigger_first:
            simulate_sequence(chain, seed=seed)
            assert torch.equal(y, torch.full_like(y, 2.0))
            continue
        with pytest.raises(OverlapError, match="'consume' may run before launch 0 'produce'"):
            simulate_sequence(chain, seed=seed)


@cache
def grid_barrier(ctas: int) -> str:
    return dsl.ptx_of(faults.GridBarrier(ctas), dsl.fake(I32, 4), dsl.fake(I32, ctas))


def test_a_grid_barrier_that_is_not_resident() -> None:
    ctas, smem = 12, 120_000
    for sms in (12, 11):
        member = Member("barrier", ctas, Footprint.of(faults.THREADS, 32, smem))
        assert co_residency([member], sms).fits is (sms == 12)
        for seed in SEEDS:
            count, y = torch.zeros(4, dtype=torch.int32), torch.zeros(ctas, dtype=torch.int32)
            options: dict[str, Any] = {
                "grid": (ctas, 1, 1), "block": (faults.THREADS, 1, 1), "dynamic_smem": smem,
                "params": [[count, y]], "names": ["count", "y"],
            }  # fmt: skip
            if sms == 12:
                simulate(grid_barrier(ctas), sms=sms, registers=32, seed=seed, **options)
                assert y.tolist() == [ctas] * ctas
                continue
            with pytest.raises(DeadlockError) as caught:
                simulate(grid_barrier(ctas), sms=sms, registers=32, seed=seed, **options)
            message = str(caught.value)
            assert "11 CTAs wait for CTAs that are not resident: 1 of the 12 CTAs" in message
            assert "find no room on 11 SMs, bound by shared memory" in message
            assert "reads 0xb from byte 0 of buffer 'count' of rank 0" in message


@cache
def mailbox(ranks: int, tested: int) -> str:
    words = ranks * faults.THREADS * 4
    return dsl.ptx_of(
        faults.Mailbox(ranks, tested), dsl.fake(I32, words), dsl.fake(I32, words),
        dsl.fake(I32, words // 4), I32(0),
    )  # fmt: skip


def exchange(ranks: int, tested: int, seed: int | None) -> int:
    """How many sums are wrong."""
    shape = (ranks, faults.THREADS, 4)
    boxes = [torch.full(shape, faults.EMPTY, dtype=torch.int32) for _ in range(ranks)]
    sums = [torch.zeros(shape[:2], dtype=torch.int32) for _ in range(ranks)]
    every = Multicast(tuple(boxes))
    simulate(
        mailbox(ranks, tested), grid=(ranks, 1, 1), block=(faults.THREADS, 1, 1), ranks=ranks,
        params=[[every, Owned(boxes[r], r), Fresh(sums[r]), r] for r in range(ranks)],
        names=["all", "own", "sums", "rank"], seed=seed,
    )  # fmt: skip
    first = torch.arange(ranks)[:, None] * 1000 + torch.arange(faults.THREADS) * 4
    return sum(int((part != 4 * first + 6).sum()) for part in sums)


@pytest.mark.parametrize(("ranks", "seeds"), [(2, SEEDS), (4, range(3))])
def test_a_poll_of_one_word_of_four(ranks: int, seeds: range) -> None:
    assert exchange(ranks, 1, None) == 0, "whole delivery hides it"
    for seed in seeds:
        assert exchange(ranks, 4, seed) == 0
        # A quarter of the fragments of each rank begin with word 0.
        assert exchange(ranks, 1, seed) >= ranks * ranks * faults.THREADS // 4


@cache
def row_sums(rows: int, **options: int) -> str:
    shapes = dsl.fake(F32, rows, faults.THREADS), dsl.fake(F32, rows)
    return dsl.ptx_of(faults.RowSums(**options), *shapes)


def sums_of(rows: int, seed: int, **options: int) -> None:
    x, y = torch.arange(rows * faults.THREADS).reshape(rows, -1) * 1.0, torch.zeros(rows)
    simulate(
        row_sums(rows, **options), grid=(rows, 1, 1), block=(faults.THREADS, 1, 1), dynamic_smem=16,
        params=[[x, Fresh(y)]], names=["x", "y"], seed=seed,
    )  # fmt: skip
    assert torch.equal(y, x.sum(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_uninitialised_shared_memory_and_one_row_too_far(seed: int) -> None:
    sums_of(6, seed)
    with pytest.raises(MemoryAccessError, match=r"read of byte 4 of shared memory before anyone"):
        sums_of(6, seed, writers=1)
    with pytest.raises(MemoryAccessError) as caught:
        sums_of(6, seed, shift=1)
    message = str(caught.value)
    assert "out-of-bounds read of 4 bytes at byte" in message
    assert f"of buffer 'x' of rank 0 ({24 * faults.THREADS} bytes)" in message
    assert "CTA 5, line" in message

"""Sequences of launches: stream order, overlap, what a successor may touch, delayed ranks.

Kernels are PTX by hand: a producer adds 1 to its cells, a consumer copies them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from k3fuse.kernels.simulator import (
    DeadlockError,
    Fresh,
    Launch,
    OverlapError,
    Owned,
    SequenceReport,
    simulate_sequence,
)
from ptx_text import kernel

SEEDS = (None, *range(20))
WAIT = "griddepcontrol.wait;"
TRIGGER = "griddepcontrol.launch_dependents;"
CTAS = 4
# x[i] += 1, one cell a thread, in four CTAs.
ADD = """
  {first}
  mad.lo.u32 %r2, %r1, 32, %r0;
  mul.wide.u32 %d11, %r2, 4;
  add.s64 %d11, %d0, %d11;
  ld.global.u32 %r5, [%d11];
  add.u32 %r5, %r5, 1;
  {middle}
  st.{order}global.u32 [%d11], %r5;
  {last}
"""
# y[i] = x[i]; the load may be weak or strong.
COPY = """
  {first}
  mad.lo.u32 %r2, %r1, 32, %r0;
  mul.wide.u32 %d11, %r2, 4;
  add.s64 %d12, %d1, %d11;
  add.s64 %d11, %d0, %d11;
  ld.{order}global.u32 %r5, [%d11];
  {middle}
  st.global.u32 [%d12], %r5;
"""


def add(first: str = "", middle: str = "", last: str = "", order: str = "") -> str:
    return kernel(ADD.format(first=first, middle=middle, last=last, order=order), params=1)


def copy(first: str = "", middle: str = "", order: str = "") -> str:
    return kernel(COPY.format(first=first, middle=middle, order=order))


def cells() -> torch.Tensor:
    return torch.arange(32 * CTAS, dtype=torch.int32)


def launch(text: str, *tensors: Any, pdl: bool = False, label: str = "", **options: Any) -> Launch:
    names = ["x", "y"][: len(tensors)]
    return Launch(
        text,
        (CTAS, 1, 1),
        (32, 1, 1),
        [list(tensors)],
        names=names,
        pdl=pdl,
        label=label,
        **options,
    )


def produce_and_copy(
    producer: str, consumer: str, seed: int | None, pdl: bool = True
) -> tuple[torch.Tensor, SequenceReport]:
    x, y = cells(), torch.zeros(32 * CTAS, dtype=torch.int32)
    report = simulate_sequence(
        [
            launch(producer, x, label="produce"),
            launch(consumer, x, Fresh(y), pdl=pdl, label="consume"),
        ],
        seed=seed,
    )
    assert torch.equal(x, cells() + 1)
    return y, report


def test_buffers_last_from_launch_to_launch_and_counts_add_up() -> None:
    x, y = cells(), torch.zeros(32 * CTAS, dtype=torch.int32)
    for seed in (None, 1, 2):
        x.copy_(cells())
        report = simulate_sequence(
            [launch(add(), x), launch(add(), x), launch(copy(), x, Fresh(y))], seed=seed
        )
        assert torch.equal(x, cells() + 2)
        assert torch.equal(y, x)
        assert [part.opcodes["ld.global.u32"] for part in report.launches] == [CTAS] * 3
        assert report.warp_instructions == sum(p.warp_instructions for p in report.launches)
        reads = report.traffic[0, "x", 0, "read"]
        assert (reads.requested, reads.distinct) == (3 * 128 * CTAS, 128 * CTAS)
        assert report.launches[1].traffic[0, "x", 0, "read"].distinct == 128 * CTAS
        assert not report.notes
        ends = [report.timeline[0, index] for index in range(3)]
        assert all(first[1] <= second[0] for first, second in pairwise(ends))


def test_a_dependent_launch_starts_at_the_trigger_and_waits_for_the_end() -> None:
    slow = "mov.u32 %r6, 0;\nLOOP:\nadd.u32 %r6, %r6, 1;\nsetp.lt.u32 %p1, %r6, 20;\n@%p1 bra LOOP;"
    producer = add(TRIGGER, slow)
    for seed in SEEDS:
        got, report = produce_and_copy(producer, copy(WAIT), seed)
        assert torch.equal(got, cells() + 1)
        assert report.overlapped((0, 0), (0, 1))
        assert not report.notes
    got, report = produce_and_copy(producer, copy(WAIT), None, pdl=False)
    assert torch.equal(got, cells() + 1)
    assert not report.overlapped((0, 0), (0, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_before_the_wait_is_found(seed: int | None) -> None:
    producer, consumer = add(TRIGGER), copy("", WAIT)
    with pytest.raises(OverlapError) as caught:
        produce_and_copy(producer, consumer, seed)
    message = str(caught.value)
    assert "launch 1 'consume' may run before launch 0 'produce' is complete" in message
    assert "buffer 'x' of rank 0" in message
    for text, start in ((producer, "  st.global"), (consumer, "  ld.global")):
        lines = text.split("\n")
        line = 1 + next(at for at, item in enumerate(lines) if item.startswith(start))
        assert f"line {line} `{lines[line - 1].strip().rstrip(';')}" in message


def test_a_late_trigger_does_not_make_the_read_legal() -> None:
    """Only the wait makes memory visible; the store is far away, and long done."""
    with pytest.raises(OverlapError, match="'x' of rank 0"):
        produce_and_copy(add("", "", TRIGGER), copy(), None)
    got, report = produce_and_copy(add(), copy(), None)
    assert torch.equal(got, cells() + 1), "without a trigger the successor starts at the end"
    assert "launch 1 'consume' is launched with pdl and never executes" in report.notes[0]


def test_a_read_of_other_bytes_before_the_wait_is_legal() -> None:
    x, y, w = cells(), torch.zeros(32 * CTAS, dtype=torch.int32), cells() + 9
    for seed in SEEDS:
        simulate_sequence(
            [launch(add(TRIGGER), x.clone()), launch(copy("", WAIT), w, y, pdl=True)], seed=seed
        )
        assert torch.equal(y, w)


def test_a_write_before_the_wait_to_what_the_predecessor_reads_is_found() -> None:
    x, y = cells(), torch.zeros(32 * CTAS, dtype=torch.int32)
    for seed in SEEDS:
        with pytest.raises(OverlapError, match=r"writes byte 0 of buffer 'x'.* reads at line"):
            simulate_sequence(
                [launch(copy(TRIGGER), x, y), launch(copy(), y + 1, x, pdl=True)], seed=seed
            )
    simulate_sequence([launch(copy(TRIGGER), x, y), launch(copy(WAIT), y + 1, x, pdl=True)])
    assert torch.equal(x, torch.ones_like(x)), "y + 1 was made before the launches"


POLL = """
  {first}
  mad.lo.u32 %r2, %r1, 32, %r0;
  mul.wide.u32 %d11, %r2, 4;
  add.s64 %d12, %d1, %d11;
  add.s64 %d11, %d0, %d11;
AGAIN:
  ld.relaxed.gpu.global.u32 %r5, [%d11];
  setp.eq.u32 %p1, %r5, %r2;
  @%p1 bra AGAIN;
  st.global.u32 [%d12], %r5;
  griddepcontrol.wait;
"""


def test_polling_words_of_strong_stores_before_the_wait_is_legal() -> None:
    for seed in SEEDS:
        got, _ = produce_and_copy(
            add(TRIGGER, order="relaxed.gpu."), kernel(POLL.format(first="")), seed
        )
        assert torch.equal(got, cells() + 1)


def test_polling_words_of_weak_stores_is_found() -> None:
    for seed in SEEDS:
        with pytest.raises(OverlapError, match=r"ld\.relaxed\.gpu"):
            produce_and_copy(add(TRIGGER), kernel(POLL.format(first="")), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_completion_is_not_transitive_without_a_wait_between(seed: int | None) -> None:
    """The middle kernel touches neither buffer; only its wait ties the first to the last."""
    for middle in (TRIGGER + WAIT, TRIGGER, WAIT + TRIGGER):
        x, y, other = cells(), torch.zeros(32 * CTAS, dtype=torch.int32), cells()
        chain = [
            launch(add(TRIGGER), x, label="first"),
            launch(add(middle), other, pdl=True, label="middle"),
            launch(copy(WAIT), x, y, pdl=True, label="last"),
        ]
        if middle == TRIGGER:
            with pytest.raises(OverlapError, match="'last' may run before launch 0 'first'"):
                simulate_sequence(chain, seed=seed)
        else:
            report = simulate_sequence(chain, seed=seed)
            assert torch.equal(y, x)
            assert not report.notes


@pytest.mark.parametrize(("middle", "legal"), [(WAIT + TRIGGER, True), (TRIGGER + WAIT, False)])
def test_an_early_read_of_what_the_first_kernel_wrote(middle: str, legal: bool) -> None:
    """Legal where a kernel between them waits before it triggers."""
    for seed in SEEDS:
        x, y, other = cells(), torch.zeros(32 * CTAS, dtype=torch.int32), cells()
        chain = [
            launch(add(TRIGGER), x), launch(add(middle), other, pdl=True),
            launch(copy("", WAIT), x, y, pdl=True),
        ]  # fmt: skip
        if legal:
            simulate_sequence(chain, seed=seed)
            assert torch.equal(y, x)
        else:
            with pytest.raises(OverlapError, match="launch 2 'k' may run before launch 0 'k'"):
                simulate_sequence(chain, seed=seed)


def test_a_plain_launch_ends_every_overlap() -> None:
    x, y, other = cells(), torch.zeros(32 * CTAS, dtype=torch.int32), cells()
    chain = [
        launch(add(TRIGGER), x),
        launch(add(TRIGGER), other, pdl=True),
        launch(add(), other),
        launch(copy(), x, y, pdl=True),
    ]
    report = simulate_sequence(chain)
    assert torch.equal(y, cells() + 1)
    assert torch.equal(other, cells() + 2)
    assert len(report.notes) == 2


ASYNC_COPY = """
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 2;
  add.u32 %r6, %r6, %r7;
  mad.lo.u32 %r2, %r1, 32, %r0;
  mul.wide.u32 %d11, %r2, 4;
  add.s64 %d12, %d1, %d11;
  add.s64 %d11, %d0, %d11;
  {before}
  cp.async.ca.shared.global [%r6], [%d11], 4;
  griddepcontrol.wait;
  cp.async.wait_all;
  ld.shared.u32 %r5, [%r6];
  st.global.u32 [%d12], %r5;
"""


def test_an_asynchronous_copy_reads_when_it_is_issued() -> None:
    for before, found in (("", True), (WAIT, False)):
        consumer = kernel(ASYNC_COPY.format(before=before), shared=128)
        if found:
            with pytest.raises(OverlapError, match=r"cp\.async\.ca"):
                produce_and_copy(add(TRIGGER), consumer, None)
        else:
            assert torch.equal(produce_and_copy(add(TRIGGER), consumer, None)[0], cells() + 1)


# Rank r adds what its left neighbour had put into its box in the launch before.
PASS_ON = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
WAIT:
  ld.acquire.sys.global.u32 %r5, [%d0];
  setp.lt.u32 %p2, %r5, {wanted};
  @%p2 bra WAIT;
  red.release.sys.global.add.u32 [%d1], 1;
DONE:
"""


def ring(ranks: int, steps: int, **options: Any) -> tuple[list[int], SequenceReport]:
    boxes = [Owned(torch.zeros(1, dtype=torch.int32), rank) for rank in range(ranks)]
    params = [[boxes[rank], boxes[(rank + 1) % ranks]] for rank in range(ranks)]
    chain = [
        Launch(kernel(PASS_ON.format(wanted=step)), (1, 1, 1), (32, 1, 1), params)
        for step in range(steps)
    ]
    report = simulate_sequence(chain, ranks=ranks, **options)
    return [int(box.tensor) for box in boxes], report


def test_ranks_run_on_their_own() -> None:
    got, report = ring(4, 3, delay={(1, 0): 100})
    assert got == [3, 3, 3, 3]
    assert report.timeline[1, 0][0] == 100
    assert report.timeline[2, 0][1] < 100 < report.timeline[2, 1][1]
    assert report.timeline[0, 2][1] < 100, "rank 0 has done everything when rank 1 begins"
    assert report.overlapped((1, 0), (3, 2))
    for seed in range(5):
        assert ring(4, 3, seed=seed)[0] == [3, 3, 3, 3]


def test_a_rank_that_leaves_launches_out() -> None:
    got, report = ring(2, 2, skip={(0, 0)})
    assert got == [2, 1]
    assert (0, 0) not in report.timeline
    with pytest.raises(DeadlockError) as caught:
        ring(2, 2, skip={(0, 0), (0, 1)})
    assert "of launch 1 'k', warp 0 (1 threads) reads 0x0 from byte 0 of buffer 'p0'" in str(
        caught.value
    )


def test_launches_that_never_start_are_explained() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    poll = (
        "AGAIN:\nld.acquire.gpu.global.u32 %r5, [%d0];\nsetp.eq.u32 %p1, %r5, 0;\n@%p1 bra AGAIN;"
    )
    trigger_some = "setp.ne.u32 %p2, %r1, 1;\n@%p2 griddepcontrol.launch_dependents;\n"
    set_flag = kernel("st.release.gpu.global.u32 [%d0], 1;", params=1)
    with pytest.raises(
        DeadlockError, match="launch 1 'k' has not started; it waits for the end of"
    ):
        simulate_sequence([launch(kernel(poll, params=1), flag), launch(set_flag, flag, pdl=True)])
    with pytest.raises(DeadlockError, match=r"waits for 1 CTAs of launch 0 'k' to execute griddep"):
        simulate_sequence([
            launch(kernel(trigger_some + poll, params=1), flag), launch(set_flag, flag, pdl=True),
        ])  # fmt: skip
    report = simulate_sequence([
        launch(kernel(TRIGGER + poll, params=1), flag), launch(set_flag, flag, pdl=True),
    ])  # fmt: skip
    assert flag.item() == 1
    assert report.overlapped((0, 0), (0, 1))


def test_an_observer_is_told_of_grids_in_order() -> None:
    told: list[tuple[str, int]] = []

    class Ear:
        def grid_begin(self, grid: Any) -> None:
            told.append(("begin", grid.index))

        def group_begin(self, group: Any) -> None:
            told.append(("group", group.grid.index))

        def grid_wait(self, group: Any, lanes: np.ndarray) -> None:
            told.append(("wait", group.grid.index))
            assert len(lanes) == 32 * CTAS

        def grid_end(self, grid: Any) -> None:
            told.append(("end", grid.index))

    x, y = cells(), torch.zeros(32 * CTAS, dtype=torch.int32)
    simulate_sequence([launch(add(TRIGGER), x), launch(copy(WAIT), x, y, pdl=True)], observer=Ear())
    assert told == [
        ("begin", 0), ("group", 0), ("end", 0), ("begin", 1), ("group", 1), ("wait", 1), ("end", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": {(1, 0): 5}}, r"delay names \(rank 1, launch 0\); there are 1 ranks and 1"),
        ({"skip": {(0, 3)}}, r"skip names \(rank 0, launch 3\)"),
        ({"sms": 0}, "sms is 0; use the number of SMs"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_sequence([launch(add(), cells())], **options)
    with pytest.raises(ValueError, match="launches is empty"):
        simulate_sequence([])

"""What orders accesses and what does not, in PTX by hand; messages of the race checker."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.simulator import (
    MemoryAccessError,
    Race,
    SimReport,
    SimulationError,
    clocks,
)
from ptx_text import kernel, run

SEEDS = (None, *range(6))

# Thread 0 of CTA 0 stores 9 and passes it on; the last CTA reads it.
CHAIN = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra MIDDLE;
  st.global.u32 [%d0+64], 9;
  {first}
  bra DONE;
MIDDLE:
  setp.ne.u32 %p2, %r1, 1;
  @%p2 bra LAST;
WAIT1:
  {second}
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra WAIT1;
  {third}
  bra DONE;
LAST:
  {fourth}
  setp.lt.u32 %p3, %r5, {until};
  @%p3 bra LAST;
  {fence}
  ld.global.u32 %r6, [%d0+64];
  st.global.u32 [%d0+128], %r6;
DONE:
"""
RELEASE = "mov.u32 %r8, 1;\nst.release.gpu.global.u32 [%d0], %r8;"
ACQUIRE = "ld.acquire.gpu.global.u32 %r5, [%d0];"
PASS_ON = "st.release.gpu.global.u32 [%d0+4], %r5;"
ACQUIRE_NEXT = "ld.acquire.gpu.global.u32 %r5, [%d0+4];"
ADD = "mov.u32 %r8, 1;\nred.{}.gpu.global.add.u32 [%d0+4], %r8;"


def chain(
    first: str = RELEASE,
    second: str = ACQUIRE,
    third: str = PASS_ON,
    fourth: str = ACQUIRE_NEXT,
    fence: str = "",
    until: int = 1,
) -> int:
    """Race count of the chain, the same in all seeds; the value must arrive."""
    body = CHAIN.format(
        first=first, second=second, third=third, fourth=fourth, fence=fence, until=until
    )
    counts = set()
    for seed in SEEDS:
        cells = torch.zeros(64, dtype=torch.int32)
        report = run(kernel(body, params=1), [cells], grid=(3, 1, 1), seed=seed, races=True)
        assert cells[32] == 9
        counts.add(report.race_count)
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize(
    ("changes", "races"),
    [
        ({}, 0),
        ({"second": ACQUIRE.replace("acquire", "relaxed")}, 1),
        ({"third": PASS_ON.replace("release", "relaxed")}, 1),
        ({"second": "ld.volatile.global.u32 %r5, [%d0];", "third": "membar.gl;\n" + PASS_ON}, 0),
        ({"second": "ld.volatile.global.u32 %r5, [%d0];"}, 1),
        ({"fourth": ACQUIRE_NEXT.replace("acquire", "relaxed"), "fence": "fence.sc.gpu;"}, 0),
        ({"fourth": ACQUIRE_NEXT.replace("acquire", "relaxed"), "fence": "fence.acq_rel.cta;"}, 1),
        # an atomic keeps the release that the word carries, a relaxed store of another CTA does not
        (
            {
                "first": RELEASE + ADD.format("release"),
                "third": ADD.format("relaxed"),
                "until": 2,
            },
            0,
        ),
        (
            {
                "first": RELEASE + ADD.format("relaxed"),
                "third": ADD.format("release"),
                "until": 2,
                "second": "ld.relaxed.gpu.global.u32 %r5, [%d0];",
            },
            1,
        ),
        ({"first": "fence.acq_rel.gpu;" + RELEASE.replace("release", "relaxed")}, 0),
        ({"first": "fence.proxy.async;" + RELEASE.replace("release", "relaxed")}, 1),
    ],
)  # fmt: skip
def test_order_is_transitive_only_where_each_link_orders(
    changes: dict[str, str], races: int
) -> None:
    assert chain(**changes) == races  # type: ignore[arg-type]


def report_of(body: str, *, block: int = 64, shared: int = 256, seed: int = 1) -> SimReport:
    cells = torch.zeros(64, dtype=torch.int32)
    text = kernel(body, params=1, block=block, shared=shared)
    return run(text, [cells], block=(block, 1, 1), seed=seed, races=True)


NAMED = """
  mov.u32 %r6, buffer;
  setp.ge.u32 %p1, %r0, 32;
  @%p1 bra CONSUMER;
  shl.b32 %r7, %r0, 2;
  add.u32 %r7, %r6, %r7;
  st.shared.u32 [%r7], %r0;
  bar.arrive 1, 64;
  {after}
  ret;
CONSUMER:
  bar.sync 1, 64;
  ld.shared.u32 %r8, [%r6];
"""


def test_bar_arrive_orders_what_came_before_it_alone() -> None:
    for seed in range(6):
        assert report_of(NAMED.format(after=""), seed=seed).races == ()
        (race,) = report_of(NAMED.format(after="st.shared.u32 [%r7], 7;"), seed=seed).races
        assert {race.first.line, race.second.line} == {24, 28}
        assert "bar.sync" in race.missing


def test_neighbouring_bytes_are_no_race_and_overlapping_ones_are() -> None:
    body = """
  add.s64 %d11, %d0, {scale};
  st.global.u8 [%d11], %r0;
"""
    bytes_ = "mul.wide.u32 %d12, %r0, 1;\nadd.s64 %d11, %d0, %d12;"
    assert report_of(body.replace("add.s64 %d11, %d0, {scale};", bytes_)).race_count == 0
    halves = bytes_ + "\nand.b64 %d11, %d11, -2;"
    assert report_of(body.replace("add.s64 %d11, %d0, {scale};", halves)).race_count == 0
    wrapped = "and.b32 %r9, %r0, 31;\nmul.wide.u32 %d12, %r9, 1;\nadd.s64 %d11, %d0, %d12;"
    (race,) = report_of(body.replace("add.s64 %d11, %d0, {scale};", wrapped)).races
    assert race.kind == "write/write"
    assert {race.first.warp, race.second.warp} == {0, 1}


RELAXED_ARRIVAL = """
  mov.u32 %r6, buffer;
  setp.ne.u32 %p1, %r0, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%r6], 1;
  bar.sync 0;
  setp.ne.u32 %p2, %r0, 32;
  @!%p1 bra PRODUCE;
  @!%p2 bra CONSUME;
  ret;
PRODUCE:
  st.shared.u32 [%r6+16], 42;
  {release}
  mbarrier.arrive.{send}.shared::cta.b64 _, [%r6];
  ret;
CONSUME:
  mbarrier.try_wait.parity.{receive}.shared::cta.b64 %p3, [%r6], 0;
  @!%p3 bra CONSUME;
  {acquire}
  ld.shared.u32 %r7, [%r6+16];
"""


@pytest.mark.parametrize(
    ("send", "receive", "release", "acquire", "races"),
    [
        ("release.cta", "acquire.cta", "", "", 0),
        ("relaxed.cta", "acquire.cta", "", "", 1),
        ("release.cta", "relaxed.cta", "", "", 1),
        ("relaxed.cta", "relaxed.cta", "fence.acq_rel.cta;", "fence.acq_rel.cta;", 0),
        ("relaxed.cta", "relaxed.cta", "fence.acq_rel.cta;", "", 1),
    ],
)
def test_relaxed_mbarriers_need_fences(
    send: str, receive: str, release: str, acquire: str, races: int
) -> None:
    body = RELAXED_ARRIVAL.format(send=send, receive=receive, release=release, acquire=acquire)
    for seed in range(6):
        assert len(report_of(body, seed=seed).races) == races


def test_copies_that_arrive_at_an_mbarrier() -> None:
    body = """
  mov.u32 %r6, buffer;
  setp.ne.u32 %p1, %r0, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%r6], 64;
  bar.sync 0;
  shl.b32 %r7, %r0, 2;
  add.u32 %r7, %r6, %r7;
  add.s64 %d11, %d0, %d10;
  cp.async.ca.shared.global [%r7+16], [%d11], 4;
  cp.async.mbarrier.arrive.noinc.shared.b64 [%r6];
WAIT:
  {wait}
  xor.b32 %r9, %r0, 33;
  shl.b32 %r9, %r9, 2;
  add.u32 %r9, %r6, %r9;
  ld.shared.u32 %r8, [%r9+16];
"""
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6], 0;\n@!%p3 bra WAIT;"
    for seed in range(6):
        assert report_of(body.format(wait=wait), shared=512, seed=seed).races == ()
    races = found(lambda: report_of(body.format(wait=""), shared=512))
    assert races
    assert all(race.space == "shared" for race in races)


def found(call) -> tuple[Race, ...]:  # type: ignore[no-untyped-def]
    try:
        report: SimReport = call()
    except SimulationError as error:
        return error.races
    return report.races


def test_an_error_that_ends_the_run_carries_the_races_before_it() -> None:
    body = """
  mov.u32 %r6, buffer;
  and.b32 %r7, %r0, 31;
  shl.b32 %r7, %r7, 2;
  add.u32 %r7, %r6, %r7;
  st.shared.u32 [%r7], %r0;
  bar.sync 0;
  ld.global.u32 %r8, [%d0+400];
"""
    with pytest.raises(MemoryAccessError, match="out-of-bounds") as caught:
        report_of(body)
    (race,) = caught.value.races
    assert race.kind == "write/write"
    assert "races found before" in caught.value.__notes__[0]


def test_races_are_listed_once_for_each_pair_of_lines_and_counted() -> None:
    body = "mov.u32 %r6, buffer;\nst.shared.u32 [%r6], %r0;\n" * 30
    report = report_of(body)
    assert len(report.races) == 20
    assert len({(race.first.line, race.second.line) for race in report.races}) == 20
    assert report.race_count > 30
    text = str(report.races[0])
    assert text.startswith("write/write race on byte 0 of the shared memory of CTA 0 of rank 0\n")
    assert "rank 0, CTA 0, warp" in text
    assert "`st.shared.u32 [%r6], %r0`" in text


def test_clocks_that_take_too_much_memory_are_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = NAMED.format(after="")
    assert report_of(text).races == ()
    monkeypatch.setattr(clocks, "_MOST_CELLS", 7)  # two warps hold 2 x 2 clocks each
    with pytest.raises(SimulationError, match=r"scale the grid down \(1 warps always fit\)"):
        report_of(text)


def test_a_guarded_result_that_no_lane_has_had_stays_undefined() -> None:
    """In a loop that some lanes take, the old value of such a register is read and kept."""
    text = kernel(
        """
  mov.u32 %r4, 0;
  setp.ge.u32 %p0, %r0, 16;
  @%p0 bra END;
LOOP:
  setp.eq.u32 %p1, %r4, 5;
  @%p1 mov.u32 %r5, 9;
  add.u32 %r4, %r4, 1;
  setp.lt.u32 %p2, %r4, 3;
  @%p2 bra LOOP;
END:
  add.u64 %d11, %d0, %d10;
  st.global.u32 [%d11], %r4;
""",
        params=1,
    )
    out = torch.zeros(32, dtype=torch.int32)
    run(text, [out])
    assert out.tolist() == [3] * 16 + [0] * 16

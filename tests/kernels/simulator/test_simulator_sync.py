"""Barriers, mbarriers, warp instructions, other ranks; missing barriers and deadlocks are found."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.simulator import (
    BarrierError,
    DeadlockError,
    MemoryAccessError,
    Owned,
    SimulationError,
    simulate,
)
from ptx_text import kernel, run

SEEDS = range(20)
ROTATE = """
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 2;
  add.u32 %r8, %r6, %r7;
  st.shared.u32 [%r8], %r0;
  {barrier}
  add.u32 %r9, %r0, 32;
  and.b32 %r9, %r9, 127;
  shl.b32 %r9, %r9, 2;
  add.u32 %r9, %r6, %r9;
  ld.shared.u32 %r10, [%r9];
  add.s64 %d11, %d0, %d10;
  st.global.u32 [%d11], %r10;
"""


def rotate(barrier: str, seed: int | None) -> list[int]:
    target = torch.zeros(128, dtype=torch.int32)
    text = kernel(ROTATE.format(barrier=barrier), params=1, block=128, shared=512)
    run(text, [target], block=(128, 1, 1), seed=seed)
    return target.tolist()


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync.aligned 3, 128;"])
def test_barrier(barrier: str) -> None:
    wanted = [(thread + 32) % 128 for thread in range(128)]
    for seed in (None, *SEEDS):
        assert rotate(barrier, seed) == wanted


def test_a_missing_barrier_is_found() -> None:
    found = 0
    for seed in SEEDS:
        try:
            rotate("bra NEXT;\nNEXT:", seed)
        except MemoryAccessError as error:
            found += "shared memory before anyone wrote it" in str(error)
    assert found >= 15


def test_arrive_and_sync_on_a_named_barrier() -> None:
    body = """
  mov.u32 %r6, buffer;
  setp.ge.u32 %p1, %r0, 32;
  @%p1 bra CONSUMER;
  st.shared.u32 [%r6], 42;
  bar.arrive 1, 64;
  ret;
CONSUMER:
  bar.sync 1, 64;
  ld.shared.u32 %r7, [%r6];
  st.global.u32 [%d0], %r7;
"""
    for seed in (None, *SEEDS):
        target = torch.zeros(1, dtype=torch.int32)
        run(kernel(body, params=1, block=64, shared=16), [target], block=(64, 1, 1), seed=seed)
        assert target.item() == 42


HANDSHAKE = """
  mov.u32 %r6, buffer;
  setp.ne.u32 %p1, %r0, 0;
  {init}
  bar.sync 0;
  setp.lt.u32 %p2, %r0, 32;
  @!%p2 bra CONSUMER;
  st.shared.u32 [%r6+16], 42;
  bar.warp.sync 0xffffffff;
  @!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6], {count};
  ret;
CONSUMER:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6], {parity};
  @!%p3 bra CONSUMER;
  ld.shared.u32 %r7, [%r6+16];
  st.global.u32 [%d0], %r7;
"""
INIT = "@!%p1 mbarrier.init.shared::cta.b64 [%r6], 1;"


def handshake(init: str = INIT, count: int = 1, parity: int = 0, seed: int | None = None) -> int:
    target = torch.zeros(1, dtype=torch.int32)
    body = HANDSHAKE.format(init=init, count=count, parity=parity)
    run(kernel(body, params=1, block=64, shared=32), [target], block=(64, 1, 1), seed=seed)
    return int(target.item())


def test_mbarrier_handshake() -> None:
    for seed in (None, *SEEDS):
        assert handshake(seed=seed) == 42


def test_a_missing_mbarrier_init_is_found() -> None:
    for seed in (None, *SEEDS):
        with pytest.raises(
            BarrierError, match=r"byte 0 of shared memory is used before mbarrier.in"
        ):
            handshake(init="", seed=seed)


def test_too_many_arrivals_are_found() -> None:
    with pytest.raises(BarrierError, match="more arrivals than it expects"):
        handshake(count=2)


def test_a_wait_that_nobody_signals_is_explained() -> None:
    for seed in (None, 1):
        with pytest.raises(DeadlockError) as caught:
            handshake(init=INIT.replace("], 1", "], 2"), seed=seed)
        message = str(caught.value)
        assert "rank 0, CTA 0, warp 1 (32 threads) waits for the mbarrier at byte 0" in message
        assert "phase 0, 1 of 2 arrivals and 0 bytes missing" in message
        assert "mbarrier.try_wait.parity" in message


def test_a_wait_for_the_wrong_parity_is_found() -> None:
    found = 0
    for seed in SEEDS:
        try:
            handshake(parity=1, seed=seed)
        except (MemoryAccessError, DeadlockError):
            found += 1
    assert found >= 15


def test_a_barrier_that_some_warps_never_reach_is_explained() -> None:
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra SKIP;\nbar.sync 2, 128;\nSKIP:\n"
    with pytest.raises(DeadlockError, match=r"waits at barrier 2: 96 of 128 threads"):
        run(kernel(body, params=0, block=128), [], block=(128, 1, 1))


POLL = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  setp.eq.u32 %p2, %r1, {producer};
  @!%p2 bra WAIT;
  st.global.u32 [%d0+4], 9;
  st.release.gpu.global.u32 [%d0], 1;
  ret;
WAIT:
  ld.acquire.gpu.global.u32 %r5, [%d0];
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra WAIT;
  ld.global.u32 %r6, [%d0+4];
  st.global.u32 [%d0+8], %r6;
DONE:
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_polling_another_cta(seed: int | None) -> None:
    cells = torch.zeros(4, dtype=torch.int32)
    run(kernel(POLL.format(producer=1), params=1), [cells], grid=(2, 1, 1), seed=seed)
    assert cells.tolist() == [1, 9, 9, 0]


def test_polling_for_what_nobody_writes_is_explained() -> None:
    cells = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(DeadlockError) as caught:
        run(kernel(POLL.format(producer=7), params=1), [cells], grid=(2, 1, 1))
    assert "CTA 0 and 1 more CTAs, warp 0 (2 threads) reads 0x0 from byte 0 of buffer 'p0'" in str(
        caught.value
    )
    assert "again and again" in str(caught.value)
    assert "ld.acquire.gpu.global.u32" in str(caught.value)


def test_a_long_loop_without_stores_is_no_deadlock() -> None:
    body = """
  mov.u32 %r5, 0;
LOOP:
  add.u32 %r5, %r5, 1;
  setp.lt.u32 %p1, %r5, 1000;
  @%p1 bra LOOP;
  st.global.u32 [%d0], %r5;
"""
    cells = torch.zeros(1, dtype=torch.int32)
    report = run(kernel(body, params=1), [cells])
    assert cells.item() == 1000
    assert report.opcodes["setp.lt.u32"] == 1000


def test_diverged_lanes_meet_again() -> None:
    body = """
  mov.u32 %r5, 0;
  mov.u32 %r6, 0;
LOOP:
  and.b32 %r7, %r5, 1;
  setp.eq.u32 %p1, %r7, 0;
  @%p1 bra EVEN;
  add.u32 %r6, %r6, 100;
  bra JOIN;
EVEN:
  add.u32 %r6, %r6, 1;
JOIN:
  add.u32 %r5, %r5, 1;
  setp.le.u32 %p2, %r5, %r0;
  @%p2 bra LOOP;
  shfl.sync.idx.b32 %r8, %r6, 31, 31, -1;
  add.u32 %r6, %r6, %r8;
  add.s64 %d11, %d0, %d10;
  st.global.u32 [%d11], %r6;
"""
    out = torch.zeros(32, dtype=torch.int32)
    run(kernel(body, params=1), [out])
    value = [(lane // 2 + 1) + 100 * ((lane + 1) // 2) for lane in range(32)]
    assert out.tolist() == [v + value[31] for v in value]


def warp(lines: str) -> list[int]:
    out = torch.zeros(32, dtype=torch.int32)
    body = f"mov.u32 %r6, %r0;\n{lines}\nadd.s64 %d11, %d0, %d10;\nst.global.u32 [%d11], %r5;"
    run(kernel(body, params=1), [out])
    return [int(v) & 0xFFFFFFFF for v in out]


LANES = range(32)
VOTE = "setp.gt.u32 %p1, %r6, 3;\nvote.sync.{}.pred %p2, %p1, -1;\nselp.b32 %r5, 1, 0, %p2;"
FIRST_8 = "mov.u32 %r5, 7;\nsetp.lt.u32 %p1, %r6, 8;\n@!%p1 bra OUT;\n"
WARP = [
    ("shfl.sync.idx.b32 %r5, %r6, 5, 31, -1;", [5] * 32),
    ("shfl.sync.bfly.b32 %r5, %r6, 3, 31, -1;", [lane ^ 3 for lane in LANES]),
    ("shfl.sync.up.b32 %r5, %r6, 2, 0, -1;", [lane - 2 if lane > 1 else lane for lane in LANES]),
    ("shfl.sync.down.b32 %r5|%p1, %r6, 4, 31, -1;\n@!%p1 mov.u32 %r5, 99;",
     [lane + 4 if lane < 28 else 99 for lane in LANES]),
    ("shfl.sync.idx.b32 %r5, %r6, %r6, 0x181f, -1;", list(LANES)),
    ("mov.u32 %r7, 1;\nshfl.sync.idx.b32 %r5, %r6, %r7, 0x181f, -1;",
     [lane // 8 * 8 + 1 for lane in LANES]),
    ("setp.gt.u32 %p1, %r6, 3;\nvote.sync.ballot.b32 %r5, %p1, -1;", [0xFFFFFFF0] * 32),
    (VOTE.format("any"), [1] * 32),
    (VOTE.format("all"), [0] * 32),
    ("redux.sync.add.s32 %r5, %r6, -1;", [496] * 32),
    ("redux.sync.max.u32 %r5, %r6, -1;", [31] * 32),
    ("redux.sync.or.b32 %r5, %r6, -1;", [31] * 32),
    ("elect.sync _|%p1, -1;\nselp.b32 %r5, 1, 0, %p1;", [1] + [0] * 31),
    ("and.b32 %r7, %r6, 1;\nmatch.any.sync.b32 %r5, %r7, -1;", [0x55555555, 0xAAAAAAAA] * 16),
    (FIRST_8 + "shfl.sync.bfly.b32 %r5, %r6, 1, 31, 0xff;\nOUT:",
     [lane ^ 1 if lane < 8 else 7 for lane in LANES]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "wanted"), WARP, ids=[line.split(";")[-2][-40:] for line, _ in WARP]
)
def test_warp_instruction(lines: str, wanted: list[int]) -> None:
    assert warp(lines) == wanted


def test_a_shuffle_from_a_lane_outside_the_mask_is_found() -> None:
    lines = FIRST_8 + "shfl.sync.idx.b32 %r5, %r6, 9, 31, 0xff;\nOUT:"
    with pytest.raises(BarrierError, match="a lane that does not take part"):
        warp(lines)


SOME = "setp.lt.u32 %p1, %r6, 8;\nmov.u32 %r5, 7;\n"
BACK = "bra OVER;\nOUT:\n bar.sync 0;\n bra JOIN;\nOVER:\n bar.sync 0;\nJOIN:"


@pytest.mark.parametrize("operation", ["bfly.b32 %r5, %r6, 1, 31,", "idx.b32 %r5, %r6, 5, 31,"])
def test_a_guarded_shuffle_that_names_lanes_held_back_is_found(operation: str) -> None:
    wanted = warp(f"{SOME}@%p1 shfl.sync.{operation} 0xff;")
    assert wanted[:8] != [7] * 8
    assert wanted[8:] == [7] * 24
    with pytest.raises(BarrierError, match="shfl names a lane held back"):
        warp(f"{SOME}@%p1 shfl.sync.{operation} -1;")


def test_a_second_shuffle_that_names_more_lanes_waits_for_them() -> None:
    first = f"{FIRST_8}shfl.sync.bfly.b32 %r5, %r6, 1, 31, 0xff;\n"
    again = "shfl.sync.bfly.b32 %r5, %r5, 2, 31, {};\n" + BACK
    assert warp(first + again.format("0xff")) == [lane ^ 3 if lane < 8 else 7 for lane in LANES]
    with pytest.raises(DeadlockError, match="waits for the rest of its warp"):
        warp(first + again.format("-1"))


def test_a_warp_wide_instruction_waits_for_a_polling_lane() -> None:
    body = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra JOIN;
WAIT:
  ld.volatile.global.u32 %r5, [%d0];
  setp.eq.u32 %p2, %r5, 0;
  @%p2 bra WAIT;
JOIN:
  bar.warp.sync -1;
  st.global.u32 [%d0+4], %r0;
"""
    signal = "setp.eq.u32 %p3, %r1, 0;\n@%p3 bra REST;\nst.global.u32 [%d0], 1;\nret;\nREST:\n"
    cells = torch.zeros(2, dtype=torch.int32)
    run(kernel(signal + body, params=1), [cells], grid=(2, 1, 1))
    assert cells.tolist() == [1, 31]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (33, 1, 1)}, "use a multiple of 32"),
        ({"block": (64, 1, 1)}, r"compiled for \(32, 1, 1\)"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "no multiple of the cluster"),
        ({"dynamic_smem": 300000}, "use 0 to 232448 bytes"),
        ({"ranks": 2}, "one for each of 2 ranks"),
        ({"entry": "other"}, "the PTX has k"),
    ],
)
def test_a_wrong_launch_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(kernel("", params=0), [], **options)


def test_a_register_read_before_it_is_written() -> None:
    with pytest.raises(SimulationError, match=r"%r9 is read before it is written"):
        run(kernel("add.u32 %r5, %r9, 1;", params=0), [])


def test_ranks_signal_each_other() -> None:
    body = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  st.global.u32 [%d1+4], 5;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%d1], 1;
WAIT:
  ld.acquire.sys.global.u32 %r5, [%d0];
  setp.eq.u32 %p3, %r5, 0;
  @%p3 bra WAIT;
  ld.global.u32 %r6, [%d0+4];
  st.global.u32 [%d0+8], %r6;
DONE:
"""
    for seed in (None, 1, 2):
        boxes = [torch.zeros(3, dtype=torch.int32) for _ in range(4)]
        owned = [Owned(box, rank) for rank, box in enumerate(boxes)]
        params = [[owned[rank], owned[(rank + 1) % 4]] for rank in range(4)]
        simulate(kernel(body), grid=(1, 1, 1), block=(32, 1, 1), ranks=4, params=params, seed=seed)
        assert [box.tolist() for box in boxes] == [[1, 5, 5]] * 4

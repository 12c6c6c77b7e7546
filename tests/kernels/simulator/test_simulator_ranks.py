"""Several ranks at once: a mailbox of multicast fragments that carry their own flags."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.simulator import Fresh, Multicast, Owned, SimReport, simulate
from ptx_text import kernel

RANKS = 4
EMPTY = -1
# Every rank broadcasts one 16-byte fragment into slot `rank` of all mailboxes, then thread r of
# every rank polls slot r of its own mailbox until the fragment is there, and adds up its words.
MAILBOX = """
  cvt.u32.u64 %r2, %d3;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra RECEIVE;
  mul.lo.u32 %r5, %r2, 10;
  add.u32 %r6, %r5, 1;
  add.u32 %r7, %r5, 2;
  add.u32 %r8, %r5, 3;
  mul.wide.u32 %d4, %r2, 16;
  add.s64 %d4, %d0, %d4;
  multimem.st.relaxed.sys.global.v4.f32 [%d4], {{%r5, %r6, %r7, %r8}};
RECEIVE:
  setp.ge.u32 %p2, %r0, {ranks};
  @%p2 bra DONE;
  mul.wide.u32 %d5, %r0, 16;
  add.s64 %d5, %d1, %d5;
WAIT:
  ld.relaxed.sys.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d5];
  setp.eq.s32 %p3, %r10, -1;
  {others}
  @%p3 bra WAIT;
  add.u32 %r10, %r10, %r11;
  add.u32 %r10, %r10, %r12;
  add.u32 %r10, %r10, %r13;
  add.s64 %d6, %d2, %d10;
  st.global.u32 [%d6], %r10;
DONE:
"""
ALL_WORDS = "\n".join(f"setp.eq.or.s32 %p3, %r{word}, -1, %p3;" for word in (11, 12, 13))


def exchange(others: str, seed: int | None) -> tuple[list[torch.Tensor], SimReport]:
    boxes = [torch.full((RANKS, 4), EMPTY, dtype=torch.int32) for _ in range(RANKS)]
    sums = [torch.zeros(RANKS, dtype=torch.int32) for _ in range(RANKS)]
    every = Multicast(tuple(boxes))
    report = simulate(
        kernel(MAILBOX.format(ranks=RANKS, others=others), params=4),
        grid=(1, 1, 1),
        block=(32, 1, 1),
        ranks=RANKS,
        seed=seed,
        params=[[every, Owned(boxes[r], r), Fresh(sums[r]), r] for r in range(RANKS)],
        names=["all", "mailbox", "sums", "rank"],
    )
    return sums, report


WANTED = [40 * rank + 6 for rank in range(RANKS)]


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_a_mailbox_that_tests_every_word(seed: int | None) -> None:
    sums, report = exchange(ALL_WORDS, seed)
    assert [part.tolist() for part in sums] == [WANTED] * RANKS
    assert report.bytes("write", peer=True).distinct == RANKS * (RANKS - 1) * 16
    assert report.bytes("write", peer=False).distinct == RANKS * 16 + RANKS * RANKS * 4
    assert set(report.peer_bytes()) == {
        (a, b) for a in range(RANKS) for b in range(RANKS) if a != b
    }


def test_a_mailbox_that_tests_one_word_of_four_is_found() -> None:
    whole, _ = exchange("", None)
    assert [part.tolist() for part in whole] == [WANTED] * RANKS, "whole delivery hides it"
    wrong = 0
    for seed in range(20):
        sums, _ = exchange("", seed)
        wrong += [part.tolist() for part in sums] != [WANTED] * RANKS
    assert wrong == 20

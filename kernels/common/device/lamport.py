"""Publishing to and polling from the mailbox of `kernels/common/mailbox.py`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx, vector

SENTINEL = -(2**31)  # 0x80000000 as Int32


def positive_zeros(word: Any) -> Any:
    """A pair of BF16 with every -0.0 turned into +0.0, by integer arithmetic."""
    # Bit 15 of a half's magnitude + 0x7fff is set if the magnitude is not 0, without a carry; the
    # sign stays where it is: word & (sum | 0x7fff7fff).
    code = (
        "{ .reg .b32 t; and.b32 t, $1, 0x7fff7fff; add.u32 t, t, 0x7fff7fff;"
        " lop3.b32 $0, $1, t, 0x7fff7fff, 0xe0; }"
    )
    return ptx.asm(code, [Int32], word, pure=True)


def positive_zero(word: Any) -> Any:
    """An FP32 word, -0.0 turned into +0.0: that is the sentinel. Nothing else changes."""
    return ptx.select(word == Int32(SENTINEL), Int32(0), word)


def missing(words: Any) -> Any:
    """1 where one of the words is still the sentinel, else 0."""
    lines = [f"setp.eq.u32 p, ${1}, 0x80000000;"]
    lines += [f"setp.eq.or.u32 p, ${i + 1}, 0x80000000, p;" for i in range(1, len(words))]
    code = "{ .reg .pred p; " + " ".join(lines) + " selp.b32 $0, 1, 0, p; }"
    return ptx.asm(code, [Int32], *words, pure=True)


class Publisher:
    """Stores of 16, 8 or 4 bytes into every mailbox of the group, or into one.

    targets: the multicast address alone, or the address of every rank's mailbox, in rank order.
    """

    def __init__(self, targets: Any, multicast: bool) -> None:
        self.targets, self.multicast = targets, multicast

    def everywhere(self, offset: Any, words: Any) -> None:
        """Store four words, two or one, at `offset` (Int64 bytes) of every mailbox.

        The words hold no sentinel.
        """
        if len(words) == 1:
            one = ptx.multicast4 if self.multicast else ptx.store4_relaxed_sys
            for target in self.targets:
                one(target + offset, words[0])
            return
        four = len(words) == 4
        if self.multicast:
            send = ptx.multicast16 if four else ptx.multicast8
            send(self.targets[0] + offset, words)
            return
        store = ptx.store16_relaxed_sys if four else ptx.store8_relaxed_sys
        for target in self.targets:
            store(target + offset, words)


def choose(values: Any, index: Any) -> Any:
    """values[index] of a Python list of Int64, index Int32: a chain of selections."""
    chosen = values[0]
    for place in range(1, len(values)):
        chosen = ptx.select(index == Int32(place), values[place], chosen)
    return chosen


def poll(address: Any, stride: int, slots: int, timeout: int, error: Any, code: Any) -> cute.Tensor:
    """The 16 bytes at `address` of each of `slots` slots, `stride` bytes apart; see `poll_all`."""
    return poll_all([(address, slot * stride) for slot in range(slots)], timeout, error, code)


@cute.jit
def poll_all(
    places: cutlass.Constexpr,
    timeout: cutlass.Constexpr[int],
    error: Int64,
    code: Int32,
) -> cute.Tensor:
    """The 16 bytes at each place, once all are there: a list of (Int64 address, bytes beyond it).

    Returns a register tensor [places, 4] of words. All loads are in flight together, and all are
    repeated while one word is missing. timeout: number of rounds after which `code` plus the first
    missing place goes to the word at `error`, 0 for none.
    """
    slots = len(places)
    words = cute.make_rmem_tensor((slots, 4), Int32)
    waiting = Int32(1)
    rounds = Int32(0)
    while waiting != 0:
        for slot in cutlass.range_constexpr(slots):
            got = ptx.load16_relaxed_sys(places[slot][0], places[slot][1])
            for word in cutlass.range_constexpr(4):
                words[slot, word] = got[word]
        waiting = missing([words[slot, word] for slot in range(slots) for word in range(4)])
        if cutlass.const_expr(timeout > 0):
            rounds += 1
            if waiting != 0 and rounds >= timeout:
                first = Int32(0)
                for back in cutlass.range_constexpr(slots):
                    slot = slots - 1 - back
                    lost = missing([words[slot, word] for word in range(4)])
                    first = ptx.select(lost != Int32(0), Int32(slot), first)
                ptx.store4_relaxed_sys(error, code + first)
                waiting = Int32(0)
    return words


def rearm(address: Any, stride: int, slots: int) -> None:
    """Put the sentinel back into what `poll` read."""
    rearm_all([(address, slot * stride) for slot in range(slots)])


def rearm_all(places: list[tuple[Any, int]]) -> None:
    """Put the sentinel back into what `poll_all` read."""
    empty = [Int32(SENTINEL)] * 4
    for address, offset in places:
        ptx.store16_relaxed_sys(address, empty, offset)


def rank_sum(words: Any, slots: int, packed: bool) -> list[Any]:
    """The sum of the slots of a poll, first to last, in FP32: eight Float32."""
    total = ptx.unpack([words[0, word] for word in range(4)])
    for slot in range(1, slots):
        part = ptx.unpack([words[slot, word] for word in range(4)])
        total = vector.add(total, part, packed)
    return total

"""The expert plan: the tokens of each expert in units of eight. Imports the DSL.

Built by the CTA of the token that arrives last, when all ids are in memory. Tokens are bits of two
words an expert, so what is written does not depend on the order of anything.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx, warp
from k3fuse.kernels.router.route_config import EACH, Config, Shared
from k3fuse.kernels.router.units import UNIT, UNIT_WORDS

_STEPS = (1, 2, 4, 8, 16)


class ExpertPlan:
    """A counting sort of up to 64 tokens' ids by expert; all threads of one CTA."""

    def __init__(self, config: Config, given: Any, base: Any, tid: Any) -> None:
        shared = Shared(config)
        self.config, self.given, self.tid = config, given, tid
        self.lane = tid % 32
        self.warp = cute.arch.make_warp_uniform(tid // 32)
        self.tokens = base + Int32(shared.keys)
        self.first = base + Int32(shared.first)
        self.sums = base + Int32(shared.sums)

    @cute.jit
    def build(self) -> None:
        """Write the plan."""
        own = self.tokens + self.tid * Int32(8 * EACH)
        nothing = [Int32(0)] * 4
        warp.shared_store16(own, nothing)
        warp.shared_store16(own + Int32(16), nothing)
        cute.arch.sync_threads()
        count = self.given.m * Int32(self.config.top_k)
        for place in cutlass.range(self.tid, count, self.config.threads, unroll=1):
            expert, word, bit = self.entry(place)
            warp.shared_or4(self.tokens + expert * Int32(8) + word, bit)
        cute.arch.sync_threads()
        self.number(own)
        cute.arch.sync_threads()
        for place in cutlass.range(self.tid, count, self.config.threads, unroll=1):
            self.write(place)

    def entry(self, place: Any) -> tuple[Any, Any, Any]:
        """Expert of a place; byte offset of its token's word, and the token's bit in it."""
        expert = ptx.load4(self.given.ids + place.to(Int64) * Int64(8))
        token = place // Int32(self.config.top_k)
        return expert, (token // Int32(32)) * Int32(4), Int32(1) << (token % Int32(32))

    @cute.jit
    def number(self, own: Int32) -> None:
        """The first unit of each expert: sums over a thread's four, the lanes, the warps."""
        units = self.units(own)
        ends = [units[0]]
        for i in cutlass.range_constexpr(1, EACH):
            ends.append(ends[i - 1] + units[i])
        total = inclusive(ends[EACH - 1])
        if self.lane == 31:
            ptx.shared_store4(self.sums + self.warp * Int32(4), total)
        cute.arch.sync_threads()
        start = total - ends[EACH - 1] + self.before()
        place = self.first + self.tid * Int32(4 * EACH)
        warp.shared_store16(place, [start, *(start + end for end in ends[: EACH - 1])])
        if self.tid == self.config.threads - 1:
            ptx.store4(self.given.plan, start + ends[EACH - 1])

    def units(self, own: Any) -> list[Any]:
        """Units of a thread's experts."""
        words = [*ptx.shared_load16(own), *ptx.shared_load16(own, 16)]
        found = []
        for i in range(EACH):
            tokens = warp.ones(words[2 * i]) + warp.ones(words[2 * i + 1])
            found.append((tokens + Int32(UNIT - 1)) // Int32(UNIT))
        return found

    def before(self) -> Any:
        """Units of the warps before this one."""
        total = Int32(0)
        for other in range(self.config.warps - 1):
            here = ptx.shared_load4(self.sums, 4 * other)
            total = total + ptx.select(self.warp > Int32(other), here, Int32(0))
        return total

    @cute.jit
    def write(self, place: Int32) -> None:
        """One place of its expert's unit; the first one writes the head, the last one the end."""
        expert, word, bit = self.entry(place)
        tokens = self.tokens + expert * Int32(8)
        low, high = ptx.shared_load4(tokens), ptx.shared_load4(tokens, 4)
        below = bit - Int32(1)
        early = warp.ones(ptx.select(word == 0, low & below, low))
        late = warp.ones(ptx.select(word == 0, Int32(0), high & below))
        rank, total = early + late, warp.ones(low) + warp.ones(high)
        unit = ptx.shared_load4(self.first + expert * Int32(4)) + rank // Int32(UNIT)
        address = self.given.plan + (unit * Int32(UNIT_WORDS) + Int32(1)).to(Int64) * Int64(4)
        slot = rank % Int32(UNIT)
        ptx.store4(address + (slot + Int32(2)).to(Int64) * Int64(4), place)
        if slot == 0:
            ptx.store4(address, expert)
            ptx.store4(address + Int64(4), ptx.least(total - rank, UNIT))
        if rank == total - 1:
            for empty in cutlass.range_constexpr(1, UNIT):
                if slot < empty:
                    ptx.store4(address + Int64(4 * (2 + empty)), Int32(-1))


def inclusive(value: Any) -> Any:
    """The sum over the lanes up to this one."""
    for step in _STEPS:
        value = value + warp.shuffle_word_up(value, step)
    return value

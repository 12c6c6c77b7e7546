"""What the race checker says: pairs of accesses, and what would order them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.simulator.clocks import IN_FLIGHT, Clocks
from k3fuse.kernels.simulator.flags import Flags
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.order import SCOPES
from k3fuse.kernels.simulator.shadow import CLOCK_MASK, Shadow
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Unready

MOST_RACES = 20


@dataclass(frozen=True)
class Access:
    """One of the two sides of a race. `warp` is -1 for an asynchronous copy."""

    verb: str
    rank: int
    cta: int
    warp: int
    lane: int
    line: int
    text: str
    launch: str = ""

    def __str__(self) -> str:
        if self.cta < 0:
            who = "an asynchronous copy that nobody has waited for"
        else:
            who = f"{self.launch}, " if self.launch else ""
            who += f"rank {self.rank}, CTA {self.cta}, "
            who += f"warp {self.warp}, lane {self.lane}" if self.warp >= 0 else "asynchronous copy"
        return f"{self.verb} by {who}: line {self.line} `{self.text}`"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders.

    `kind` is "write/read", "read/write", "write/write" (with "atomic" in place of "write" for
    atomics), "missing proxy fence" or "mbarrier used before its init is visible"; `space` is
    "global" or "shared"; `place` names the first byte in conflict; `first` came earlier in this
    run; `missing` says what would order them.
    """

    kind: str
    space: str
    place: str
    first: Access
    second: Access
    missing: str

    def __str__(self) -> str:
        return (
            f"{self.kind} race on {self.place}\n    {self.first}\n    {self.second}\n"
            f"    missing: {self.missing}"
        )


class Reporter:
    """Collects races, one for each kind and pair of source lines."""

    def __init__(self, clocks: Clocks, flags: Flags) -> None:
        self.clocks, self.flags = clocks, flags
        self.races: dict[tuple[str, int, int], Race] = {}
        self.count = 0
        self.sites: dict[tuple[int, str], int] = {}
        self.texts: list[tuple[int, str]] = []

    def site(self, origin: Origin) -> int:
        """The number of a place in the code."""
        key = origin.line, origin.text
        number = self.sites.get(key)
        if number is None:
            number = self.sites[key] = len(self.texts)
            self.texts.append(key)
        return number

    def conflicts(
        self,
        shadow: Shadow,
        cells: Array,
        entries: Array,
        bad: Array,
        threads: Array,
        site: Origin,
        verbs: tuple[str, str],
        *,
        proxy: bool = False,
    ) -> None:
        """Report the candidates `bad` [n, cells] that single lanes do not know either."""
        known: dict[tuple[int, int, int], bool] = {}
        own = self.site(site)
        lanes, places = np.nonzero(bad)
        candidates = zip(
            threads[lanes].tolist(), lanes.tolist(), places.tolist(),
            entries[lanes, places].tolist(), strict=True,
        )  # fmt: skip
        for thread, lane, place, (epoch, info) in candidates:
            column, clock = epoch >> 32, epoch & CLOCK_MASK
            bearer = thread if thread in self.clocks.private else -(thread >> 5) - 1
            same_warp = column == self.clocks.column[thread >> 5]
            key = thread if same_warp else bearer, epoch, info & 31
            answer = known.get(key)
            if answer is None:
                answer = self.clocks.knows(thread, int(proxy), column, clock, info & 31)
                if proxy and not answer:  # without any order it is a race, reported as such
                    answer = not self.clocks.knows(thread, 0, column, clock, info & 31)
                known[key] = answer
            if answer:
                continue
            self.count += 1
            kind = "missing proxy fence" if proxy else "/".join(verbs)
            pair = kind, info >> 8, own
            if pair not in self.races and len(self.races) < MOST_RACES:
                first = self._access(verbs[0], column, info)
                mine = int(self.clocks.column[thread >> 5])
                second = self._access(verbs[1], mine, own << 8 | (thread & 31))
                where = shadow.describe(int(cells[lane, place]) << shadow.shift)
                missing = self._missing(thread, column, clock, info, site, proxy)
                self.races[pair] = Race(kind, shadow.space, where, first, second, missing)

    def barrier(self, shadow: Shadow, unready: Unready, site: Origin) -> None:
        """Report the use of an mbarrier whose init is not visible."""
        self.count += 1
        kind = "mbarrier used before its init is visible"
        own = self.site(site)
        pair = kind, unready.barrier.site, own
        if pair in self.races or len(self.races) >= MOST_RACES:
            return
        column, _, lane = unready.barrier.init
        first = self._access("init", column, unready.barrier.site << 8 | lane)
        mine = int(self.clocks.column[unready.thread >> 5])
        second = self._access("use", mine, own << 8 | (unready.thread & 31))
        where = shadow.describe(unready.place)
        self.races[pair] = Race(kind, "shared", where, first, second, unready.missing)

    def _access(self, verb: str, column: int, info: int) -> Access:
        clocks = self.clocks
        line, text = self.texts[info >> 8]
        return Access(
            verb, clocks.rank[column], clocks.number[column], clocks.warp[column], info & 31,
            line, text, clocks.label[column],
        )  # fmt: skip

    def _missing(
        self, thread: int, column: int, clock: int, info: int, site: Origin, proxy: bool
    ) -> str:
        clocks = self.clocks
        mine = int(clocks.column[thread >> 5])
        if proxy:
            return "fence.proxy.async between the write and the asynchronous read"
        if column == IN_FLIGHT:
            return "a wait for the copy: cp.async.wait_group or wait_all, bulk.wait_group"
        if clocks.warp[column] < 0:
            return "a wait for the mbarrier that counts all bytes of the asynchronous copy"
        if clocks.label[column] != clocks.label[mine] and clocks.rank[column] == clocks.rank[mine]:
            return "griddepcontrol.wait in the later launch, and in every one between them"
        if column == mine:
            return "bar.warp.sync between lanes of one warp"
        other, strength = info >> 5 & 7, site.order.strength
        if other and strength:
            return (
                f"both are strong at .{SCOPES[min(other, strength)]} scope, "
                f"{self.flags.distance(mine, column)}"
            )
        for part in self.flags.pending.get(thread, {}).values():
            if part.stamp.covers(0, column, clock, info & 31):
                return "the flag is loaded relaxed: use ld.acquire, or a fence.acq_rel after it"
        for stamp, why in reversed(self.flags.missed.get(thread, [])):
            if stamp.covers(0, column, clock, info & 31):
                return why
        if other or strength:
            return "one side is weak: use ld/st.relaxed with a scope on both, or order them"
        if clocks.cta[column] == clocks.cta[mine]:
            return self._between_warps(thread, column, clock, info & 31)
        if clocks.cluster[column] == clocks.cluster[mine]:
            return "barrier.cluster.arrive and .wait, or an mbarrier, between the two"
        return "a flag: st.release by the first, ld.acquire by the second"

    def _between_warps(self, thread: int, column: int, clock: int, lane: int) -> str:
        first = thread & ~31
        for other in range(first, first + 32):
            if other != thread and self.clocks.knows(other, 0, column, clock, lane):
                return "bar.warp.sync after the wait: only another lane of the warp waited"
        return "bar.sync (or an mbarrier) between the two"

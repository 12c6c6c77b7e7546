"""Accesses against the shadow of a memory: which earlier ones nothing orders before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from k3fuse.kernels.simulator.clocks import Clocks
from k3fuse.kernels.simulator.errors import SimulationError
from k3fuse.kernels.simulator.memory import Buffer, Origin
from k3fuse.kernels.simulator.race_report import Reporter
from k3fuse.kernels.simulator.shadow import CLOCK_MASK, Shadow, epoch_of, info_of
from k3fuse.kernels.simulator.shared import FIRST_BYTE, SharedMemory
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.machine import Group

Memory = Buffer | SharedMemory
Agent = tuple[np.int64, np.int64]  # column and clock of a copy


class Who(NamedTuple):
    """The threads that do an access, one a row: [n, 1] columns, rows and lanes."""

    threads: Array
    columns: Array
    rows: Array
    lanes: Array


class Checks:
    """Shadows of all memories, and the checks of reads and writes against them."""

    def __init__(self, clocks: Clocks, reporter: Reporter, groups: list[Group]) -> None:
        self.clocks, self.reporter, self.groups = clocks, reporter, groups
        self.shadows: dict[int, Shadow] = {}

    def shadow(self, memory: Memory) -> Shadow:
        """The shadow of a memory."""
        known = self.shadows.get(id(memory))
        if known is None:
            known = self.shadows[id(memory)] = _shadow(memory, self.groups)
        return known

    def who(self, site: Origin, chosen: Any, count: int) -> Who:
        """The threads of `count` accesses; one thread may do them all."""
        threads: Any = site.threads
        if len(threads) == 1 and count > 1:
            threads = np.repeat(threads, count)
        elif chosen is not None:
            threads = threads[chosen]
        if len(threads) != count:
            raise SimulationError(
                f"{count} accesses by {len(threads)} threads are not modelled for races: "
                f"{site.where(0)}"
            )
        rows = threads >> 5
        return Who(
            threads, self.clocks.column[rows][:, None], rows[:, None], (threads & 31)[:, None]
        )

    def entry(self, who: Who, site: Origin, agent: Agent | None, cells: Array) -> Array:
        """[n, cells, 2] entries for the shadow."""
        entry = np.empty((*cells.shape, 2), np.int64)
        number, strength = self.reporter.site(site), site.order.strength
        if agent is None:
            entry[..., 0] = epoch_of(who.columns, self.clocks.clock[who.rows])
        else:
            entry[..., 0] = (agent[0] << 32) | agent[1]
        entry[..., 1] = info_of(number, strength, who.lanes)
        return entry

    def read(
        self,
        shadow: Shadow,
        cells: Array,
        who: Who,
        site: Origin,
        agent: Agent | None = None,
    ) -> None:
        """Check reads, and record them as those of the threads or of an agent."""
        if shadow.any_write:
            self._conflicts(shadow, "writes", cells, who, site, ("write", "read"))
        free = self.free(shadow, cells, who)
        shadow.read(cells, self.entry(who, site, agent, cells), free)

    def free(self, shadow: Shadow, cells: Array, who: Who) -> Array:
        """Where the oldest read is none, one's own, or known to the reader."""
        old = shadow.oldest[cells, 0]
        if not old.any():
            return np.ones(cells.shape, np.bool_)
        column = old >> 32
        free: Array = (column == who.columns) & (old != 0)
        free |= self.clocks.known(who.rows, 0, column) >= (old & CLOCK_MASK)
        return free

    def write(
        self,
        shadow: Shadow,
        cells: Array,
        who: Who,
        site: Origin,
        verb: str,
        agent: Agent | None = None,
    ) -> None:
        """Check writes, and record them."""
        if shadow.any_write:
            self._conflicts(shadow, "writes", cells, who, site, ("write", verb))
        if shadow.any_read:
            self._conflicts(shadow, "oldest", cells, who, site, ("read", verb))
        if shadow.any_latest:
            self._conflicts(shadow, "latest", cells, who, site, ("read", verb))
        entry = self.entry(who, site, agent, cells)
        lost = shadow.written(cells, entry)
        if lost.any() and agent is None and verb == "write":
            self._conflicts(shadow, "writes", cells, who, site, ("write", verb))

    def _conflicts(
        self,
        shadow: Shadow,
        table: str,
        cells: Array,
        who: Who,
        site: Origin,
        verbs: tuple[str, str],
    ) -> None:
        """Report the entries of a table that these threads neither know nor may race with."""
        entries = getattr(shadow, table)[cells]
        epoch = entries[..., 0]
        if not epoch.any():
            return
        column, clock = epoch >> 32, epoch & CLOCK_MASK
        bad = self.clocks.known(who.rows, 0, column) < clock
        if not bad.any():
            return
        synced = self.clocks.synced[who.rows]
        same = (clock < synced) | (entries[..., 1] & 31 == who.lanes)
        bad &= ~((column == who.columns) & same)
        strength = site.order.strength
        if strength and bad.any():
            other = entries[..., 1] >> 5 & 7
            scope = np.minimum(other, strength)
            mine = np.broadcast_to(who.columns, column.shape)
            bad &= ~((other > 0) & self.clocks.includes(mine, column, scope))
        if bad.any():
            self.reporter.conflicts(shadow, cells, entries, bad, who.threads, site, verbs)

    def proxy_read(self, shadow: Shadow, cells: Array, who: Who, site: Origin) -> None:
        """The async proxy reads what warps wrote: there must be a proxy fence on the way."""
        if not shadow.any_write:
            return
        entries = shadow.writes[cells]
        column, clock = entries[..., 0] >> 32, entries[..., 0] & CLOCK_MASK
        bad = (self.clocks.places[3][column] >= 0) & (entries[..., 0] != 0)
        bad &= self.clocks.known(who.rows, 1, column) < clock
        if bad.any():
            self.reporter.conflicts(
                shadow, cells, entries, bad, who.threads, site, ("write", "read"), proxy=True
            )


def _shadow(memory: Memory, groups: list[Group]) -> Shadow:
    if isinstance(memory, Buffer):
        buffer = memory
        return Shadow(len(memory.data), "global", lambda at: f"byte {at} of {buffer.describe()}")
    shared = memory
    group = next(item for item in groups if item.shared is shared)

    def describe(at: int) -> str:
        cta = int(group.cta_numbers[at // shared.size])
        offset = at % shared.size - FIRST_BYTE
        return f"byte {offset} of the shared memory of CTA {cta} of rank {group.rank}"

    return Shadow(len(shared.data), "shared", describe)

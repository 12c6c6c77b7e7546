"""The race checker: an observer of every access, barrier and copy of a simulated run.

It finds pairs of conflicting accesses that no chain of release and acquire orders, in whatever
order this run happened to do them. The parts: clocks.py (who knows what), shadow.py (who touched
what), conflicts.py (the checks), flags.py (order through words), arrivals.py (order through
barriers), race_report.py. The machine holds one `RaceChecker`, or None: then nothing is called.

Asynchronous copies report themselves in one call where they are issued, and one for each part that
lands, before the mbarrier counts its bytes::

    copies = races.copy(who, shared, barriers, writes=[(shared, places, 16)], parts=2)
    ...
    copies.land()

`who` is the Origin of the issuing threads; `barriers` holds the byte offset of an mbarrier for each
of them. `writes` and `reads` list (memory, byte offsets, bytes at each) with one row of offsets for
each thread: [n] or [n, runs]. A copy to several CTAs makes one call for each of them, with the
mbarrier there. Reads through the async proxy without an mbarrier call `async_read`.

The checker is an Observer of grids: a launch is ordered after an earlier one of its rank only where
it started after that was complete, or has passed griddepcontrol.wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.arrivals import Arrivals, Copies
from k3fuse.kernels.simulator.clocks import IN_FLIGHT, Clocks, Stamp
from k3fuse.kernels.simulator.conflicts import Agent, Checks, Memory, Who
from k3fuse.kernels.simulator.errors import SimulationError
from k3fuse.kernels.simulator.flags import Flags
from k3fuse.kernels.simulator.memory import GlobalMemory, Origin
from k3fuse.kernels.simulator.race_report import Race, Reporter
from k3fuse.kernels.simulator.shared import SharedMemory
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.grids import Grid
    from k3fuse.kernels.simulator.machine import Group

_SPARE = 32  # columns of a CTA for the copies of its mbarriers, at most
Run = tuple[Memory, Array, int]


class RaceChecker:
    """Watches a run; `races` and `count` say what it found."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.flags = Flags(self.clocks)
        self.arrivals = Arrivals(self.clocks, self.flags)
        self.reporter = Reporter(self.clocks, self.flags)
        self.groups: list[Group] = []
        self.checks = Checks(self.clocks, self.reporter, self.groups)
        self.held: SimulationError | None = None
        self._ended: dict[tuple[int, int], Stamp] = {}

    @property
    def races(self) -> tuple[Race, ...]:
        """The first races found, one for each pair of source lines."""
        return tuple(self.reporter.races.values())

    @property
    def count(self) -> int:
        """How many conflicting pairs of accesses were seen."""
        return self.reporter.count

    def hold(self, error: SimulationError) -> None:
        """Keep an error (a read of unwritten bytes) to the end: the race behind it may follow."""
        self.held = self.held or error

    def watch(self, run: Callable[[], None]) -> None:
        """Run the machine; an error that ends it carries the races found before."""
        try:
            run()
        except SimulationError as error:
            first = self.held or error
        else:
            if self.held is None:
                return
            first = self.held
        if self.races:
            first.races = self.races
            first.add_note("races found before:\n" + "\n".join(map(str, self.races)))
        raise first

    # Launches: the methods of grids.Observer

    def expect(self, grids: Sequence[Grid]) -> None:
        """All grids that will run."""
        rows = columns = 0
        for grid in grids:
            warps = len(grid.order) * math.prod(grid.shape[1]) // 32
            rows += warps
            columns += warps + len(grid.order) * _copies(grid)
        self.clocks.reserve(rows, columns)

    def grid_begin(self, grid: Grid) -> None:
        """Nothing is known of a grid before its CTAs are there."""

    def group_begin(self, group: Group) -> None:
        """CTAs join, ordered after the launches that are complete for certain."""
        group.first_thread = 32 * len(self.clocks.alive)
        group.races = group.shared.races = self
        self.groups.append(group)
        copies = _copies(group.grid)
        for index in range(group.ctas):
            lanes = slice(index * group.threads, (index + 1) * group.threads)
            cluster = (len(self.groups) << 32) + int(group.cluster_base[index])
            self.clocks.add_cta(
                group.rank, cluster, int(group.cta_numbers[index]), group.grid.label,
                group.alive[lanes], copies,
            )  # fmt: skip
        self._after(group.all_lanes + group.first_thread, group.rank, group.grid.sure_at_start)

    def grid_wait(self, group: Group, lanes: Array) -> None:
        """Lanes go on after griddepcontrol.wait, ordered after what is complete for certain now."""
        self._after(np.sort(lanes) + group.first_thread, group.rank, group.grid.sure)

    def grid_end(self, grid: Grid) -> None:
        """A grid is complete and its memory visible, to those that know that it is."""
        rows: list[int] = []
        for group in grid.groups:
            first = group.first_thread // 32
            rows.extend(range(first, first + group.size // 32))
        self._ended[grid.rank, grid.index] = self.clocks.all_of(rows)

    def _after(self, threads: Array, rank: int, launches: frozenset[int]) -> None:
        for index in sorted(launches):
            if (rank, index) in self._ended:
                self.clocks.learn(threads, self._ended[rank, index])

    # Accesses

    def read(self, memory: Memory, offset: Array, size: int, site: Origin, chosen: Any) -> None:
        """Loads of `size` bytes at byte offsets of a buffer or of the shared memory of a group."""
        if site.threads is None:
            return
        shadow, who = self.checks.shadow(memory), self.checks.who(site, chosen, len(offset))
        cells = shadow.cells(offset, size)
        self.checks.read(shadow, cells, who, site)
        if site.order.strength:
            words = (offset >> 2)[:, None] + np.arange(max(size >> 2, 1))
            self.flags.load(shadow, words, who.threads, site.order)

    def write(self, memory: Memory, offset: Array, size: int, site: Origin, chosen: Any) -> None:
        """Stores of `size` bytes."""
        if site.threads is None:
            return
        shadow, who = self.checks.shadow(memory), self.checks.who(site, chosen, len(offset))
        self.checks.write(shadow, shadow.cells(offset, size), who, site, "write")
        words = (offset >> 2)[:, None] + np.arange(max(size >> 2, 1))
        self.flags.store(shadow, words, who.threads, site.order)

    def update(self, memory: Memory, offset: Array, size: int, site: Origin, chosen: Any) -> None:
        """Atomics: one write each as for conflicts, with the order of both a load and a store."""
        if site.threads is None:
            return
        shadow, who = self.checks.shadow(memory), self.checks.who(site, chosen, len(offset))
        self.checks.write(shadow, shadow.cells(offset, size), who, site, "atomic")
        self.flags.update(shadow, (offset >> 2)[:, None], who.threads, site.order)

    def spread(
        self, memory: GlobalMemory, address: Array, size: int, site: Origin, adds: bool
    ) -> None:
        """Multicast stores or additions to one member, when they are issued; they land later."""
        for buffer, chosen, offset in memory.resolve(address, size, site, "write"):
            if adds:
                for item in range(0, size, 4):
                    self.update(buffer, offset + item, 4, site, chosen)
            else:
                self.write(buffer, offset, size, site, chosen)

    def async_read(self, site: Origin, memory: Memory, places: Array, size: int) -> None:
        """Reads through the async proxy that are complete when the instruction is."""
        if site.threads is None:
            return
        shadow, who = self.checks.shadow(memory), self.checks.who(site, None, len(places))
        cells = shadow.cells(places.reshape(-1), size).reshape(len(who.threads), -1)
        self.checks.read(shadow, cells, who, site)
        self.checks.proxy_read(shadow, cells, who, site)

    def copy(
        self,
        site: Origin,
        shared: SharedMemory,
        barriers: Array,
        *,
        writes: Sequence[Run] = (),
        reads: Sequence[Run] = (),
        parts: int = 1,
    ) -> Copies:
        """Asynchronous copies that mbarriers count; see the top of this file."""
        issued: list[Any] = []
        if site.threads is None:
            return Copies(self.arrivals, issued, parts)
        self.use_barriers(site, shared, barriers, copy=True)
        for place in np.unique(barriers).tolist():
            entry = self.arrivals.copy(id(shared), place)
            if entry is None:
                continue
            chosen = np.flatnonzero(barriers == place)
            issued.append(entry)
            who = self.checks.who(site, chosen, len(chosen))
            agent = np.int64(entry[0].agent), np.int64(entry[1])
            for memory, places, size in reads:
                self._copy_part(memory, places[chosen], size, who, site, agent, "read")
            for memory, places, size in writes:
                self._copy_part(memory, places[chosen], size, who, site, agent, "write")
        return Copies(self.arrivals, issued, parts)

    def _copy_part(
        self,
        memory: Memory,
        places: Array,
        size: int,
        who: Who,
        site: Origin,
        agent: Agent,
        verb: str,
    ) -> None:
        shadow = self.checks.shadow(memory)
        cells = shadow.cells(places.reshape(-1), size).reshape(len(who.threads), -1)
        if verb == "read":
            self.checks.read(shadow, cells, who, site, agent)
            self.checks.proxy_read(shadow, cells, who, site)
        else:
            self.checks.write(shadow, cells, who, site, "write", agent)

    def start_copy(
        self, site: Origin, *, writes: Sequence[Run] = (), reads: Sequence[Run] = ()
    ) -> None:
        """Copies that their threads wait for by groups: until `finish_copy` nobody may touch them.

        What they read they read through the async proxy.
        """
        who = self.checks.who(site, None, len(site.ctas))
        agent = np.int64(IN_FLIGHT), np.int64(1)
        for memory, places, size in reads:
            self._copy_part(memory, places, size, who, site, agent, "read")
        for memory, places, size in writes:
            self._copy_part(memory, places, size, who, site, agent, "write")

    def finish_copy(
        self, site: Origin, *, writes: Sequence[Run] = (), reads: Sequence[Run] = ()
    ) -> None:
        """These copies are complete, as accesses of the threads that waited for them."""
        who = self.checks.who(site, None, len(site.ctas))
        for memory, places, size in reads:
            shadow = self.checks.shadow(memory)
            cells = shadow.cells(places.reshape(-1), size).reshape(len(who.threads), -1)
            for table in (shadow.oldest, shadow.latest):
                epochs = table[cells, 0]
                table[cells, 0] = np.where(epochs >> 32 == IN_FLIGHT, 0, epochs)
            entry = self.checks.entry(who, site, None, cells)
            shadow.read(cells, entry, self.checks.free(shadow, cells, who))
        for memory, places, size in writes:
            shadow = self.checks.shadow(memory)
            cells = shadow.cells(places.reshape(-1), size).reshape(len(who.threads), -1)
            shadow.written(cells, self.checks.entry(who, site, None, cells))

    # Barriers and fences

    def use_barriers(
        self, site: Origin, shared: SharedMemory, places: Array, *, copy: bool = False
    ) -> None:
        """Threads use mbarriers, which they must know to be initialised."""
        if site.threads is None:
            return
        for unready in self.arrivals.unready(id(shared), places, site.threads, copy):
            self.reporter.barrier(self.checks.shadow(shared), unready, site)

    def barrier_arrive(self, site: Origin, shared: SharedMemory, places: Array) -> None:
        """`mbarrier.arrive`, before it is counted."""
        if site.threads is not None:
            self.use_barriers(site, shared, places)
            self.arrivals.barrier_arrive(id(shared), places, site.threads, site.order)

    def barrier_wait(self, site: Origin, shared: SharedMemory, places: Array, done: Array) -> None:
        """`mbarrier.try_wait`; `done` tells which threads found the phase complete."""
        if site.threads is not None:
            self.use_barriers(site, shared, places)
            if done.any():
                self.arrivals.barrier_wait(id(shared), places[done], site.threads[done], site.order)

    def barrier_init(self, site: Origin, shared: SharedMemory, places: Array) -> None:
        """`mbarrier.init`."""
        if site.threads is not None:
            number = self.reporter.site(site)
            for place, thread in zip(places.tolist(), site.threads.tolist(), strict=True):
                column = int(self.clocks.column[thread >> 5])
                self.arrivals.initialise(id(shared), place, thread, number, column)

    def barrier_phase(self, shared: SharedMemory, places: Array) -> None:
        """A phase of these mbarriers is complete."""
        self.arrivals.phase(id(shared), places)

    def fence(self, threads: Array, strength: int) -> None:
        """A fence at a scope; strength 0 is fence.proxy.async, -1 fence.mbarrier_init."""
        if strength > 0:
            self.flags.fence(threads, strength)
            return
        if strength == 0:
            self.clocks.fence_proxies(threads)
        self.arrivals.fence_inits(threads)


def _copies(grid: Grid) -> int:
    """About how many mbarriers with asynchronous copies a CTA of a grid has: its inits."""
    bodies = [code.block.body for code in grid.program.codes]
    inits = sum(item.opcode.startswith("mbarrier.init") for body in bodies for item in body)
    return min(inits, _SPARE)

"""Order through barriers: named, cluster and mbarriers, and the asynchronous copies of the latter.

Asynchronous copies are accesses of a pseudo agent, one for each mbarrier. The mbarrier passes on
the copies that have landed as a whole, so one that expects too few bytes passes on too little.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from k3fuse.kernels.simulator.clocks import Clocks, Stamp
from k3fuse.kernels.simulator.flags import Flags, Part
from k3fuse.kernels.simulator.order import Order
from k3fuse.kernels.simulator.types import Array

_NARROW = "the mbarrier orders at .cta scope, the peer is in another CTA: use .cluster"


@dataclass
class BarrierOrder:
    """One mbarrier: who initialised it, its agent, the messages of arrivals and of full phases.

    `own` are arrivals from its CTA and landed copies, `remote` those from other CTAs of the
    cluster; `own_done` and `remote_done` what the last complete phase passes on.
    """

    init_thread: int
    init: tuple[int, int, int]  # column, clock, lane
    site: int
    cta_column: int
    fenced: bool = False
    published: int | None = None
    agent: int = -1
    issued: int = 0
    open: set[int] = field(default_factory=set)
    own: Stamp = field(default_factory=Stamp)
    remote: Stamp = field(default_factory=Stamp)
    own_done: Stamp = field(default_factory=Stamp)
    remote_done: Stamp = field(default_factory=Stamp)
    narrow: Stamp = field(default_factory=Stamp)  # arrivals of other CTAs at .cta scope: lost


class Copies:
    """Copies under way: `land` is called for each of their parts, before the mbarrier counts it."""

    def __init__(self, arrivals: Arrivals, issued: list[tuple[BarrierOrder, int]], parts: int):
        self.arrivals, self.issued, self.parts = arrivals, issued, parts

    def land(self) -> None:
        """One part has landed; after the last one the mbarrier passes the copies on."""
        self.parts -= 1
        if self.parts == 0:
            for barrier, number in self.issued:
                barrier.open.discard(number)
                landed = min(barrier.open) - 1 if barrier.open else barrier.issued
                values = np.full((2, 1), landed, np.int32)
                barrier.own.join(Stamp(barrier.agent, values))


class Unready(NamedTuple):
    """An mbarrier that a thread uses without knowing its initialisation."""

    place: int
    thread: int
    barrier: BarrierOrder
    missing: str


class Arrivals:
    """The barriers of all CTAs."""

    def __init__(self, clocks: Clocks, flags: Flags) -> None:
        self.clocks, self.flags = clocks, flags
        self.named: dict[tuple[int, int], Stamp] = {}
        self.clusters: dict[tuple[int, int], Stamp] = {}
        self.waited: dict[int, int] = {}  # row -> its latest cluster barrier phase
        self.inits: dict[int, list[BarrierOrder]] = {}  # thread -> mbarriers it initialised
        self.barriers: dict[tuple[int, int], BarrierOrder] = {}

    def _by_cta(self, threads: Array) -> list[tuple[int, Array]]:
        ctas = self.clocks.places[2][self.clocks.column[threads >> 5]]
        cuts = np.flatnonzero(np.diff(ctas)) + 1
        parts = np.split(threads, cuts)
        return [(int(self.clocks.cta_of(int(part[0]))), part) for part in parts]

    def arrive(self, name: int, threads: Array) -> None:
        """Threads (sorted) arrive at the named barrier of their CTA."""
        for cta, members in self._by_cta(threads):
            stamp = self.clocks.publish(members)
            known = self.named.get((cta, name))
            if known is None:
                self.named[cta, name] = stamp
            else:
                known.join(stamp)

    def leave(self, name: int, threads: Array) -> None:
        """All waiting threads (sorted) of some CTAs leave the named barrier: its phase is over."""
        for cta, members in self._by_cta(threads):
            self.clocks.learn(members, self.named.pop((cta, name), Stamp()))
        self.clocks.sync_warps(threads)

    def cluster_arrive(self, threads: Array, phases: Array, relaxed: bool) -> None:
        """Threads (sorted) arrive at the barrier of their cluster; `phases` counts per thread."""
        for row, members, _ in self.clocks.warps_of(threads):
            column = int(self.clocks.column[row])
            phase = int(phases[np.searchsorted(threads, members[0])])
            key = self.clocks.cluster[column], phase
            self.clusters.pop((key[0], phase - 2), None)
            total = self.clusters.setdefault(key, Stamp())
            if not relaxed:
                total.join(self.clocks.publish(members))
                continue
            for thread in members.tolist():
                for strength, stamp in self.flags.fenced(thread, 2):
                    if strength >= 2:
                        total.join(stamp)
                for barrier in self.inits.get(thread, []):
                    if barrier.fenced and barrier.published is None:
                        barrier.published = phase

    def cluster_leave(self, threads: Array, phases: Array) -> None:
        """Threads (sorted) leave the barrier of their cluster."""
        for row, members, _ in self.clocks.warps_of(threads):
            phase = int(phases[np.searchsorted(threads, members[0])])
            key = self.clocks.cluster[int(self.clocks.column[row])], phase
            self.clocks.learn(members, self.clusters.get(key, Stamp()))
            self.waited[row] = phase
        self.clocks.sync_warps(threads)

    def initialise(self, shared: int, place: int, thread: int, site: int, cta_column: int) -> None:
        """`mbarrier.init` by a thread."""
        row = thread >> 5
        column, clock = int(self.clocks.column[row]), int(self.clocks.clock[row])
        old = self.barriers.get((shared, place))
        new = BarrierOrder(thread, (column, clock, thread & 31), site, cta_column)
        if old is not None:  # an agent is for one place, whatever the barrier there
            new.agent, new.issued, new.open = old.agent, old.issued, old.open
        self.barriers[shared, place] = new
        self.inits.setdefault(thread, []).append(new)

    def fence_inits(self, threads: Array) -> None:
        """`fence.mbarrier_init` (or a proxy fence): earlier initialisations become publishable."""
        for thread in threads.tolist():
            for barrier in self.inits.get(thread, []):
                barrier.fenced = True

    def unready(self, shared: int, places: Array, threads: Array, copy: bool) -> list[Unready]:
        """The mbarriers among these that a thread uses without an order after their init."""
        found = []
        for place, thread in dict(zip(places.tolist(), threads.tolist(), strict=True)).items():
            barrier = self.barriers.get((shared, place))
            if barrier is None:
                continue
            row = thread >> 5
            column, clock, lane = barrier.init
            known = self.clocks.knows(thread, 0, column, clock, lane)
            if not known and barrier.published is not None:
                known = self.waited.get(row, 0) >= barrier.published
            if not known:
                same = self.clocks.cta[column] == self.clocks.cta_of(thread)
                missing = (
                    "no barrier between mbarrier.init and this use: bar.sync"
                    if same
                    else "the mbarrier is in another CTA: fence.mbarrier_init by its owner, then "
                    "barrier.cluster.arrive and .wait by both"
                )
                found.append(Unready(place, thread, barrier, missing))
                continue
            proxied = barrier.fenced or self.clocks.knows(thread, 1, column, clock, lane)
            if copy and not proxied:
                missing = (
                    "an asynchronous copy uses the mbarrier: fence.mbarrier_init or "
                    "fence.proxy.async after its init"
                )
                found.append(Unready(place, thread, barrier, missing))
        return found

    def barrier_arrive(self, shared: int, places: Array, threads: Array, order: Order) -> None:
        """Threads [n] arrive at mbarriers [n]."""
        for place in np.unique(places).tolist():
            members = np.unique(threads[places == place])
            barrier = self.barriers.get((shared, place))
            if barrier is None:
                continue
            home = self.clocks.cta[barrier.cta_column]
            for cta, part in self._by_cta(members):
                if order.releases:
                    stamp = self.clocks.publish(part)
                else:
                    stamp = Stamp()
                    for thread in part.tolist():
                        for _, fence in self.flags.fenced(thread, order.strength):
                            stamp.join(fence)
                if cta == home:
                    barrier.own.join(stamp)
                elif order.strength >= 2:
                    barrier.remote.join(stamp)
                else:
                    barrier.narrow.join(stamp)

    def phase(self, shared: int, places: Array) -> None:
        """The current phase of these mbarriers is complete."""
        for place in places.tolist():
            barrier = self.barriers.get((shared, place))
            if barrier is not None:
                barrier.own_done, barrier.remote_done = Stamp(), Stamp()
                barrier.own_done.join(barrier.own)
                barrier.remote_done.join(barrier.remote)

    def barrier_wait(self, shared: int, places: Array, threads: Array, order: Order) -> None:
        """Threads [n] have found the awaited phase of mbarriers [n] complete."""
        for place in np.unique(places).tolist():
            barrier = self.barriers.get((shared, place))
            if barrier is None:
                continue
            members = np.unique(threads[places == place])
            parts = [Part(1, barrier.cta_column, barrier.own_done)]
            if order.strength >= 2:
                parts[0] = Part(2, barrier.cta_column, barrier.own_done)
                parts.append(Part(2, barrier.cta_column, barrier.remote_done))
            self.flags.receive(parts, members, order)
            lost = [barrier.narrow] if order.strength >= 2 else [barrier.narrow, barrier.remote]
            for stamp in lost:
                if stamp.values is not None:
                    for thread in members.tolist():
                        self.flags.miss(thread, stamp, _NARROW)

    def copy(self, shared: int, place: int) -> tuple[BarrierOrder, int] | None:
        """A copy that will complete bytes of an mbarrier: the barrier, and the copy's number."""
        barrier = self.barriers.get((shared, place))
        if barrier is None:
            return None
        if barrier.agent < 0:
            barrier.agent = self.clocks.agent_of(barrier.cta_column)
        barrier.issued += 1
        barrier.open.add(barrier.issued)
        return barrier, barrier.issued

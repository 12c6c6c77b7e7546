"""Vector clocks of warps, precise to the lane: who knows which accesses of whom.

An access is stamped with its column (the warp that did it, or a pseudo agent for asynchronous
copies), the clock of that warp, and its lane. A warp knows an access when its row has reached that
clock. Between two synchronisations of a warp its lanes are agents of their own: `singles` holds
what the warp knows of single lanes of others, `private` what single lanes learned alone.

A row holds the range of columns that its warp has heard of, and the CTAs of a cluster are
neighbours, so that a kernel whose CTAs do not talk costs next to nothing. All rows lie in one array
(`pool`), so that many can be looked up at once; a row that gets wider moves to its end.

View 0 of a clock is ordinary order, view 1 the part of it that a proxy fence passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from k3fuse.kernels.simulator.errors import SimulationError
from k3fuse.kernels.simulator.types import Array

_MOST_CELLS = 1 << 27  # int32 cells of all rows, 512 MiB: 8192 warps that all know all
_ENDED = 2**31 - 1  # the clock of a warp all of whose accesses are known
IN_FLIGHT = 0  # the column of copies that nobody has waited for; no one ever knows its accesses


class Stamp:
    """A part of a vector clock as a message: `values[view, column - first]`, and single lanes.

    The keys of `singles` are ((column * 32 + lane) * 2 + view).
    """

    __slots__ = ("first", "singles", "values")

    def __init__(
        self, first: int = 0, values: Array | None = None, singles: dict[int, int] | None = None
    ) -> None:
        self.first, self.values = first, values
        self.singles: dict[int, int] = {} if singles is None else singles

    def join(self, other: Stamp) -> None:
        """Add what `other` knows."""
        if other.values is not None:
            if self.values is None:
                self.first, self.values = other.first, other.values.copy()
            else:
                self._join_values(self.values, other)
        for key, clock in other.singles.items():
            if self.singles.get(key, 0) < clock:
                self.singles[key] = clock

    def _join_values(self, mine: Array, other: Stamp) -> None:
        theirs = other.values
        if theirs is None:
            return
        low = min(self.first, other.first)
        high = max(self.first + mine.shape[1], other.first + theirs.shape[1])
        if high - low > mine.shape[1]:
            wide = np.zeros((2, high - low), np.int32)
            wide[:, self.first - low : self.first - low + mine.shape[1]] = mine
            self.first, self.values, mine = low, wide, wide
        start = other.first - self.first
        part = mine[:, start : start + theirs.shape[1]]
        np.maximum(part, theirs, out=part)

    def covers(self, view: int, column: int, clock: int, lane: int) -> bool:
        """Whether an access is known to the bearer of this message."""
        place, values = column - self.first, self.values
        inside = values is not None and 0 <= place < values.shape[1]
        if values is not None and inside and values[view, place] >= clock:
            return True
        return self.singles.get((column * 32 + lane) * 2 + view, 0) >= clock

    def proxied(self) -> Stamp:
        """The same knowledge after a proxy fence: all of it in both views."""
        values = None
        if self.values is not None:
            values = self.values.copy()
            np.maximum(values[1], values[0], out=values[1])
        singles = dict(self.singles)
        for key, clock in self.singles.items():
            singles[key | 1] = max(clock, singles.get(key | 1, 0))
        return Stamp(self.first, values, singles)


class Clocks:
    """The clocks of all warps. Threads are numbered through all groups; a warp is a row."""

    def __init__(self) -> None:
        self.columns = 1  # column 0 is IN_FLIGHT
        self.rank: list[int] = [-1]
        self.cluster: list[int] = [-1]
        self.cta: list[int] = [-1]  # numbered through all groups
        self.number: list[int] = [-1]  # the CTA number in its grid
        self.label: list[str] = [""]
        self.warp: list[int] = [-1]  # -1 for a pseudo agent
        self.column = np.zeros(0, np.int64)
        self.clock = np.zeros(0, np.int64)
        self.synced = np.zeros(0, np.int64)
        self.low, self.width, self.start = (np.zeros(0, np.int64) for _ in range(3))
        self.pool = np.zeros(0, np.int32)
        self.top = 0  # of the pool
        self.live = 0  # cells of rows, without what moved rows left behind
        self.singles: list[dict[int, int]] = []
        self.private: dict[int, Stamp] = {}
        self.alive: list[Array] = []
        self.spares: dict[int, list[int]] = {}
        self.places = np.zeros((4, 1), np.int64)  # rank, cluster, cta, warp of each column

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many warps and, with their spare columns, agents."""
        self.column = np.zeros(rows, np.int64)
        self.clock, self.synced = np.ones(rows, np.int64), np.ones(rows, np.int64)
        self.low, self.width, self.start = (np.zeros(rows, np.int64) for _ in range(3))
        self.places = np.full((4, columns + 1), -1, np.int64)

    def _take(self, cells: int) -> int:
        """The start of so many new cells of the pool."""
        self.live += cells
        if self.live > _MOST_CELLS:
            raise SimulationError(
                f"race checking of {len(self.column)} warps needs more than {_MOST_CELLS} clocks, "
                f"since so many of them know of each other; scale the grid down "
                f"({int((_MOST_CELLS / 2) ** 0.5)} warps always fit): a protocol has its races at "
                "a small size too"
            )
        start, self.top = self.top, self.top + cells
        if self.top > len(self.pool):
            self.pool = np.concatenate([self.pool, np.zeros(self.top, np.int32)])
        return start

    def _row(self, row: int) -> Array:
        """What a warp knows, [2, its width], sharing the pool."""
        start, width = int(self.start[row]), int(self.width[row])
        return self.pool[start : start + 2 * width].reshape(2, width)

    def _widen(self, row: int, low: int, high: int) -> None:
        """Let the range of a row take in columns from `low` to `high`."""
        first, width = int(self.low[row]), int(self.width[row])
        low, high = min(low, first), max(high, first + width)
        if high - low == width:
            return
        start = self._take(2 * (high - low))
        wide = self.pool[start : start + 2 * (high - low)].reshape(2, high - low)
        wide[:, first - low : first - low + width] = self._row(row)
        self.live -= 2 * width
        self.start[row], self.low[row], self.width[row] = start, low, high - low
        if self.top > 2 * self.live + (1 << 20):
            self._compact()

    def _compact(self) -> None:
        """Drop the cells that moved rows left behind."""
        rows = len(self.alive)
        parts = [self._row(row).reshape(-1) for row in range(rows)]
        self.start[:rows] = np.cumsum([0, *(len(part) for part in parts[:-1])])
        self.pool = np.concatenate(parts)
        self.top = len(self.pool)

    def known(self, rows: Array, view: int, columns: Array) -> Array:
        """The clocks of columns that warps know; arrays of equal or broadcastable shapes."""
        width = self.width[rows]
        place = columns - self.low[rows]
        inside = (place >= 0) & (place < width)
        start = self.start[rows] + view * width if view else self.start[rows]
        found: Array = np.where(inside, self.pool[start + np.where(inside, place, 0)], 0)
        return found

    def _known(self, row: int, view: int, column: int) -> int:
        place, width = column - int(self.low[row]), int(self.width[row])
        if not 0 <= place < width:
            return 0
        return int(self.pool[int(self.start[row]) + view * width + place])

    def add_cta(
        self, rank: int, cluster: int, number: int, label: str, alive: Array, spare: int
    ) -> None:
        """Add the warps of a CTA, and `spare` columns for its copies. `alive` is kept, not copied.

        `number` is its number in the grid, `label` names the launch.
        """
        cta = self.cta[-1] + 1
        warps, first, rows = len(alive) // 32, self.columns, len(self.alive)
        for warp in range(warps + spare):
            self._describe(rank, cluster, cta, number, label, warp if warp < warps else -1)
        self.spares[cta] = list(range(first + warps, self.columns))
        self.column[rows : rows + warps] = np.arange(first, first + warps)
        self.alive.extend(alive[32 * warp : 32 * warp + 32] for warp in range(warps))
        width = warps + spare
        start = self._take(2 * width * warps)
        self.low[rows : rows + warps], self.width[rows : rows + warps] = first, width
        self.start[rows : rows + warps] = start + 2 * width * np.arange(warps)
        self.singles.extend({} for _ in range(warps))

    def _describe(
        self, rank: int, cluster: int, cta: int, number: int, label: str, warp: int
    ) -> None:
        if self.columns == self.places.shape[1]:
            more = np.full((4, self.columns), -1, np.int64)
            self.places = np.concatenate([self.places, more], axis=1)
        self.places[:, self.columns] = rank, cluster, cta, warp
        self.columns += 1
        self.rank.append(rank)
        self.cluster.append(cluster)
        self.cta.append(cta)
        self.number.append(number)
        self.label.append(label)
        self.warp.append(warp)

    def cta_of(self, thread: int) -> int:
        """The CTA (numbered through all groups) of a thread."""
        return self.cta[int(self.column[thread >> 5])]

    def agent_of(self, like: int) -> int:
        """A pseudo agent at the place of column `like`: a spare column there, or a new one."""
        spare = self.spares.get(self.cta[like])
        if spare:
            return spare.pop(0)
        self._describe(
            self.rank[like], self.cluster[like], self.cta[like], self.number[like],
            self.label[like], -1,
        )  # fmt: skip
        return self.columns - 1

    def warps_of(self, threads: Array) -> Iterator[tuple[int, Array, bool]]:
        """(row, its threads among these, whether they are all living ones), for sorted threads."""
        rows = threads >> 5
        cuts = np.flatnonzero(np.diff(rows)) + 1
        starts = [0, *cuts.tolist()]
        for start, stop in zip(starts, [*starts[1:], len(threads)], strict=True):
            row, count = int(rows[start]), stop - start
            whole = count == 32 or count == int(np.count_nonzero(self.alive[row]))
            yield row, threads[start:stop], whole

    def publish(self, threads: Array) -> Stamp:
        """What these threads (sorted) know and did, as one message; their clocks advance."""
        total = Stamp()
        for row, members, whole in self.warps_of(threads):
            total.join(self._message(row, members, whole))
        return total

    def _message(self, row: int, members: Array, whole: bool) -> Stamp:
        column, clock = int(self.column[row]), int(self.clock[row])
        low = int(self.low[row])
        values = self._row(row).copy()
        values[0, column - low] = clock if whole else self.synced[row] - 1
        singles = dict(self.singles[row])
        if not whole:
            for thread in members.tolist():
                singles[(column * 32 + (thread & 31)) * 2] = clock
        stamp = Stamp(low, values, singles)
        if self.private:
            for thread in members.tolist():
                if thread in self.private:
                    stamp.join(self.private[thread])
        self.clock[row] += 1
        return stamp

    def publish_each(self, threads: Array) -> list[Stamp]:
        """One message a thread, each of what that lane alone may pass on."""
        result = []
        for row, members, _ in self.warps_of(threads):
            base = self._message(row, members[:0], False)
            key, clock = int(self.column[row]) * 64, int(self.clock[row]) - 1
            for thread in members.tolist():
                singles = {**base.singles, key + (thread & 31) * 2: clock}
                stamp = Stamp(base.first, base.values, singles)
                if thread in self.private:
                    whole = Stamp()
                    whole.join(stamp)
                    whole.join(self.private[thread])
                    stamp = whole
                result.append(stamp)
        return result

    def learn(self, threads: Array, stamp: Stamp) -> None:
        """Let these threads (sorted) know what the message says."""
        for row, members, whole in self.warps_of(threads):
            if whole:
                self._join(row, stamp)
            else:
                for thread in members.tolist():
                    self.private.setdefault(thread, Stamp()).join(stamp)

    def _join(self, row: int, stamp: Stamp) -> None:
        if stamp.values is not None:
            first, last = stamp.first, stamp.first + stamp.values.shape[1]
            self._widen(row, first, last)
            low = int(self.low[row])
            part = self._row(row)[:, first - low : last - low]
            np.maximum(part, stamp.values, out=part)
        singles = self.singles[row]
        for key, clock in stamp.singles.items():
            if self._known(row, key & 1, key >> 6) < clock and singles.get(key, 0) < clock:
                singles[key] = clock

    def sync_warps(self, threads: Array) -> None:
        """The lanes of these warps have met: each knows what the others did and learned."""
        for row, members, _ in self.warps_of(threads):
            if self.private:
                for thread in members.tolist():
                    if thread in self.private:
                        self._join(row, self.private.pop(thread))
            self.clock[row] += 1
            self.synced[row] = self.clock[row]

    def fence_proxies(self, threads: Array) -> None:
        """`fence.proxy.async`: all that these threads know may be read through the other proxy."""
        for _, members, _ in self.warps_of(threads):
            self.learn(members, self.publish(members).proxied())

    def all_of(self, rows: Sequence[int]) -> Stamp:
        """Everything that these warps ever did and knew, and their copies: the end of a grid."""
        total = Stamp()
        for row in rows:
            total.join(self._message(row, np.arange(32) + 32 * row, True))
        ctas = {self.cta[int(self.column[row])] for row in rows}
        done = np.flatnonzero(np.isin(self.places[2, : self.columns], list(ctas)))
        values = np.zeros((2, int(done[-1] - done[0]) + 1), np.int32)
        values[:, done - done[0]] = _ENDED
        total.join(Stamp(int(done[0]), values))
        return total

    def knows(self, thread: int, view: int, column: int, clock: int, lane: int) -> bool:
        """Whether one thread knows one access; the slow and complete form."""
        row = thread >> 5
        same = lane == thread & 31 or clock < self.synced[row]
        if view == 0 and column == self.column[row] and same:
            return True
        if self._known(row, view, column) >= clock:
            return True
        if self.singles[row].get((column * 32 + lane) * 2 + view, 0) >= clock:
            return True
        own = self.private.get(thread)
        return own is not None and own.covers(view, column, clock, lane)

    def includes(self, column: Array, other: Array, scope: Array) -> Array:
        """Whether two agents are within a scope (1 CTA, 2 cluster, 3 gpu, 4 sys) of each other."""
        rank, cluster, cta, _ = self.places
        return np.where(
            scope >= 4,
            True,
            np.where(
                scope == 3,
                rank[column] == rank[other],
                np.where(scope == 2, cluster[column] == cluster[other], cta[column] == cta[other]),
            ),
        )

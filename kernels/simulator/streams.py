"""Launches in stream order, one stream a rank: when a grid starts, which of its CTAs are resident,
when it is complete.

The moments are the latest that the programming model allows, since that shows a fault: a grid
learns that its predecessor is complete only when it can do nothing more without.
"""

from __future__ import annotations

import numpy as np

from k3fuse.kernels.build.residency import Chip
from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.grids import Grid, same_state, state_of
from k3fuse.kernels.simulator.machine import Group
from k3fuse.kernels.simulator.memory import GlobalMemory
from k3fuse.kernels.simulator.ops_async import finish_copies

_LONGEST_START = 6  # rounds that a launch may start late under a seed
_HELD_ROUNDS = 64  # rounds without a change after which a polling successor counts as stuck


class Streams:
    """The launches of all ranks; `advance` moves what may move between two rounds."""

    def __init__(
        self,
        streams: list[list[Grid]],
        memory: GlobalMemory,
        delivery: Delivery,
        *,
        sms: int | None,
        lanes: int,
        seed: int | None,
    ) -> None:
        self.streams, self.memory, self.delivery = streams, memory, delivery
        self.chips = [Chip(sms) for _ in streams] if sms is not None else []
        self.lanes = lanes
        self.random = None if seed is None else np.random.default_rng([seed, 2])
        self.first = [0] * len(streams)
        self.events = 0
        self.expects = False
        self.notes: list[str] = []

    @property
    def done(self) -> bool:
        """Whether every launch is complete."""
        return all(
            first == len(grids) for first, grids in zip(self.first, self.streams, strict=True)
        )

    def active(self) -> list[Grid]:
        """The grids that have started and are not complete, rank by rank, oldest first."""
        return [
            grid
            for first, grids in zip(self.first, self.streams, strict=True)
            for grid in grids[first:]
            if grid.begun is not None and grid.ended is None
        ]

    def running(self) -> list[Group]:
        """The groups that have lanes left."""
        return [group for grid in self.active() for group in grid.groups if group.remaining]

    def version(self) -> int:
        """A number that changes with every start, end and shared memory access."""
        return self.events + sum(
            group.shared.version for grid in self.active() for group in grid.groups
        )

    def advance(self, round_number: int) -> bool:
        """End, start and place what may be; returns whether anything did."""
        before, self.expects = self.events, False
        for rank, grids in enumerate(self.streams):
            for place in range(self.first[rank], len(grids)):
                grid = grids[place]
                if grid.begun is None:
                    self._start(grids, place, round_number)
                    if grid.begun is None:
                        break
                self._admit(grid)
                if not grid.open and grids[place - 1].ended is not None:
                    self._settle(grids, place)
                if grid.ended is None and grid.exited:
                    self._end(grid, round_number)
            while self.first[rank] < len(grids) and grids[self.first[rank]].ended is not None:
                self.first[rank] += 1
        return self.events != before

    def _start(self, grids: list[Grid], place: int, round_number: int) -> None:
        grid = grids[place]
        previous = grids[place - 1] if place else None
        if previous is None:
            may = True
        elif not grid.pdl:
            may = all(item.ended is not None for item in grids[self.first[grid.rank] : place])
        elif previous.triggered:
            may = previous.released()
        else:
            may = previous.ended is not None
        if not may:
            return
        if grid.ready is None:
            grid.ready = round_number + grid.delay
            if self.random is not None and place:
                grid.ready += int(self.random.integers(0, _LONGEST_START + 1))
        if round_number < grid.ready:
            self.expects = True
            return
        self.events += 1
        grid.begun = round_number
        self._know(grids, place)
        for observer in grid.observers:
            observer.grid_begin(grid)

    def _know(self, grids: list[Grid], place: int) -> None:
        """Which earlier launches are complete for certain when a grid starts."""
        grid, earlier = grids[place], frozenset(item.index for item in grids[:place])
        if not grid.pdl or not place:
            grid.sure_at_start = grid.sure_after_wait = grid.sure = earlier
            grid.open = True
            return
        previous = grids[place - 1]
        if not previous.triggered:
            # Without a trigger the dependents start when the grid is complete and visible.
            grid.sure_at_start = previous.sure | {previous.index}
        elif previous.waits_first():
            grid.sure_at_start = previous.sure
        else:
            grid.sure_at_start = previous.sure_at_start
        grid.sure = grid.sure_at_start
        if not previous.triggered:
            self._open(grids, place)
        self._expose(grids, grid)

    def _expose(self, grids: list[Grid], grid: Grid) -> None:
        if grid.watch is None:
            return
        grid.watch.earlier = [
            item for item in grids[: grids.index(grid)] if item.index not in grid.sure
        ]
        for item in grid.watch.earlier:
            if item.watch is not None and item.ended is None and grid not in item.watch.later:
                item.watch.later.append(grid)

    def _open(self, grids: list[Grid], place: int) -> None:
        """The predecessor is complete: lanes go on after griddepcontrol.wait."""
        grid, previous = grids[place], grids[place - 1]
        grid.open = True
        grid.sure_after_wait = grid.sure_at_start | previous.sure | {previous.index}
        self.events += 1
        for group in grid.groups:
            parked, group.grid_parked = group.grid_parked, []
            for lanes, following in parked:
                grid.passed(group, lanes)
                group.push(following, lanes)

    def _admit(self, grid: Grid) -> None:
        """Make CTAs resident: all of them, or those that find room on the chip."""
        total = len(grid.order)
        if grid.placed == total:
            return
        _, block, cluster = grid.shape
        threads, size = block[0] * block[1] * block[2], cluster[0] * cluster[1] * cluster[2]
        step = max(1, self.lanes // threads // size) * size
        while grid.placed < total:
            count = min(step, total - grid.placed)
            slots: list[int] | None = None
            if self.chips:
                slots = []
                while len(slots) < count:
                    found = self.chips[grid.rank].take(grid.need)
                    if found is None:
                        break
                    slots += found
                count = len(slots)
                if not count:
                    return
            numbers = grid.order[grid.placed : grid.placed + count]
            group = Group(grid, numbers, self.memory, self.delivery)
            group.slots = slots
            grid.groups.append(group)
            grid.placed += count
            self.events += 1
            for observer in grid.observers:
                observer.group_begin(group)

    def left(self, group: Group) -> None:
        """Give back the slots of the CTAs of a group that have exited."""
        if group.slots is None:
            return
        gone = group.resident & ~group.live_ctas()
        for cta in np.flatnonzero(gone):
            self.chips[group.rank].give(group.slots[int(cta)], group.grid.need)
            self.events += 1
        group.resident &= ~gone

    def _end(self, grid: Grid, round_number: int) -> None:
        """All CTAs have exited: land what is on its way, and end the grid when it may be."""
        if self.delivery.owes(grid.groups):
            return
        if not grid.finished:
            for group in grid.groups:
                finish_copies(group)
            grid.finished = True
            self.events += 1
        self.events += 1
        grid.ended = round_number
        for group in grid.groups:
            grid.tally.add(group)
            self.events += group.shared.version
        if grid.pdl and not grid.waited and grid.index:
            self.notes.append(
                f"rank {grid.rank}: {grid.name} is launched with pdl and never executes "
                "griddepcontrol.wait; its completion says nothing about earlier launches"
            )
        if grid.watch is not None:
            grid.watch.earlier, grid.watch.later = [], []
        for observer in grid.observers:
            observer.grid_end(grid)
        grid.trigger_after_wait = grid.waits_first()
        grid.groups = []

    def _settle(self, grids: list[Grid], place: int) -> None:
        """The predecessor is complete; the grid learns of it when it can do nothing more."""
        grid = grids[place]
        if self._stuck(grid):
            grid.settling = False
            self._open(grids, place)
        else:
            self.expects = True

    def _stuck(self, grid: Grid) -> bool:
        """Whether a grid can do nothing more before the end of its predecessor."""
        if self.delivery.owes(grid.groups):
            return False
        running = [group for group in grid.groups if group.remaining]
        if not running:
            return grid.placed > 0
        states = [state_of(group) for group in running]
        changes = sum(group.shared.version + group.remaining for group in running)
        changes += sum(
            count for key, count in grid.traffic.requested.items() if key[0] == grid.rank and key[2]
        )
        known, grid.state = grid.state, states
        grid.held = grid.held + 1 if changes == grid.changes else 0
        grid.changes, grid.settling = changes, True
        if grid.held > _HELD_ROUNDS:
            return True
        return grid.held > 0 and known is not None and same_state(known, states)

    def explain(self) -> list[str]:
        """Why grids have not started, and CTAs are not resident."""
        lines = []
        for rank, grids in enumerate(self.streams):
            for grid in grids[self.first[rank] :]:
                left = len(grid.order) - grid.placed
                if grid.begun is not None and left:
                    waiting = sum(
                        int(group.resident.sum()) for item in grids for group in item.groups
                    )
                    chip = self.chips[rank]
                    lines.append(
                        f"rank {rank}: {waiting} CTAs wait for CTAs that are not resident: {left} "
                        f"of the {len(grid.order)} CTAs of {grid.name} find no room on {chip.sms} "
                        f"SMs, bound by {chip.obstacle(grid.need)}"
                    )
                if grid.begun is None:
                    previous = grids[grids.index(grid) - 1]
                    why = f"the end of {previous.name}"
                    if grid.pdl and previous.triggered:
                        why = (
                            f"{previous.missing()} CTAs of {previous.name} to execute "
                            "griddepcontrol.launch_dependents or to exit"
                        )
                    lines.append(f"rank {rank}: {grid.name} has not started; it waits for {why}")
                    break
        return lines

"""Checks of grids of one rank that run at the same time, as programmatic dependent launch allows.

An access of a grid is exposed to an earlier grid of its rank as long as nothing says that the
earlier one is complete: before `griddepcontrol.wait`, and beyond it for grids that the predecessor
did not wait for itself. Exposed accesses must touch no byte that the earlier grid writes, before or
after, and write none that it reads, unless both accesses are strong: that is how a mailbox is
polled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.simulator.counters import STRONG, Marks, Traffic
from k3fuse.kernels.simulator.errors import OverlapError
from k3fuse.kernels.simulator.memory import Buffer, Origin
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.grids import Grid


class Watch:
    """The exposed accesses of one grid, and the grids that it is exposed to.

    `earlier` are those that may be unfinished now, `later` those that are exposed to this grid;
    `marks` name the instructions of the kernel.
    """

    def __init__(self, grid: Grid, marks: Marks) -> None:
        self.grid, self.marks = grid, marks
        self.earlier: list[Grid] = []
        self.later: list[Grid] = []
        self.exposed = Traffic()

    @property
    def active(self) -> bool:
        """Whether any access of this grid has to be checked now."""
        return bool(self.earlier or self.later)

    def check(
        self,
        buffer: Buffer,
        chosen: Array | None,
        offset: Array,
        size: int,
        site: Origin,
        *,
        write: bool,
    ) -> None:
        """Check an access of `size` bytes at each offset; raises OverlapError."""
        for other in self.earlier:
            self._compare(other, other.traffic, buffer, chosen, offset, size, site, write)
        if self.earlier:
            mark = self.marks.of(site.line, site.text, site.strong)
            self.exposed.record(site.rank, buffer, offset, size, write=write, mark=mark)
        for other in self.later:
            if other.watch is not None:
                exposed = other.watch.exposed
                self._compare(other, exposed, buffer, chosen, offset, size, site, write)

    def _compare(
        self,
        other: Grid,
        record: Traffic,
        buffer: Buffer,
        chosen: Array | None,
        offset: Array,
        size: int,
        site: Origin,
        write: bool,
    ) -> None:
        for wrote in (True, False) if write else (True,):
            views = record.touched.get((site.rank, buffer.base, wrote))
            if views is None:
                continue
            found = _conflict(views, offset, size, site.strong)
            if found is None:
                continue
            lane, byte, mark = found
            lane = lane if chosen is None else int(chosen[lane])
            ours, theirs = ("writes" if write else "reads"), ("writes" if wrote else "reads")
            there = other.watch.marks.describe(mark) if other.watch else "an unknown line"
            first, second = sorted((other, self.grid), key=lambda grid: grid.index)
            raise OverlapError(
                f"{second.label} may run before {first.label} is complete: {site.where(lane)} "
                f"{ours} byte {byte} of {buffer.describe()}, which {other.label} {theirs} at "
                f"{there}; let {second.label} execute griddepcontrol.wait first, and every kernel "
                "between them, too"
            )


def _conflict(
    views: dict[int, Array], offset: Array, size: int, strong: bool
) -> tuple[int, int, int] | None:
    """The first (lane, byte of the buffer, mark) that an access conflicts with, or None."""
    unit = min(size, 8)
    view, first = views[8 * unit], offset >> (unit.bit_length() - 1)
    for word in range(size // unit):
        held = view.take(first + word if word else first)
        if not held.any():
            continue
        marks = held.view(np.uint8).reshape(-1, unit)
        bad = marks != 0
        if strong:
            bad &= marks < STRONG
        if bad.any():
            lane, byte = (int(part[0]) for part in np.nonzero(bad))
            return lane, int(offset[lane]) + unit * word + byte, int(marks[lane, byte])
    return None

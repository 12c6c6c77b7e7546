"""A grid: one launch on one rank, and what a checker may be told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from k3fuse.kernels.build.residency import Footprint
from k3fuse.kernels.simulator.counters import Traffic, count_touched
from k3fuse.kernels.simulator.machine import Dim3, Group, Program
from k3fuse.kernels.simulator.overlap import Watch
from k3fuse.kernels.simulator.types import Array, is_scalar


class Observer(Protocol):
    """What a checker may want to know of grids; every method is called at that moment."""

    def grid_begin(self, grid: Grid) -> None:
        """The grid has started; none of its CTAs has run."""

    def group_begin(self, group: Group) -> None:
        """CTAs of `group.grid` have become resident."""

    def grid_wait(self, group: Group, lanes: Array) -> None:
        """These lanes go on after griddepcontrol.wait: the predecessor is complete."""

    def grid_end(self, grid: Grid) -> None:
        """The grid is complete and its memory visible."""


class Tally:
    """Counters of one launch, summed over the groups of all ranks."""

    def __init__(self) -> None:
        self.issues: Counter[int] = Counter()
        self.shared_read = self.shared_written = self.shared_distinct = self.remote_shared = 0

    def add(self, group: Group) -> None:
        """Add a group that has ended."""
        for number, count in enumerate(group.issues):
            self.issues[number] += count
        self.shared_read += group.shared.read_bytes
        self.shared_written += group.shared.written_bytes
        self.shared_distinct += count_touched(group.shared.written)
        self.remote_shared += group.shared.remote_bytes


@dataclass(eq=False)
class Grid:
    """One launch on one rank.

    `label` names it in messages ("" when it is the only one); `order` lists its CTAs as they
    become resident, whole clusters together; `placed` of them have. `sure` holds the launches of
    the rank that are complete for certain: `sure_at_start`, then `sure_after_wait` from its first
    griddepcontrol.wait on. `open`: that wait lets lanes through. `triggered`, `waited`: some CTA
    did; `trigger_after_wait`: some CTA triggered, or exited without, after its wait.
    """

    index: int
    rank: int
    label: str
    program: Program
    shape: tuple[Dim3, Dim3, Dim3]
    dynamic_smem: int
    parameters: list[Array]
    order: Array
    need: Footprint
    pdl: bool
    traffic: Traffic
    tally: Tally
    delay: int = 0
    observers: tuple[Observer, ...] = ()
    watch: Watch | None = None
    groups: list[Group] = field(default_factory=list)
    placed: int = 0
    ready: int | None = None
    begun: int | None = None
    ended: int | None = None
    finished: bool = False
    open: bool = False
    waited: bool = False
    triggered: bool = False
    trigger_after_wait: bool = False
    sure_at_start: frozenset[int] = frozenset()
    sure_after_wait: frozenset[int] = frozenset()
    sure: frozenset[int] = frozenset()
    held: int = 0
    settling: bool = False
    state: list[State] | None = None
    changes: int = -1

    @property
    def name(self) -> str:
        """The label, or a word for the only launch."""
        return self.label or "the grid"

    @property
    def exited(self) -> bool:
        """Whether all CTAs have run to their end."""
        return self.placed == len(self.order) and not any(g.remaining for g in self.groups)

    def released(self) -> bool:
        """Whether every CTA has executed griddepcontrol.launch_dependents or exited."""
        return self.placed == len(self.order) and all(
            bool((group.triggered | ~group.live_ctas()).all()) for group in self.groups
        )

    def passed(self, group: Group, lanes: Array) -> None:
        """Lanes have executed griddepcontrol.wait and go on."""
        group.waited[group.lane_cta[lanes]] = True
        if not self.waited:
            self.waited, self.sure = True, self.sure_after_wait
            if self.watch is not None:
                self.watch.earlier = [
                    grid for grid in self.watch.earlier if grid.index not in self.sure
                ]
        for observer in self.observers:
            observer.grid_wait(group, lanes)

    def waits_first(self) -> bool:
        """Whether some CTA has triggered, or exited without, after its griddepcontrol.wait: then
        all have triggered only when what the grid waits for is complete."""
        return self.trigger_after_wait or any(
            bool((group.waited & ~group.triggered & ~group.live_ctas()).any())
            for group in self.groups
        )

    def missing(self) -> int:
        """CTAs that have neither triggered nor exited."""
        waiting = sum(int((~group.triggered & group.live_ctas()).sum()) for group in self.groups)
        return waiting + len(self.order) - self.placed


State = dict[int, tuple[Array, list[Any]]]


def state_of(group: Group) -> State:
    """Lanes and live registers of each block that has lanes waiting to run."""
    result: State = {}
    for number, parts in group.work.items():
        lanes = np.sort(np.concatenate(parts), kind="stable")
        values = []
        for slot in group.program.codes[number].uses:
            value = group.registers[slot]
            values.append(value if value is None or is_scalar(value) else value[lanes])
        result[number] = lanes, values
    return result


def same_state(first: list[State], second: list[State]) -> bool:
    """Whether two lists of states are equal."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.keys() != b.keys():
            return False
        for number, (lanes, values) in a.items():
            other, others = b[number]
            if not np.array_equal(lanes, other):
                return False
            if not all(np.array_equal(x, y) for x, y in zip(values, others, strict=True)):
                return False
    return True

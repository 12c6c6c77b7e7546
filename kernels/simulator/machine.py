"""The machine state of a group of CTAs, and one step of a set of lanes through it.

A group is a run of whole clusters of one rank that advance together: every register is one numpy
array over its lanes (or a single scalar when all lanes share it). Groups hold about 24 thousand
lanes, so that the arrays of a step stay in the cache of a CPU core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.flow import Block
from k3fuse.kernels.simulator.memory import GlobalMemory, Origin
from k3fuse.kernels.simulator.order import WEAK, Order
from k3fuse.kernels.simulator.shared import SharedMemory
from k3fuse.kernels.simulator.tensor_memory import TensorMemory
from k3fuse.kernels.simulator.types import UNSIGNED, Array, Value, is_scalar, spread

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.grids import Grid
    from k3fuse.kernels.simulator.races import RaceChecker

WARP = 32
Dim3 = tuple[int, int, int]


class Frame:
    """The lanes that execute a block now, and the values of its registers for them.

    `lanes` holds lane numbers of the group in rising order; `full` is True when it is all of them.
    """

    __slots__ = ("count", "env", "full", "group", "lanes")

    def __init__(self, group: Group, lanes: Array, env: list[Any], full: bool) -> None:
        self.group, self.lanes, self.env, self.full = group, lanes, env, full
        self.count = len(lanes)

    def array(self, value: Value) -> Array:
        """The value as one element a lane."""
        return spread(value, self.count)

    def ctas(self) -> Array:
        """The CTA (index in the group) of each lane."""
        return self.group.lane_cta if self.full else self.group.lane_cta[self.lanes]

    def origin(self, line: int, text: str, order: Order = WEAK) -> Origin:
        """Who executes the instruction and in which memory order, for messages and checks."""
        group = self.group
        threads = None if group.races is None else self.threads()
        ctas = group.cta_numbers[self.ctas()]
        return Origin(group.rank, line, text, ctas, group.grid, order, threads)

    def threads(self) -> Array:
        """The lanes, numbered through all groups of a checked run."""
        return self.lanes + self.group.first_thread

    def narrow(self, mask: Array, needed: list[int]) -> Frame:
        """A frame of the lanes where `mask` is set, with the registers in the slots `needed`."""
        env: list[Any] = [None] * len(self.env)
        for slot in needed:
            value = self.env[slot]
            env[slot] = value if value is None or is_scalar(value) else value[mask]
        return Frame(self.group, self.lanes[mask], env, False)

    def widen(self, inner: Frame, mask: Array, slots: list[int], widths: list[int]) -> None:
        """Bring the results of a narrowed frame back."""
        for slot, width in zip(slots, widths, strict=True):
            self.env[slot] = merged(self.env[slot], inner.env[slot], mask, self.count, width)


def merged(old: Value, new: Value, place: Array, count: int, width: int) -> Array:
    """A copy of `old` (undefined lanes 0) with `new` at `place`, a mask or lane numbers."""
    if old is None or is_scalar(old):
        dtype = np.bool_ if width == 1 else UNSIGNED[width]
        result = np.full(count, 0 if old is None else old, dtype)
    else:
        result = old.copy()
    result[place] = new
    return result


Step = Callable[[Frame], None]


@dataclass
class Code:
    """A translated block: its steps, the register slots to fetch and to keep, and its end.

    `condition` gives the guard of the last instruction (None: always taken); `arguments` the
    operands of a barrier; `mask` the members of a leading warp-wide instruction.
    """

    block: Block
    steps: list[Step]
    uses: list[int]
    keeps: list[int]
    condition: Callable[[Frame], Value] | None = None
    arguments: list[Callable[[Frame], Value]] = field(default_factory=list)
    mask: Callable[[Frame], Value] | None = None
    issued: int = 0


@dataclass
class Program:
    """A translated entry."""

    codes: list[Code]
    widths: list[int]
    shared_bytes: int
    local_bytes: int


@dataclass
class BarrierState:
    """One named barrier: arrivals of each CTA, and the lanes parked at it with their next block."""

    arrived: Array
    parked: list[tuple[Array, int]] = field(default_factory=list)
    wanted: int | None = None


@dataclass
class Copy:
    """Issued copies that complete when their lanes wait for them.

    `kind` is "element" (`cp.async`) or "bulk"; `number` is the commit group of each lane, -1
    before the commit. `perform` does the copy for the chosen lanes.
    """

    kind: str
    lanes: Array
    number: Array
    perform: Callable[[Array], None]


@dataclass
class Wait:
    """Why lanes did not advance: lane numbers, a text, and the round in which they last asked."""

    lanes: Array
    text: Callable[[int], str]
    round: int


class Group:
    """Registers, shared memory and barriers of a run of clusters on one rank."""

    def __init__(
        self, grid: Grid, cta_numbers: Array, memory: GlobalMemory, delivery: Delivery
    ) -> None:
        _, block, cluster = grid.shape
        program = grid.program
        self.grid, self.program, self.memory, self.rank = grid, program, memory, grid.rank
        self.cta_numbers, self.parameters = cta_numbers, grid.parameters
        self.threads = block[0] * block[1] * block[2]
        self.ctas = len(cta_numbers)
        self.size = self.ctas * self.threads
        self.all_lanes = np.arange(self.size)
        self.lane_cta = np.repeat(np.arange(self.ctas), self.threads)
        self.thread = np.tile(np.arange(self.threads), self.ctas)
        self.special: dict[str, Value] = Special(cta_numbers, self.thread, grid.shape, self.threads)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        cta_ranks = self.special["%cluster_ctarank"][:: self.threads].astype(np.int64)
        self.cluster_base = np.arange(self.ctas) // self.cluster_size * self.cluster_size
        self.shared = SharedMemory(
            self.ctas, program.shared_bytes + grid.dynamic_smem, self.cluster_base, cta_ranks
        )
        self.local = np.full((self.size, program.local_bytes), 0xFF, np.uint8)
        self.local_written = np.zeros((self.size, program.local_bytes), np.bool_)
        self.registers: list[Any] = [None] * len(program.widths)
        self.work: dict[int, list[Array]] = {0: [self.all_lanes]}
        self.alive = np.ones(self.size, np.bool_)
        self.remaining = self.size
        self.barriers: dict[int, BarrierState] = {}
        self.cluster_arrived = np.zeros(self.ctas, np.int64)
        self.cluster_phase = np.zeros(self.ctas, np.int64)
        self.cluster_wanted = np.zeros(self.size, np.int64)
        self.cluster_parked: list[tuple[Array, int]] = []
        # Dependent grids: CTAs that have triggered, CTAs some of whose lanes passed the wait, and
        # the lanes that stand at it. `slots` is the SM of each CTA where residency is modelled.
        self.triggered = np.zeros(self.ctas, np.bool_)
        self.waited = np.zeros(self.ctas, np.bool_)
        self.grid_parked: list[tuple[Array, int]] = []
        self.slots: list[int] | None = None
        self.resident: Array = np.ones(self.ctas, np.bool_)
        self.waits: dict[int, Wait] = {}
        self.delivery = delivery
        self.copies: list[Copy] = []
        self.tensor: TensorMemory | None = None
        self.copy_groups: dict[str, Array] = {}
        self.issues = [0] * len(program.codes)
        self.round = 0
        self.races: RaceChecker | None = None
        self.first_thread = 0

    def execute(self, number: int, lanes: Array) -> Frame:
        """Run the body of block `number` for `lanes`; returns the frame, for the block's end."""
        code = self.program.codes[number]
        full = len(lanes) == self.size
        self.issues[number] += code.issued * _warps(lanes, full)
        if full:
            frame = Frame(self, self.all_lanes, self.registers, True)
        else:
            env: list[Any] = [None] * len(self.registers)
            for slot in code.uses:
                value = self.registers[slot]
                env[slot] = value if value is None or is_scalar(value) else value[lanes]
            frame = Frame(self, lanes, env, False)
        for step in code.steps:
            step(frame)
        if not full:
            for slot in code.keeps:
                self._keep(slot, frame.env[slot], lanes)
        return frame

    def _keep(self, slot: int, value: Value, lanes: Array) -> None:
        if value is None:
            return  # a guarded result that no lane has had yet
        old = self.registers[slot]
        if old is None or is_scalar(old) or not old.flags.writeable:
            width = self.program.widths[slot]
            self.registers[slot] = merged(old, value, lanes, self.size, width)
        else:
            old[lanes] = value

    def push(self, number: int, lanes: Array) -> None:
        """Send lanes to a block; a negative number means that they are done."""
        if not len(lanes):
            return
        if number < 0:
            self.alive[lanes] = False
            self.remaining -= len(lanes)
            if self.cluster_size > 1:
                self.shared.gone = ~self.live_ctas()
            return
        self.work.setdefault(number, []).append(lanes)

    def release(self) -> None:
        """Give back the memory of registers: all lanes have left the kernel."""
        if self.tensor is not None:
            self.tensor.close()
        self.registers, self.special = [], {}
        self.local = self.local_written = np.zeros((0, 0), np.uint8)

    def live_ctas(self) -> Array:
        """Which CTAs have lanes left."""
        live: Any = np.logical_or.reduce(self.alive.reshape(self.ctas, self.threads), axis=1)
        return np.asarray(live)

    def counts_by_cta(self, lanes: Array) -> Array:
        """How many of the lanes belong to each CTA."""
        return np.bincount(self.lane_cta[lanes], minlength=self.ctas)


def _warps(lanes: Array, full: bool) -> int:
    if full:
        return len(lanes) // WARP
    return int(np.count_nonzero(np.diff(lanes >> 5))) + 1


class Special(dict[str, Value]):
    """The special registers: arrays over lanes, or scalars, made when first asked for."""

    def __init__(
        self, numbers: Array, thread: Array, shape: tuple[Dim3, Dim3, Dim3], threads: int
    ) -> None:
        self.numbers, self.thread, self.shape, self.threads = numbers, thread, shape, threads

    def __missing__(self, name: str) -> Value:
        value = self[name] = self._make(name)
        return value

    def _make(self, name: str) -> Value:
        grid, block, cluster = self.shape
        if name == "%laneid":
            return (self.thread % WARP).astype(np.uint32)
        if name == "%warpid":
            return (self.thread // WARP).astype(np.uint32)
        if name == "%cluster_nctarank":
            return np.uint32(cluster[0] * cluster[1] * cluster[2])
        if name.startswith("%lanemask_"):
            lane, one = self["%laneid"], np.uint32(1)
            below, own = (one << lane) - one, one << lane
            return {"eq": own, "lt": below, "le": below | own, "gt": ~(below | own),
                    "ge": ~below}[name[-2:]]  # fmt: skip
        cta = _split(self.numbers, grid)
        if name == "%cluster_ctarank":
            x, y, z = (cta[axis] % cluster[axis] for axis in range(3))
            linear = x + cluster[0] * (y + cluster[1] * z)
            return np.repeat(linear, self.threads).astype(np.uint32)
        family, letter = name.split(".")
        axis = "xyz".index(letter)
        if family == "%tid":
            return _split(self.thread, block)[axis].astype(np.uint32)
        scalars = {"%ntid": block[axis], "%nctaid": grid[axis], "%cluster_nctaid": cluster[axis],
                   "%nclusterid": grid[axis] // cluster[axis]}  # fmt: skip
        if family in scalars:
            return np.uint32(scalars[family])
        of_cta = {"%ctaid": cta[axis], "%cluster_ctaid": cta[axis] % cluster[axis],
                  "%clusterid": cta[axis] // cluster[axis]}[family]  # fmt: skip
        return np.repeat(of_cta, self.threads).astype(np.uint32)


def _split(linear: Array, shape: Dim3) -> tuple[Array, Array, Array]:
    """Linear numbers -> x, y, z with x fastest."""
    return linear % shape[0], linear // shape[0] % shape[1], linear // (shape[0] * shape[1])


def cluster_order(grid: Dim3, cluster: Dim3) -> Array:
    """The CTA numbers of a grid, one cluster after the other, x fastest in both."""
    sizes = [part for axis in (2, 1, 0) for part in (grid[axis] // cluster[axis], cluster[axis])]
    table = np.arange(grid[0] * grid[1] * grid[2]).reshape(sizes)  # z, z inside, y, y inside ...
    return table.transpose(0, 2, 4, 1, 3, 5).reshape(-1)

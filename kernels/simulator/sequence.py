"""Sequences of launches of PTX kernels on torch CPU tensors: `simulate_sequence`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.residency import Chip, Footprint
from k3fuse.kernels.simulator import (  # noqa: F401  (each import registers its instructions)
    ops_async,
    ops_atomic,
    ops_bits,
    ops_convert,
    ops_float,
    ops_grid,
    ops_integer,
    ops_memory,
    ops_mma,
    ops_multimem,
    ops_sync,
    ops_tcgen05,
    ops_warp,
)
from k3fuse.kernels.simulator.counters import Bytes, Marks, SimReport, Traffic, by_buffer
from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.grids import Grid, Observer, Tally
from k3fuse.kernels.simulator.machine import WARP, Dim3, Program, cluster_order
from k3fuse.kernels.simulator.memory import GlobalMemory
from k3fuse.kernels.simulator.overlap import Watch
from k3fuse.kernels.simulator.parser import parse
from k3fuse.kernels.simulator.placement import Parameter, Placement
from k3fuse.kernels.simulator.race_report import Race
from k3fuse.kernels.simulator.races import RaceChecker
from k3fuse.kernels.simulator.scheduler import Scheduler
from k3fuse.kernels.simulator.shared import FIRST_BYTE
from k3fuse.kernels.simulator.streams import Streams
from k3fuse.kernels.simulator.syntax import Entry
from k3fuse.kernels.simulator.translate import translate

# Float32 temporaries of 96 KiB stay in the cache and below the mmap limit of malloc (128 KiB); the
# GEMV of M = 8 takes 10 % longer with 64 KiB.
_GROUP_LANES = 24576
_MAX_SHARED = 232448  # bytes of dynamic shared memory a CTA of sm_90 and later may have


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a sequence, the same on all ranks but for `params`.

    `params` holds one list for each rank; `entry` may be empty: the first kernel of the text.
    `names` names the parameters in messages, `label` the launch (default: the entry). `pdl`: the
    launch may overlap its predecessor (programmatic stream serialization). `registers` a thread
    and `static_smem` count only where residency is modelled; 0 registers take none.
    """

    ptx: str
    grid: Dim3
    block: Dim3
    params: Sequence[Sequence[Parameter]]
    entry: str = ""
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    names: Sequence[str] = ()
    pdl: bool = False
    registers: int = 0
    label: str = ""


@dataclass
class SequenceReport:
    """The outcome of a sequence: one SimReport a launch, summed over its ranks, and totals.

    `timeline[rank, launch]` is (first round, round in which it was complete). `notes` are remarks
    that are no faults by themselves; `races` and `race_count` are those of SimReport. `traffic`
    counts a byte that several launches touch as distinct once.
    """

    launches: list[SimReport]
    ranks: int
    seed: int | None
    traffic: dict[tuple[int, str, int, str], Bytes] = field(default_factory=dict)
    timeline: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    races: tuple[Race, ...] = ()
    race_count: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def warp_instructions(self) -> int:
        """Warp-instructions of all launches."""
        return sum(report.warp_instructions for report in self.launches)

    def overlapped(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        """Whether two (rank, launch) were under way in the same round."""
        (start, end), (begin, stop) = self.timeline[first], self.timeline[second]
        return start < stop and begin < end


@lru_cache(maxsize=64)
def _program(text: str, entry: str) -> tuple[Entry, Program]:
    entries = parse(text).entries
    name = entry or next(iter(entries))
    if name not in entries:
        raise ValueError(f"entry is {name!r}; the PTX has {', '.join(entries)}")
    return entries[name], translate(entries[name])


def simulate_sequence(
    launches: Sequence[Launch],
    *,
    ranks: int = 1,
    seed: int | None = None,
    sms: int | None = None,
    delay: Mapping[tuple[int, int], int] | None = None,
    skip: Collection[tuple[int, int]] = (),
    observer: Observer | None = None,
    races: bool = False,
) -> SequenceReport:
    """Run launches in stream order on every rank, and write the results back into the tensors.

    Ranks advance independently: one may be in launch 2 while another is in launch 0. A tensor that
    several launches take is one buffer. A launch with `pdl` starts when every CTA of its
    predecessor has executed griddepcontrol.launch_dependents or exited, another one when all before
    it are complete. `sms`: only so many CTAs of a rank are resident at once as fit that many SMs;
    without it all are. `delay[rank, launch]` holds a launch back for that many rounds after it
    could start. `skip` leaves (rank, launch) out, as a rank that gave a step up does. With a `seed`
    launches also start up to 6 rounds late. `observer` is told of grids. With `races` data races
    are looked for, too (docs/simulator.md); reads of unwritten bytes, overlaps and surplus arrivals
    then end the run only at its end, as errors that carry the races.

    Raises ValueError for a wrong call, UnsupportedPtxError before anything runs, and
    MemoryAccessError, BarrierError, OverlapError or DeadlockError for what a kernel does wrong;
    tensors are then left as they were.
    """
    started = time.perf_counter()
    if not launches:
        raise ValueError("launches is empty; give at least one Launch")
    _check_places("delay", delay or {}, ranks, len(launches))
    _check_places("skip", skip, ranks, len(launches))
    memory = GlobalMemory(ranks)
    delivery, placed = Delivery(seed, memory), Placement(memory)
    checker = memory.races = RaceChecker() if races else None
    observers = tuple(item for item in (checker, observer) if item is not None)
    watched = any(launch.pdl for launch in launches)
    streams: list[list[Grid]] = [[] for _ in range(ranks)]
    reports, programs, traffics, tallies = [], [], [], []
    for index, launch in enumerate(launches):
        code, program = _program(launch.ptx, launch.entry)
        _check(code, launch, ranks)
        report = SimReport(code.name, launch.grid, launch.block, launch.cluster, ranks, seed)
        traffic, tally, marks = Traffic(), Tally(), Marks()
        order = cluster_order(launch.grid, launch.cluster)
        need = _footprint(launch, program, sms)
        label = f"launch {index} '{launch.label or code.name}'" if len(launches) > 1 else ""
        for rank, values in enumerate(launch.params):
            if (rank, index) in skip:
                continue
            grid = Grid(
                index, rank, label, program, (launch.grid, launch.block, launch.cluster),
                launch.dynamic_smem, placed.pack(code, rank, values, launch.names), order, need,
                launch.pdl, traffic, tally, (delay or {}).get((rank, index), 0), observers,
            )  # fmt: skip
            grid.watch = Watch(grid, marks) if watched else None
            streams[rank].append(grid)
        reports.append(report)
        programs.append(program)
        traffics.append(traffic)
        tallies.append(tally)
    memory.traffic = traffics[0]
    with np.errstate(all="ignore"):
        moving = Streams(streams, memory, delivery, sms=sms, lanes=_GROUP_LANES, seed=seed)
        scheduler = Scheduler(moving, memory, delivery, seed)
        if checker is None:
            scheduler.run()
        else:
            checker.expect([grid for grids in streams for grid in grids])
            checker.watch(scheduler.run)
    placed.write_back()
    for report, program, traffic, tally in zip(reports, programs, traffics, tallies, strict=True):
        _fill(report, program, traffic, tally)
        report.rounds = scheduler.rounds
    timeline = {
        (grid.rank, grid.index): (grid.begun or 0, grid.ended or 0)
        for grids in streams
        for grid in grids
    }
    result = SequenceReport(reports, ranks, seed, by_buffer(traffics), timeline, moving.notes)
    if checker is not None:
        result.races, result.race_count = checker.races, checker.count
    result.rounds, result.seconds = scheduler.rounds, time.perf_counter() - started
    return result


def _check_places(
    name: str, places: Collection[tuple[int, int]], ranks: int, launches: int
) -> None:
    for rank, index in places:
        if not (0 <= rank < ranks and 0 <= index < launches):
            raise ValueError(
                f"{name} names (rank {rank}, launch {index}); there are {ranks} ranks and "
                f"{launches} launches"
            )


def _footprint(launch: Launch, program: Program, sms: int | None) -> Footprint:
    """What a CTA holds of an SM; ValueError where none fits."""
    x, y, z = launch.block
    cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    smem = program.shared_bytes - FIRST_BYTE + launch.dynamic_smem
    need = Footprint.of(x * y * z, launch.registers, max(smem, 0), cluster)
    if sms is not None:
        try:
            chip = Chip(sms)
        except BuildError as error:
            raise ValueError(str(error)) from None
        if chip.take(need) is None:
            raise ValueError(
                f"no cluster of {cluster} CTAs of {launch.label or 'the kernel'} fits {sms} SMs, "
                f"bound by {chip.obstacle(need)}; use smaller CTAs or clusters"
            )
    return need


def _check(code: Entry, launch: Launch, ranks: int) -> None:
    """Raise ValueError for a launch that no GPU would accept."""
    grid, block, cluster, params = launch.grid, launch.block, launch.cluster, launch.params
    dynamic_smem = launch.dynamic_smem
    threads = block[0] * block[1] * block[2]
    if threads % WARP or not 0 < threads <= 1024:
        raise ValueError(f"block is {block}: {threads} threads; use a multiple of 32 up to 1024")
    if code.block is not None and code.block != block:
        raise ValueError(f"block is {block}; the kernel was compiled for {code.block}")
    if min(*grid, *cluster) < 1:
        raise ValueError(f"grid is {grid} and cluster {cluster}; all sizes must be 1 or more")
    if any(grid[axis] % cluster[axis] for axis in range(3)):
        raise ValueError(f"grid is {grid}, no multiple of the cluster {cluster}")
    if not 0 <= dynamic_smem <= _MAX_SHARED:
        raise ValueError(f"dynamic_smem is {dynamic_smem}; use 0 to {_MAX_SHARED} bytes")
    if ranks < 1 or len(params) != ranks:
        raise ValueError(f"params has {len(params)} lists; give one for each of {ranks} ranks")
    for rank, values in enumerate(params):
        if len(values) != len(code.parameters):
            raise ValueError(
                f"params[{rank}] has {len(values)} values; the kernel takes {len(code.parameters)}"
            )


def _fill(report: SimReport, program: Program, traffic: Traffic, tally: Tally) -> None:
    """Bring the counters of a launch into its report."""
    opcodes: Counter[str] = Counter()
    for number, code in enumerate(program.codes):
        total = tally.issues[number]
        if code.issued:
            warps = total // code.issued
            for instruction in code.block.body:
                opcodes[instruction.opcode] += warps
            if code.block.last is not None:
                opcodes[code.block.last.opcode] += warps
    report.opcodes = dict(opcodes)
    report.warp_instructions = sum(opcodes.values())
    report.traffic = by_buffer([traffic])
    report.shared_read, report.shared_written = tally.shared_read, tally.shared_written
    report.shared_distinct, report.remote_shared = tally.shared_distinct, tally.remote_shared

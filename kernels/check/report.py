"""What one run did, as a table for people and as JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check.naming import Traffic
from k3fuse.kernels.simulator import SequenceReport as SimulatedSequence
from k3fuse.kernels.simulator import SimReport

MAX_PEER_ROWS = 8  # pairs of ranks that a table shows one by one; more are summed up


@dataclass(frozen=True)
class BufferUse:
    """Traffic of one parameter, all ranks together, in bytes.

    place: "own" memory of the requesting rank, or a "peer"'s. access: "read" or "write".
    """

    name: str
    place: str
    access: str
    requested: int
    distinct: int


@dataclass(frozen=True)
class RunReport:
    """One simulated launch: what the kernel takes of a chip and what it asked of the machine.

    traffic: bytes by (requesting rank, buffer, owning rank, "read" or "write"), buffers named as
    their owners pass them.
    needed: bytes each parameter has to move at least, where the caller stated it.
    outputs: for each rank the tensors that were written to, by parameter name (those passed in).
    races: what the race checker found, None where it was not asked or other launches ran, too.
    polled: buffers that are read until something is there.
    """

    built: Built = field(repr=False)
    sim: SimReport = field(repr=False)
    traffic: Traffic = field(repr=False)
    needed: dict[str, int]
    outputs: tuple[dict[str, torch.Tensor], ...] = field(repr=False)
    races: tuple[str, ...] | None
    polled: frozenset[str] = frozenset()

    @property
    def bytes_requested(self) -> int:
        """Bytes of all global reads and writes of all ranks; reads of what is polled count once."""
        again = sum(
            part.requested - part.distinct
            for (_, name, _, way), part in self.traffic.items()
            if way == "read" and name in self.polled
        )
        return self.sim.bytes("read").requested + self.sim.bytes("write").requested - again

    @property
    def bytes_distinct(self) -> int:
        """Distinct bytes among them, counted per rank, buffer and direction."""
        return self.sim.bytes("read").distinct + self.sim.bytes("write").distinct

    @property
    def bytes_needed(self) -> int | None:
        """Sum of `needed`; None unless it is stated for all memory that was touched."""
        touched = {name for _, name, _, _ in self.traffic}
        return sum(self.needed.values()) if touched <= set(self.needed) else None

    def buffers(self) -> list[BufferUse]:
        """Traffic by parameter, place and direction, in order of first use."""
        sums: dict[tuple[str, str, str], list[int]] = {}
        for (rank, name, owner, way), part in self.traffic.items():
            key = name, "own" if rank == owner else "peer", way
            total = sums.setdefault(key, [0, 0])
            total[0] += part.requested
            total[1] += part.distinct
        return [BufferUse(*key, *total) for key, total in sums.items()]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        variant, plan, resources = self.built.variant, self.built.plan, self.built.resources
        return {
            "op": variant.op,
            "variant": variant.name,
            "arch": variant.arch,
            "grid": list(plan.grid),
            "block": list(plan.block),
            "cluster": list(plan.cluster),
            "registers": resources.registers,
            "spill_bytes": resources.spill_bytes,
            "smem_bytes": self.built.smem_bytes,
            "ranks": self.sim.ranks,
            "seed": self.sim.seed,
            "warp_instructions": self.sim.warp_instructions,
            "bytes_requested": self.bytes_requested,
            "bytes_needed": self.bytes_needed,
            "bytes_distinct": self.bytes_distinct,
            "needed": dict(self.needed),
            "buffers": [vars(b) | {} for b in self.buffers()],
            "peers": [
                {"rank": rank, "owner": owner, "requested": b.requested, "distinct": b.distinct}
                for (rank, owner), b in sorted(self.sim.peer_bytes().items())
            ],
            "rounds": self.sim.rounds,
            "races": None if self.races is None else list(self.races),
            "seconds": round(self.sim.seconds, 3),
        }

    def _head(self) -> str:
        sim, resources = self.sim, self.built.resources
        schedule = "fair schedule" if sim.seed is None else f"random schedule {sim.seed}"
        counted = f"{sim.warp_instructions:,} warp instructions"
        if sim.seconds:  # of a launch on its own
            counted += f", {sim.rounds} rounds, {sim.seconds:.2f} s, races {_races(self.races)}"
        return (
            f"{self.built.variant.label}: {sim.ranks} rank{'s' * (sim.ranks > 1)}, {schedule}\n"
            f"  {counted}\n"
            f"  {resources.registers} registers, {resources.spill_bytes} bytes spilled, "
            f"{self.built.smem_bytes} bytes shared a CTA"
        )

    def _traffic(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("buffer", "memory", "access"):
            table.add_column(name)
        for name in ("requested", "needed", "distinct", "requested / needed"):
            table.add_column(name, justify="right")
        uses = self.buffers()
        for use in uses:
            # A need is stated for a parameter, so it stands beside its only row.
            single = sum(u.name == use.name for u in uses) == 1
            need = self.needed.get(use.name) if single else None
            row = use.requested, need, use.distinct
            table.add_row(use.name, use.place, use.access, *_bytes(*row))
        total = self.bytes_requested, self.bytes_needed, self.bytes_distinct
        table.add_row("all", "", "", *_bytes(*total))
        return table

    def _peers(self) -> Table | str | None:
        pairs = sorted(self.sim.peer_bytes().items())
        if not pairs:
            return None
        if len(pairs) > MAX_PEER_ROWS:
            sizes = [b.requested for _, b in pairs]
            return f"  {len(pairs)} pairs of ranks, {min(sizes):,} to {max(sizes):,} bytes each"
        table = Table(box=None, pad_edge=False)
        for name in ("from rank", "to memory of", "requested", "distinct"):
            table.add_column(name, justify="right")
        for (rank, owner), part in pairs:
            table.add_row(str(rank), str(owner), f"{part.requested:,}", f"{part.distinct:,}")
        return table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield self._head()
        yield self._traffic()
        if (peers := self._peers()) is not None:
            yield peers
        for line in self.races or ():
            yield f"  race: {line}"

    def __str__(self) -> str:
        return plain(self)


@dataclass(frozen=True)
class SequenceReport:
    """The launches of one step, in stream order.

    sim: totals and the timeline. races: of the whole step, None where the checker was not asked.
    """

    reports: tuple[RunReport, ...]
    sim: SimulatedSequence = field(repr=False)
    races: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the launches and their sums."""
        needs = [r.bytes_needed for r in self.reports]
        return {
            "launches": [r.to_json() for r in self.reports],
            "warp_instructions": self.sim.warp_instructions,
            "bytes_requested": sum(r.bytes_requested for r in self.reports),
            "bytes_needed": None if None in needs else sum(n or 0 for n in needs),
            "timeline": [
                {"rank": rank, "launch": launch, "begun": begun, "ended": ended}
                for (rank, launch), (begun, ended) in sorted(self.sim.timeline.items())
            ],
            "races": None if self.races is None else list(self.races),
            "notes": list(self.sim.notes),
            "rounds": self.sim.rounds,
            "seconds": round(self.sim.seconds, 3),
        }

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from self.reports
        if len(self.reports) > 1:
            yield (
                f"step: {self.sim.warp_instructions:,} warp instructions, "
                f"{self.sim.rounds} rounds, {self.sim.seconds:.2f} s, races {_races(self.races)}"
            )
            for line in self.races or ():
                yield f"  race: {line}"
        for note in self.sim.notes:
            yield f"  note: {note}"

    def __str__(self) -> str:
        return plain(self)


def _races(found: tuple[str, ...] | None) -> str:
    return "not checked" if found is None else str(len(found))


def plain(part: RenderableType) -> str:
    """A table or report as text, 110 columns wide, without colour."""
    console = Console(width=110, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _bytes(requested: int, needed: int | None, distinct: int) -> tuple[str, str, str, str]:
    if not needed:
        return f"{requested:,}", "-", f"{distinct:,}", "-"
    return f"{requested:,}", f"{needed:,}", f"{distinct:,}", f"{requested / needed:.2f}"

"""The errors of the simulator; each message names the PTX line and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.race_report import Race


class SimulationError(RuntimeError):
    """A kernel did something wrong, or the simulator cannot go on; the base of the others.

    `races` holds the races that were found before, when they were asked for.
    """

    races: tuple[Race, ...] = ()


class PtxSyntaxError(SimulationError):
    """The PTX text cannot be read; the message names the line."""


class UnsupportedPtxError(SimulationError):
    """An instruction, modifier or operand that the simulator does not model.

    It is raised when the kernel is translated, before anything runs, so that no result is a guess.
    """

    def __init__(self, text: str, line: int, why: str = "") -> None:
        tail = f": {why}" if why else ""
        super().__init__(f"line {line}: unsupported PTX `{text}`{tail}")
        self.text, self.line = text, line


class MemoryAccessError(SimulationError):
    """An access out of bounds, misaligned, or to bytes that nobody has written."""


class BarrierError(SimulationError):
    """An mbarrier or barrier is used in a way that its definition forbids."""


class OverlapError(SimulationError):
    """A grid touches what an earlier one of its rank, perhaps unfinished, reads or writes."""


class TensorMemoryError(SimulationError):
    """Tensor memory that is not allocated, not written, or not given back, or a bad descriptor."""


class DeadlockError(SimulationError):
    """Nothing can move any more; the message lists who waits for what."""

"""What a run cost: dynamic warp-instructions, bytes requested and distinct bytes touched.

None of this is time. It is what the kernel asks of the machine, exact for the run that was done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3fuse.kernels.simulator.types import UNSIGNED, Array


@dataclass
class Bytes:
    """Bytes requested by all lanes, and the distinct bytes among them."""

    requested: int = 0
    distinct: int = 0


class Traffic:
    """Records global accesses by (requesting rank, buffer, direction)."""

    def __init__(self) -> None:
        self.requested: Counter[tuple[int, str, int, bool]] = Counter()
        self.touched: dict[tuple[int, str, int, bool], dict[int, Array]] = {}

    def record(self, rank: int, buffer: Any, offset: Array, size: int, *, write: bool) -> None:
        """Count one access of `size` bytes (a power of two) at each offset of a buffer."""
        key = (rank, buffer.name, buffer.rank, write)
        self.requested[key] += size * len(offset)
        views = self.touched.get(key)
        if views is None:
            flags = np.zeros(len(buffer.data), np.uint8)
            views = {width: flags.view(UNSIGNED[width]) for width in (8, 16, 32, 64)}
            self.touched[key] = views
        if size > 8:
            first = offset >> 3
            for word in range(size // 8):
                views[64][first + word] = ~np.uint64(0)
        else:
            width = size * 8
            views[width][offset >> (size.bit_length() - 1)] = UNSIGNED[width](-1 & (2**width - 1))

    def by_buffer(self) -> dict[tuple[int, str, int, bool], Bytes]:
        """(requesting rank, buffer name, owning rank, whether written) -> bytes."""
        return {
            key: Bytes(count, int(np.count_nonzero(self.touched[key][8])))
            for key, count in self.requested.items()
        }


@dataclass
class SimReport:
    """The outcome of one simulated launch.

    `warp_instructions` counts an instruction once for each warp that issues it, also when a guard
    turns off all of its lanes. `opcodes` splits that count by opcode. `traffic` is keyed by
    (requesting rank, buffer name, owning rank, "read" | "write"). Shared memory bytes are summed
    over all CTAs. `rounds` is how often the scheduler visited every group of CTAs.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    ranks: int
    seed: int | None
    warp_instructions: int = 0
    opcodes: dict[str, int] = field(default_factory=dict)
    traffic: dict[tuple[int, str, int, str], Bytes] = field(default_factory=dict)
    shared_read: int = 0
    shared_written: int = 0
    shared_distinct: int = 0
    remote_shared: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def bytes(self, direction: str, *, peer: bool | None = None) -> Bytes:
        """Global traffic summed over buffers; `peer` selects remote (True) or own (False) memory.

        `direction` is "read" or "write".
        """
        if direction not in ("read", "write"):
            raise ValueError(f"direction is {direction!r}; use 'read' or 'write'")
        total = Bytes()
        for (rank, _, owner, way), part in self.traffic.items():
            if way == direction and (peer is None or (rank != owner) is peer):
                total.requested += part.requested
                total.distinct += part.distinct
        return total

    def peer_bytes(self) -> dict[tuple[int, int], Bytes]:
        """(requesting rank, owning rank) -> bytes of accesses to the memory of another rank."""
        result: dict[tuple[int, int], Bytes] = {}
        for (rank, _, owner, _), part in self.traffic.items():
            if rank != owner:
                total = result.setdefault((rank, owner), Bytes())
                total.requested += part.requested
                total.distinct += part.distinct
        return result

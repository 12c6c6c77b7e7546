"""What a run cost: dynamic warp-instructions, bytes requested and distinct bytes touched.

None of this is time. It is what the kernel asks of the machine, exact for the run that was done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.types import UNSIGNED, Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.race_report import Race


@dataclass
class Bytes:
    """Bytes requested by all lanes, and the distinct bytes among them."""

    requested: int = 0
    distinct: int = 0


STRONG = 128  # marks from here on belong to strong accesses
_SAME = {width: sum(1 << (8 * byte) for byte in range(width // 8)) for width in (8, 16, 32, 64)}
_FILLED = {
    width: [UNSIGNED[width](mark * same) for mark in range(256)] for width, same in _SAME.items()
}


class Marks:
    """Small numbers for the instructions of one kernel, so that a byte can say who touched it.

    Weak accesses get 1 to 127, strong ones 128 to 255; a kernel with more instructions uses a
    number again, so that a mark stands for one or a few instructions.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, bool], int] = {}
        self.texts: dict[int, list[str]] = {}

    def of(self, line: int, text: str, strong: bool) -> int:
        """The mark of an instruction."""
        known = self.numbers.get((line, strong))
        if known is not None:
            return known
        used = sum(1 for _, other in self.numbers if other is strong)
        number = STRONG + used % 128 if strong else 1 + used % 127
        self.numbers[line, strong] = number
        self.texts.setdefault(number, []).append(f"line {line} `{text}`")
        return number

    def describe(self, mark: int) -> str:
        """The instructions of a mark, for messages."""
        return " or ".join(self.texts.get(mark, ["an unknown line"]))


Key = tuple[int, int, bool]  # requesting rank, first address of the buffer, whether written


class Traffic:
    """Records global accesses by (requesting rank, buffer, direction).

    `touched` holds one byte for each byte of a buffer: 0, or the mark of who touched it last.
    """

    def __init__(self) -> None:
        self.requested: Counter[Key] = Counter()
        self.touched: dict[Key, dict[int, Array]] = {}
        self.buffers: dict[int, Any] = {}

    def record(
        self, rank: int, buffer: Any, offset: Array, size: int, *, write: bool, mark: int = 255
    ) -> None:
        """Count one access of `size` bytes (a power of two) at each offset of a buffer."""
        key = (rank, buffer.base, write)
        self.requested[key] += size * len(offset)
        views = self.touched.get(key)
        if views is None:
            flags = np.zeros(len(buffer.data), np.uint8)
            views = {width: flags.view(UNSIGNED[width]) for width in (8, 16, 32, 64)}
            self.touched[key] = views
            self.buffers[buffer.base] = buffer
        if size > 8:
            first = offset >> 3
            for word in range(size // 8):
                views[64][first + word] = _FILLED[64][mark]
        else:
            views[size * 8][offset >> (size.bit_length() - 1)] = _FILLED[size * 8][mark]


def by_buffer(parts: list[Traffic]) -> dict[tuple[int, str, int, str], Bytes]:
    """(requesting rank, buffer name, owning rank, "read" | "write") -> bytes of all parts.

    Bytes that several parts touch are distinct once; buffers of one name and rank are added up.
    """
    result: dict[tuple[int, str, int, str], Bytes] = {}
    for key in dict.fromkeys(key for part in parts for key in part.requested):
        having = [part for part in parts if key in part.requested]
        flags = having[0].touched[key][8]
        for part in having[1:]:
            flags = flags | part.touched[key][8]
        rank, base, write = key
        buffer = having[0].buffers[base]
        name = (rank, buffer.name, buffer.rank, "write" if write else "read")
        total = result.setdefault(name, Bytes())
        total.requested += sum(part.requested[key] for part in having)
        total.distinct += count_touched(flags)
    return result


def count_touched(flags: Array) -> int:
    """How many bytes are not 0, in chunks that stay in the cache."""
    step = 1 << 18
    return sum(
        int(np.count_nonzero(flags[first : first + step] != 0))
        for first in range(0, len(flags), step)
    )


@dataclass
class SimReport:
    """The outcome of one simulated launch.

    `warp_instructions` counts an instruction once for each warp that issues it, also when a guard
    turns off all of its lanes. `opcodes` splits that count by opcode. `traffic` is keyed by
    (requesting rank, buffer name, owning rank, "read" | "write"). Shared memory bytes are summed
    over all CTAs. When races were asked for, `races` holds the first ones, one for each pair of
    source lines, and `race_count` the number of conflicting pairs of accesses. `rounds` is how
    often the scheduler visited every group of CTAs.
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
    races: tuple[Race, ...] = ()
    race_count: int = 0
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

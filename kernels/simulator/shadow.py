"""Shadow memory: for each cell of a memory its last write, and two of its reads.

A cell is as wide as the narrowest access that the memory has seen, 16 bytes at most. An entry is
(epoch, info): the epoch holds the column and the clock of the access, the info its place in the
code, how strong it was, and its lane. An epoch of 0 means that there was none.

Of the reads since the last write two are kept: the oldest that later reads do not cover, and the
latest of another agent. So whoever writes next, at least one of several unordered readers is
somebody else; a third unordered reader is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.types import Array

CLOCK_MASK = 0xFFFFFFFF
_WIDEST = 4  # log2 of the bytes of the widest cell


def epoch_of(column: Array, clock: Array) -> Array:
    """Pack columns and clocks."""
    packed: Array = (column.astype(np.int64) << 32) | clock
    return packed


def info_of(site: int, strength: int, lane: Array) -> Array:
    """Pack a place in the code, a strength (0 weak, else the scope, 1 to 4) and lanes."""
    packed: Array = np.int64(site << 8 | strength << 5) | lane
    return packed


class Shadow:
    """The cells of one memory of `size` bytes; `describe` names one of its bytes."""

    def __init__(self, size: int, space: str, describe: Callable[[int], str]) -> None:
        self.size, self.space, self.describe = size, space, describe
        self.shift = _WIDEST
        count = -(-size >> _WIDEST) + 1
        self.writes, self.oldest, self.latest = (np.zeros((count, 2), np.int64) for _ in range(3))
        self.any_write = self.any_read = self.any_latest = False
        self.flagged: Array | None = None  # which 4-byte words carry a message, see flags.py

    def cells(self, offset: Array, size: int) -> Array:
        """The cells [n, cells of one access] of accesses of `size` bytes at byte offsets [n]."""
        narrow = (size & -size).bit_length() - 1
        if narrow < self.shift:
            self._refine(narrow)
        first = offset >> self.shift
        return first[:, None] + np.arange(size >> self.shift)

    def _refine(self, shift: int) -> None:
        parts = 1 << (self.shift - shift)

        def finer(table: Array, used: bool) -> Array:
            # Fresh zeros take no memory until they are touched.
            if not used:
                return np.zeros((len(table) * parts, 2), np.int64)
            return np.repeat(table, parts, axis=0)

        self.writes = finer(self.writes, self.any_write)
        self.oldest = finer(self.oldest, self.any_read)
        self.latest = finer(self.latest, self.any_latest)
        self.shift = shift

    def written(self, cells: Array, entry: Array) -> Array:
        """Record writes; returns which were overwritten by another agent of the same step."""
        self.any_write = True
        self.writes[cells] = entry
        if self.any_read:
            self.oldest[cells, 0] = 0
        if self.any_latest:
            self.latest[cells, 0] = 0
        lost: Array = (self.writes[cells, 0] ^ entry[..., 0]) >> 32 != 0
        return lost

    def read(self, cells: Array, entry: Array, free: Array) -> None:
        """Record reads; `free` tells where the oldest read is none, one's own or covered."""
        self.any_read = True
        if free.all():
            self.oldest[cells] = entry
        else:
            self.oldest[cells[free]] = entry[free]
        other = (self.oldest[cells, 0] ^ entry[..., 0]) >> 32 != 0
        if other.any():
            self.any_latest = True
            # Backwards, so that of several readers in one step the first stays here and the last
            # one above.
            self.latest[cells[other][::-1]] = entry[other][::-1]

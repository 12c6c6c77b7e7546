"""Tensor memory of the CTAs of one group: 128 lanes of 512 columns of 32 bits, and who holds them.

An address has the lane in bits 16 and up and the column below. Columns belong to allocations; an
access outside of one, or to a word that nobody wrote, is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.errors import TensorMemoryError
from k3fuse.kernels.simulator.memory import POISON, Origin
from k3fuse.kernels.simulator.types import Array

LANES, COLUMNS = 128, 512
SMALLEST = 32  # columns of an allocation: a power of two from here to COLUMNS


class TensorMemory:
    """`words` [ctas, 128, 512] uint32; `written` marks words; `held` columns [ctas, 512].

    Work of the tensor core (mma, cp, commit) runs in issue order for each CTA; with a seed each
    step of it waits a random while.
    """

    def __init__(self, ctas: int, cta_numbers: Array, rank: int, delivery: Delivery) -> None:
        self.words = np.full((ctas, LANES, COLUMNS), POISON * 0x01010101, np.uint32)
        self.written = np.zeros((ctas, LANES, COLUMNS), np.bool_)
        self.held = np.zeros((ctas, COLUMNS), np.bool_)
        self.allocations: dict[tuple[int, int], tuple[int, str]] = {}
        self.relinquished = np.zeros(ctas, np.bool_)
        self.cta_numbers, self.rank, self.delivery = cta_numbers, rank, delivery
        self.queues: dict[int, deque[Callable[[], None]]] = {}

    def allocate(self, cta: int, columns: int, who: Origin) -> int:
        """Take columns, the lowest that are free (any with a seed); returns the first.

        Raises TensorMemoryError for a bad count, after relinquish_alloc_permit, or where too few
        are left: nobody outside the CTA could free any, so hardware would wait for ever.
        """
        if columns not in (32, 64, 128, 256, 512):
            raise TensorMemoryError(
                f"tcgen05.alloc of {columns} columns; use a power of two from 32 to 512: "
                f"{who.where(0)}"
            )
        if self.relinquished[cta]:
            raise TensorMemoryError(
                f"tcgen05.alloc after tcgen05.relinquish_alloc_permit: {who.where(0)}"
            )
        slots = self.held[cta].reshape(-1, columns)
        free = np.flatnonzero(~slots.any(axis=1))
        if not len(free):
            raise TensorMemoryError(
                f"tcgen05.alloc of {columns} columns, {int(self.held[cta].sum())} of {COLUMNS} are "
                f"taken by this CTA: {who.where(0)}"
            )
        random = self.delivery.random
        first = int(free[0] if random is None else random.choice(free)) * columns
        self.held[cta, first : first + columns] = True
        self.written[cta, :, first : first + columns] = False
        self.allocations[cta, first] = columns, f"line {who.line} `{who.text}`"
        return first

    def free(self, cta: int, address: int, columns: int, who: Origin) -> None:
        """Give columns back; raises TensorMemoryError unless they are one whole allocation."""
        known = self.allocations.pop((cta, address), None)
        if known is None or known[0] != columns:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {address:#x}, which tcgen05.alloc did "
                f"not give: {who.where(0)}"
            )
        self.held[cta, address : address + columns] = False

    def check_end(self) -> None:
        """Raise when a CTA has ended with columns that it never gave back."""
        for (cta, first), (columns, where) in self.allocations.items():
            raise TensorMemoryError(
                f"{columns} columns of tensor memory at {first:#x} were never given back with "
                f"tcgen05.dealloc: rank {self.rank}, CTA {int(self.cta_numbers[cta])}, {where}"
            )

    def close(self) -> None:
        """All lanes of the group have ended; give back the memory unless work is under way."""
        self.check_end()
        if not any(self.queues.values()):
            self.words = np.zeros((0, 0, 0), np.uint32)
            self.written = np.zeros((0, 0, 0), np.bool_)

    def locate(self, cta: int, lane: Array, column: Array, who: Origin, verb: str) -> None:
        """Raise unless all words lie in lanes and in columns that the CTA holds."""
        inside = (lane >= 0) & (lane < LANES) & (column >= 0) & (column < COLUMNS)
        held = inside & self.held[cta, np.where(inside, column, 0)]
        if not held.all():
            bad = int(np.flatnonzero(~held)[0])
            where = np.broadcast_arrays(lane, column)
            raise TensorMemoryError(
                f"{verb} of tensor memory at lane {int(where[0].flat[bad])}, column "
                f"{int(where[1].flat[bad])}, which the CTA has not allocated: {who.where(0)}"
            )

    def read(self, cta: int, lane: Array, column: Array, who: Origin) -> Array:
        """The words at broadcast lanes and columns."""
        self.locate(cta, lane, column, who, "read")
        if not self.written[cta, lane, column].all():
            missing = ~self.written[cta, lane, column]
            bad = int(np.flatnonzero(missing)[0])
            where = np.broadcast_arrays(lane, column)
            raise TensorMemoryError(
                f"read of tensor memory at lane {int(where[0].flat[bad])}, column "
                f"{int(where[1].flat[bad])}, before anyone wrote it: {who.where(0)}"
            )
        words: Array = self.words[cta, lane, column]
        return words

    def write(self, cta: int, lane: Array, column: Array, words: Array, who: Origin) -> None:
        """Write words at broadcast lanes and columns."""
        self.locate(cta, lane, column, who, "write")
        self.words[cta, lane, column] = words
        self.written[cta, lane, column] = True

    def columns(self, cta: int, first: int, count: int) -> slice | None:
        """All lanes of neighbouring columns that the CTA holds; None where it does not."""
        if first < 0 or first + count > COLUMNS or not self.held[cta, first : first + count].all():
            return None
        return slice(first, first + count)

    def issue(self, cta: int, work: Callable[[], None]) -> None:
        """Give the tensor core of a CTA something to do after all that it has been given."""
        if self.delivery.random is None:
            work()
            return
        queue = self.queues.setdefault(cta, deque())
        queue.append(work)
        self.delivery.send(self, [lambda: queue.popleft()()])


def split(address: int) -> tuple[int, int]:
    """(lane, column) of an address of tensor memory."""
    return address >> 16 & 0x7FFF, address & 0xFFFF

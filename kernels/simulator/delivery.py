"""Asynchronous effects that land some time after they are issued, whole or in pieces.

Without a seed everything lands at once. With a seed every piece lands after a random number of
rounds, in random order, which is what the memory system of a GPU may do. The words of one torn
store come apart for certain: one of them lands, and the others only after somebody has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from k3fuse.kernels.simulator.memory import GlobalMemory
from k3fuse.kernels.simulator.types import Array

_LONGEST = 6  # rounds
_UNREAD = 24  # rounds after which the rest of a torn store lands although nobody reads it
_SPREAD = 2  # rounds over which the rest lands

Piece = Callable[[], None]
PartPiece = Callable[[Array], None]  # lands what belongs to the lanes (numbers) given


@dataclass(eq=False)
class Torn:
    """A store of some lanes whose words at `lead` (addresses) land first, by `parts[0]`.

    `number` belongs to the first lane, the next ones follow. `left` are the lanes whose other words
    have not been sent on; `due` is the round in which the next part lands.
    """

    owner: object
    number: int
    lead: Array
    parts: list[PartPiece]
    left: Array
    due: int
    landed: bool = False


class Delivery:
    """Pieces on their way; one object for the whole simulation."""

    def __init__(self, seed: int | None, memory: GlobalMemory) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self.memory = memory
        self.turn = 0 if seed is None else int(np.random.default_rng([seed, 3]).integers(0, 1024))
        self.waiting: list[tuple[int, object, bool, Piece]] = []
        self.torn: list[Torn] = []
        self.number = 1
        self.round = 0

    @property
    def pending(self) -> bool:
        """Whether anything is on its way."""
        return bool(self.waiting or self.torn)

    def send(self, owner: object, pieces: list[Piece], *, fenced: bool = False) -> None:
        """Let every piece land now (no seed) or later. `fenced` pieces land at the next fence."""
        if self.random is None:
            for piece in pieces:
                piece()
            return
        for place in self.random.permutation(len(pieces)):
            self._later(owner, pieces[int(place)], _LONGEST, fenced)

    def _later(self, owner: object, piece: Piece, longest: int, fenced: bool) -> None:
        if self.random is not None:
            due = self.round + int(self.random.integers(0, longest + 1))
            self.waiting.append((due, owner, fenced, piece))

    def tear(self, owner: object, lead: Array, parts: list[PartPiece]) -> None:
        """Land the words at the addresses `lead`, one a lane, some time, by the first of `parts`,
        and the others of a lane after its word was read.

        Only with a seed. A fence of the owner lands all of it.
        """
        if self.random is not None:
            due = self.round + int(self.random.integers(0, _LONGEST + 1))
            left = np.ones(len(lead), np.bool_)
            self.torn.append(Torn(owner, self.number, lead, parts, left, due))
            self.number += len(lead)

    def advance(self, round_number: int) -> None:
        """Land what is due in this round."""
        self.round = round_number
        if self.torn:
            self._advance_torn()
        due = [item for item in self.waiting if item[0] <= round_number]
        self.waiting = [item for item in self.waiting if item[0] > round_number]
        for _, _, _, piece in due:
            piece()

    def _advance_torn(self) -> None:
        seen, self.memory.seen_leads = self.memory.seen_leads, set()
        read = np.array(sorted(seen), np.int64)
        for item in self.torn:
            lanes = np.arange(len(item.lead))
            if not item.landed:
                if item.due <= self.round:
                    item.parts[0](lanes)
                    item.landed, item.due = True, self.round + _UNREAD
                    self.memory.mark_leads(item.lead, item.number + lanes)
                continue
            if item.due > self.round:
                first, last = np.searchsorted(read, [item.number, item.number + len(lanes)])
                lanes = read[first:last] - item.number
            lanes = lanes[item.left[lanes]]
            if len(lanes):
                item.left[lanes] = False
                self.memory.mark_leads(item.lead[lanes], 0)
                for part in item.parts[1:]:
                    self._later(item.owner, partial(part, lanes), _SPREAD, True)
        self.torn = [item for item in self.torn if item.left.any()]

    def flush(self, owner: object) -> None:
        """Land the fenced pieces that `owner` sent."""
        for item in [item for item in self.torn if item.owner is owner]:
            lanes = np.flatnonzero(item.left)
            if item.landed:
                self.memory.mark_leads(item.lead[lanes], 0)
            for part in item.parts[1 if item.landed else 0 :]:
                part(lanes)
            self.torn.remove(item)
        due = [item for item in self.waiting if item[2] and item[1] is owner]
        if due:
            self.waiting = [item for item in self.waiting if not (item[2] and item[1] is owner)]
            for _, _, _, piece in due:
                piece()

    def owes(self, owners: Sequence[object]) -> bool:
        """Whether pieces of one of the owners are on their way."""
        if not self.pending:
            return False
        known = {id(owner) for owner in owners}
        return any(id(item[1]) in known for item in self.waiting) or any(
            id(item.owner) in known for item in self.torn
        )

"""Asynchronous effects that land some time after they are issued, whole or in pieces.

Without a seed everything lands at once. With a seed every piece lands after a random number of
rounds, in random order, which is what the memory system of a GPU may do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_LONGEST = 6  # rounds


class Delivery:
    """Pieces on their way; one object for the whole simulation."""

    def __init__(self, seed: int | None) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self.pending: list[tuple[int, object, bool, Callable[[], None]]] = []
        self.round = 0

    def send(
        self, owner: object, pieces: list[Callable[[], None]], *, fenced: bool = False
    ) -> None:
        """Let every piece land now (no seed) or later. `fenced` pieces land at the next fence."""
        if self.random is None:
            for piece in pieces:
                piece()
            return
        for place in self.random.permutation(len(pieces)):
            due = self.round + int(self.random.integers(0, _LONGEST + 1))
            self.pending.append((due, owner, fenced, pieces[int(place)]))

    def advance(self, round_number: int) -> None:
        """Land what is due in this round."""
        self.round = round_number
        due = [item for item in self.pending if item[0] <= round_number]
        self.pending = [item for item in self.pending if item[0] > round_number]
        for _, _, _, piece in due:
            piece()

    def flush(self, owner: object) -> None:
        """Land the fenced pieces that `owner` sent."""
        due = [item for item in self.pending if item[2] and item[1] is owner]
        if due:
            self.pending = [item for item in self.pending if not (item[2] and item[1] is owner)]
            for _, _, _, piece in due:
                piece()

    def owes(self, owners: Sequence[object]) -> bool:
        """Whether pieces of one of the owners are on their way."""
        if not self.pending:
            return False
        known = {id(owner) for owner in owners}
        return any(id(item[1]) in known for item in self.pending)

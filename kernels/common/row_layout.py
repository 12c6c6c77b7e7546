"""What mailboxes of whole rows have alike: parities of rows, then counters and the error word.

rows       [PARITIES][max_m tokens][row]
control    [counters] 32-bit calls, then the error word, then words of the mailbox's own
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from k3fuse.kernels.common.mailbox import ALIGNMENT, PARITIES, WORD


class RowLayout(ABC):
    """Offsets, in bytes. counters: one a CTA of the largest grid; own_words: behind the error."""

    counters: ClassVar[int]
    own_words: ClassVar[int] = 0
    max_m: int

    @property
    @abstractmethod
    def row(self) -> int:
        """Bytes of a token's row."""

    @property
    def parity(self) -> int:
        """Bytes from one parity to the next."""
        return self.max_m * self.row

    @property
    def data(self) -> int:
        """Bytes of everything that is armed with the sentinel."""
        return PARITIES * self.parity

    @property
    def control(self) -> int:
        """Offset of the counters; they are local, no peer touches them."""
        return self.data

    @property
    def error(self) -> int:
        """Offset of the sticky error word."""
        return self.control + self.counters * WORD

    @property
    def total(self) -> int:
        """Bytes of the whole mailbox."""
        return -(-(self.error + (1 + self.own_words) * WORD) // ALIGNMENT) * ALIGNMENT

    def at(self, call: int, token: int) -> int:
        """Offset of a token's row in call number `call`."""
        return call % PARITIES * self.parity + token * self.row

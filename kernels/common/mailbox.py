"""The mailbox through which the ranks of a group add up their partial rows.

One mailbox a rank and group, in symmetric memory: every rank can store into it, by a multicast
address or by its peers' addresses. Nothing is ever signalled beside the data. A word (a pair of
BF16) that has not arrived yet holds SENTINEL; a reader polls until no word of what it needs does
(Lamport's flag in the data). Readers put the sentinel back.

**The sentinel** is 0x80000000, the pair (+0.0, -0.0). A publisher turns every -0.0 into +0.0 after
its last rounding, by integer arithmetic, so no pair it publishes has that pattern, whatever the
payload of a NaN. Sums of such values round to -0.0 neither: in round to nearest, a sum is -0.0 only
if all terms are. A 16-byte load is four words that may arrive at different times; all four are
tested.

**Layout** of one rank's mailbox, bytes from its start; the row is H BF16:

    one-shot   [PARITIES][tp ranks][MAX_M tokens][H]          slot r: the partial rows of rank r
    receive    [PARITIES][tp ranks][MAX_M tokens][H / tp]     two-shot: rank r's share for me
    gather     [PARITIES][MAX_M tokens][H]                    two-shot: the summed rows
    control    [PRODUCERS] 32-bit calls, then the error word

**One-shot**: rank r publishes its partial row of token t to slot r of every mailbox; every rank
adds the slots of its own mailbox in rank order. **Two-shot**: rank r sends the columns that rank o
owns to o's receive slot r; o adds the slots in rank order, rounds, and publishes its columns to
everybody's gather row. Sum, order and rounding are the same, so are the bits; two-shot moves
2/tp of the bytes and costs one more hop.

**Parity** = number of the call modulo PARITIES. The number lives in device memory, one counter a
producer CTA, read when the CTA's predecessor has ended and stored plus one: it advances by one in
every call whatever M and the kernel are, so it survives graphs that replay in any order, graphs
with an odd number of calls, and captures that were aborted. All ranks make the same calls in the
same order, so their counters agree.

**What separates two uses of a parity.** Let call c use parity p; the next call on p is c + 2.
Rank a may store into b's mailbox for c + 2 only when b has read and re-armed what call c put there:

1. b re-arms in call c's kernel, at the reads.
2. b's kernels run one after the other: each publishes only behind griddepcontrol.wait, when the
   kernel before has ended and its stores are performed. So b publishes call c + 1 after 1.
3. Call c + 1 is all-to-all: a's call c + 1 ends only when a has read a word from every rank that
   publishes to it, b among them. So a's call c + 1 ends after b published it, hence after 1.
4. a publishes call c + 2 after its call c + 1 has ended (as in 2).

In two-shot form 3 holds through the owners: a's gather row is complete only when every owner has
published, and an owner publishes only when it has b's partial of its columns; b owns columns too.
Two parities are therefore enough, for any M: a call with fewer tokens is all-to-all as well. With
one parity step 3 would be missing. Every call re-arms exactly the words that it polled, and it
polls all that the call published, so all of both parities is armed between calls.

Nothing here orders different words, so relaxed stores and loads (at system scope) are enough. The
stores that re-arm are relaxed too; they are performed before the kernel ends.

**Failure.** With a debug time-out a poll that sees no data for too long stores a code in the error
word, which stays (`ErrorWord`), and goes on with what is there: the outputs are then meaningless.
After that, or after any aborted call, the group must `reset`: all ranks stop, fill, and meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

PARITIES = 2
MAX_M = 64
HIDDEN = 7168
SENTINEL = 0x80000000
PRODUCERS = 112  # CTAs of every producer grid, each with a counter of its own
ELEMENT = 2  # bytes of BF16
WORD = 4
ALIGNMENT = 128  # bytes; of every region


@dataclass(frozen=True)
class Mailbox:
    """Sizes and offsets, in bytes, of the mailbox of one rank in a group of `tp` ranks."""

    tp: int
    hidden: int = HIDDEN
    max_m: int = MAX_M

    def __post_init__(self) -> None:
        if self.tp < 1 or self.hidden % (8 * self.tp):
            raise ValueError(
                f"tp={self.tp}: the {self.hidden} columns must divide into 16-byte pieces for each "
                "rank; use 2, 4, 7, 8, 14 or 16"
            )

    @property
    def row(self) -> int:
        """Bytes of a whole row."""
        return self.hidden * ELEMENT

    @property
    def part(self) -> int:
        """Bytes of the columns that one rank owns in a two-shot exchange."""
        return self.row // self.tp

    @property
    def one_shot(self) -> int:
        """Offset of the one-shot slots."""
        return 0

    @property
    def one_shot_parity(self) -> int:
        """Bytes from one parity to the next of the one-shot slots; a slot is max_m rows."""
        return self.tp * self.max_m * self.row

    @property
    def receive(self) -> int:
        """Offset of the two-shot receive slots."""
        return PARITIES * self.one_shot_parity

    @property
    def receive_parity(self) -> int:
        """Bytes from one parity to the next of the receive slots; a slot is max_m parts."""
        return self.tp * self.max_m * self.part

    @property
    def gather(self) -> int:
        """Offset of the two-shot gather rows."""
        return self.receive + PARITIES * self.receive_parity

    @property
    def gather_parity(self) -> int:
        """Bytes from one parity to the next of the gather rows."""
        return self.max_m * self.row

    @property
    def data(self) -> int:
        """Bytes of everything that is armed with the sentinel."""
        return self.gather + PARITIES * self.gather_parity

    @property
    def control(self) -> int:
        """Offset of the counters; they are local, no peer touches them."""
        return self.data

    @property
    def error(self) -> int:
        """Offset of the sticky error word."""
        return self.control + PRODUCERS * WORD

    @property
    def total(self) -> int:
        """Bytes of the whole mailbox."""
        return -(-(self.error + WORD) // ALIGNMENT) * ALIGNMENT

    def slot(self, parity: int, rank: int, token: int = 0) -> int:
        """Offset of one row in the one-shot slots."""
        return parity * self.one_shot_parity + (rank * self.max_m + token) * self.row


@dataclass(frozen=True)
class ErrorWord:
    """What a poll that timed out left behind: 0 for nothing, else token and slot."""

    token: int
    slot: int

    # Slot numbers beyond the ranks' partials: of a second kind of partial, a normalised row, the
    # gather row. And the bit that tells any code from 0.
    SHARED: ClassVar[int] = 64
    NORMED: ClassVar[int] = 254
    GATHER: ClassVar[int] = 255
    FLAG: ClassVar[int] = 1 << 16

    @classmethod
    def of(cls, word: int) -> ErrorWord | None:
        """Decode the error word; None where no poll timed out."""
        if not word:
            return None
        return cls((word >> 8) & 0xFF, word & 0xFF)

    @property
    def word(self) -> int:
        """The encoding: never 0."""
        return self.FLAG | self.token << 8 | self.slot

    def sentence(self) -> str:
        """What happened, for people."""
        if self.slot in (self.NORMED, self.GATHER):
            what = "the gather row" if self.slot == self.GATHER else "the normalised row"
        elif self.slot >= self.SHARED:
            what = f"the shared expert's partial of rank {self.slot - self.SHARED}"
        else:
            what = f"the partial of rank {self.slot}"
        return (
            f"token {self.token}: {what} did not arrive in time; a rank has died or made other "
            "calls. Stop all ranks of the group, reset the mailboxes, and start again"
        )

"""The mailbox of the tail: latent and shared partials, normalised rows, finished rows.

One a rank and group, in symmetric memory. Sentinel, parities and the meaning of a call are those
of `kernels/common/mailbox.py`; a row has L = 3584 columns of the latent or H of the hidden state,
BF16.

    latent     [PARITIES][tp ranks][max_m tokens][L]        slot r: the routed partials of rank r
    shared     [PARITIES][tp ranks][max_m tokens][H / tp]   slot r: rank r's partials of my columns
    rows       [PARITIES][max_m tokens][H]                  the finished rows
    normed     [PARITIES][max_m tokens][L]                  the normalised latent rows
    control    [CTAS] pairs of 32-bit words (calls, tokens of the last call), then the error word

**One-shot**: rank r publishes its routed partial to latent slot r of every mailbox; every rank adds
the slots of its own mailbox and normalises for itself. **Two-shot**: token t's partials go to rank
t modulo tp alone, into the same slots there; that rank adds, normalises and publishes the row to
everybody's normed row. Sums, order and rounding are the same, so are the bits. Shared partials
always go to the rank that owns the columns, and finished columns from there to everybody's row.

**Call number.** CTA i of a grid of G reads pair i when its predecessor has ended and advances the
pairs i, i + G, i + 2 G, ...: all pairs agree after every call, whatever the grid.

**Arming.** The reader of a word of latent, shared or rows is one thread, which puts the sentinel
back. A normalised row has many readers, a CTA of each cluster for each word; so call c + 1 arms the
normed rows of call c, which is over on this rank then; the number of its rows is in the control
pair. Between calls everything is armed but the normed rows of the last call.

**What separates two uses of a parity.** Call c + 2 may write to what call c used:

1. b re-arms latent, shared and rows in its call c, at the reads, and normed in its call c + 1.
2. b's kernels run one after the other, each publishes only behind griddepcontrol.wait.
3. Call c + 1 is all-to-all: a's call c + 1 ends only when a has read columns of a finished row from
   every rank. b published those in its call c + 1, hence after its call c.
4. a publishes call c + 2 after its call c + 1 has ended. So what 1 re-arms in call c is armed.
5. A normed row of call c + 2 is written on b by b itself (one-shot), or by an owner that has read
   b's partial of call c + 2 (two-shot), which b published after its call c + 1. So it is armed.

Calls of both forms and of any M may follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.common.mailbox import ALIGNMENT, ELEMENT, HIDDEN, MAX_M, PARITIES, WORD

LATENT = 3584
CTAS = 112  # of the largest grid, each with a control pair of its own


@dataclass(frozen=True)
class TailMailbox:
    """Sizes and offsets, in bytes, of the mailbox of one rank in a group of `tp` ranks.

    hidden: columns of a finished row; each rank owns hidden / tp of them, a multiple of 8.
    """

    tp: int
    hidden: int = HIDDEN
    max_m: int = MAX_M

    def __post_init__(self) -> None:
        if self.tp < 1 or self.hidden % (8 * self.tp):
            raise ValueError(
                f"tp={self.tp}: the {self.hidden} columns must divide into 16-byte pieces for each "
                f"rank; use a multiple of {8 * self.tp} columns"
            )

    @property
    def latent_row(self) -> int:
        """Bytes of a latent row."""
        return LATENT * ELEMENT

    @property
    def row(self) -> int:
        """Bytes of a finished row."""
        return self.hidden * ELEMENT

    @property
    def part(self) -> int:
        """Bytes of the columns that one rank owns."""
        return self.row // self.tp

    @property
    def latent(self) -> int:
        """Offset of the latent slots."""
        return 0

    @property
    def latent_parity(self) -> int:
        """Bytes from one parity to the next; a slot is max_m rows."""
        return self.tp * self.max_m * self.latent_row

    @property
    def shared(self) -> int:
        """Offset of the shared slots."""
        return self.latent + PARITIES * self.latent_parity

    @property
    def shared_parity(self) -> int:
        """Bytes from one parity to the next; a slot is max_m parts."""
        return self.tp * self.max_m * self.part

    @property
    def rows(self) -> int:
        """Offset of the finished rows."""
        return self.shared + PARITIES * self.shared_parity

    @property
    def rows_parity(self) -> int:
        """Bytes from one parity to the next."""
        return self.max_m * self.row

    @property
    def normed(self) -> int:
        """Offset of the normalised rows."""
        return self.rows + PARITIES * self.rows_parity

    @property
    def normed_parity(self) -> int:
        """Bytes from one parity to the next."""
        return self.max_m * self.latent_row

    @property
    def data(self) -> int:
        """Bytes of everything that is armed with the sentinel."""
        return self.normed + PARITIES * self.normed_parity

    @property
    def control(self) -> int:
        """Offset of the control pairs; they are local, no peer touches them."""
        return self.data

    @property
    def error(self) -> int:
        """Offset of the sticky error word."""
        return self.control + CTAS * 2 * WORD

    @property
    def total(self) -> int:
        """Bytes of the whole mailbox."""
        return -(-(self.error + WORD) // ALIGNMENT) * ALIGNMENT

    def latent_at(self, call: int, rank: int, token: int = 0) -> int:
        """Offset of a routed partial in call number `call`."""
        slot = (rank * self.max_m + token) * self.latent_row
        return self.latent + call % PARITIES * self.latent_parity + slot

    def shared_at(self, call: int, rank: int, token: int = 0) -> int:
        """Offset of a shared partial's own columns in call number `call`."""
        slot = (rank * self.max_m + token) * self.part
        return self.shared + call % PARITIES * self.shared_parity + slot

    def row_at(self, call: int, token: int = 0) -> int:
        """Offset of a finished row in call number `call`."""
        return self.rows + call % PARITIES * self.rows_parity + token * self.row

    def normed_at(self, call: int, token: int = 0) -> int:
        """Offset of a normalised row in call number `call`."""
        return self.normed + call % PARITIES * self.normed_parity + token * self.latent_row

"""The mailbox between the router's two kernels: every rank's share of logits and latent.

The front kernel of each rank computes some columns of the logits and of the latent row and stores
them into the same place of every rank's mailbox; the route kernel polls its own mailbox until whole
rows are there, and arms them again. Rules, sentinel and parities are those of
`kernels/common/mailbox.py`; only the words differ:

- a logit is one FP32 word. The sentinel 0x80000000 is -0.0, so a publisher turns -0.0 into +0.0
  and leaves every other word, NaN included, as it is;
- the latent is in pairs of BF16, as a row of `kernels/common/mailbox.py` is: every -0.0 becomes
  +0.0, so no pair is the sentinel.

**Layout**, bytes from the mailbox's start:

    rows       [PARITIES][max_m tokens][E FP32 | L BF16]
    control    [PRODUCERS] 32-bit calls, then the error word, then the tokens that have been routed

**Call number.** Front CTA i of a grid of G reads counter i when its predecessor has ended and
stores that number plus one in the counters i, i + G, i + 2 G, ...: all of them advance by one in
every call, whatever the grid. The route kernel, which runs behind the front kernel, reads counter
0 less one. Parity = call modulo PARITIES.

**What separates two uses of a parity** is the argument of `kernels/common/mailbox.py`: route arms a
row in the call that polled it; a rank publishes call c + 1 only after its call c has ended; and a
rank's call c + 1 ends only after it has read words of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from k3fuse.kernels.common.mailbox import ELEMENT, MAX_M, WORD
from k3fuse.kernels.common.row_layout import RowLayout

EXPERTS = 896
LATENT = 3584
# CTAs of the largest front grid, each with a counter of its own.
PRODUCERS = 128


@dataclass(frozen=True)
class FrontMailbox(RowLayout):
    """Sizes and offsets, in bytes, of one rank's mailbox in a group of `tp` ranks.

    experts: logits of a row, each rank has experts / tp neighbouring ones. latent: columns of the
    latent row, 0 for none, likewise. A rank's columns are multiples of 4 there. Raises ValueError
    for others.
    """

    counters: ClassVar[int] = PRODUCERS
    own_words: ClassVar[int] = 1
    tp: int
    experts: int = EXPERTS
    latent: int = LATENT
    max_m: int = MAX_M

    def __post_init__(self) -> None:
        for name, columns in (("experts", self.experts), ("latent", self.latent)):
            if columns < 0 or self.tp < 1 or columns % (4 * self.tp):
                raise ValueError(
                    f"{name}={columns} with tp={self.tp}: each rank has a multiple of 4 columns; "
                    f"use a multiple of {4 * self.tp}"
                )

    @property
    def row(self) -> int:
        """Bytes of a token's row: logits, then latent."""
        return self.experts * WORD + self.latent * ELEMENT

    @property
    def latent_offset(self) -> int:
        """Offset of the latent in a row."""
        return self.experts * WORD

    @property
    def arrivals(self) -> int:
        """Offset of the word that counts a call's routed tokens: zero between calls."""
        return self.error + WORD

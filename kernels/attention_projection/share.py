"""Rows of weights that all ranks have alike, split over them, and the mailbox between. No DSL here.

Latent attention has 2112 rows (q_a and kv_a) on every rank. Row-sharded, rank r multiplies only the
r-th of tp equal shares of each weight's leading rows, and stores the results into every rank's
mailbox; the same launch then polls its own mailbox and copies whole rows to the outputs. Other rows
stay a rank's own and go straight to the outputs. Rules, sentinel and parities are those of
`kernels/common/mailbox.py`: words are pairs of BF16, every -0.0 is published as +0.0, so no pair is
the sentinel.

**Layout** of a mailbox, bytes from its start:

    rows       [PARITIES][max_m tokens][split columns of all weights] BF16
    control    [PRODUCERS] 32-bit calls, then the error word

**Call number.** CTA i of a grid of G reads counter i when its predecessor has ended, and stores
that number plus one in the counters i, i + G, i + 2 G, ... once all its threads have read it: all
counters advance by one in every call, whatever the grid. Parity = call modulo PARITIES.

**What separates two uses of a parity** is the argument of `kernels/common/mailbox.py`, with one
kernel a call: a rank arms a word in the call that polled it; it publishes call c + 1 only when its
call c has ended; and its call c + 1 ends only after it has read words of every rank.

**All CTAs have to be resident at once**: a CTA publishes all that it has before it polls, but the
others of its grid, on this rank and on the peers, must come to publish theirs. One wave of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from torch import Tensor

from k3fuse.kernels.attention_projection.config import CLUSTER, CLUSTERS
from k3fuse.kernels.common.mailbox import ELEMENT, MAX_M
from k3fuse.kernels.common.row_layout import RowLayout

# CTAs of the largest grid, each with a counter of its own.
PRODUCERS = CLUSTER * CLUSTERS
PIECE = 8  # columns that a thread polls and copies: 16 bytes
OWN = 4  # columns of a rank come in fours: eight bytes of one sender


@dataclass(frozen=True)
class RowMailbox(RowLayout):
    """Sizes and offsets, in bytes, of one rank's mailbox in a group of `tp` ranks.

    columns: of a published row, over all weights. Raises ValueError for columns that do not divide.
    """

    counters: ClassVar[int] = PRODUCERS
    tp: int
    columns: int
    max_m: int = MAX_M

    def __post_init__(self) -> None:
        if self.tp < 1 or self.columns < 1 or self.columns % (OWN * self.tp):
            raise ValueError(
                f"columns={self.columns} with tp={self.tp}: each rank has a multiple of {OWN} "
                f"columns; use a multiple of {OWN * self.tp}"
            )

    @property
    def row(self) -> int:
        """Bytes of a token's row."""
        return self.columns * ELEMENT


@dataclass(frozen=True)
class Part:
    """Rows of one weight that a rank multiplies, read in place.

    weight: its number. rows: of the part. start: its first row; split: whether that is the first of
    rank 0's share, and rank r's lies r shares behind it.
    """

    weight: int
    rows: int
    start: int
    split: bool

    def of(self, weight: Tensor, rank: int) -> Tensor:
        """The part of a weight [N, K] that rank `rank` reads, a view."""
        first = self.start + (rank * self.rows if self.split else 0)
        return weight[first : first + self.rows]


@dataclass(frozen=True)
class Share:
    """How the rows of all weights are shared out over `tp` ranks.

    rows: of each weight. split: the leading ones of each that all ranks have alike. multicast:
    publish through one multicast address, else through every rank's. timeout: rounds after which a
    poll gives up, 0 for none. max_m: tokens that the mailbox has room for.
    """

    tp: int
    rows: tuple[int, ...]
    split: tuple[int, ...]
    multicast: bool
    timeout: int = 0
    max_m: int = MAX_M

    @property
    def box(self) -> RowMailbox:
        """The mailbox's layout."""
        return RowMailbox(self.tp, sum(self.split), self.max_m)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first column of each weight in a published row, then the number of columns."""
        return (0, *accumulate(self.split))

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a rank multiplies: its shares of the split rows, then its own rows."""
        split = [Part(i, n // self.tp, 0, True) for i, n in enumerate(self.split) if n]
        pairs = enumerate(zip(self.rows, self.split, strict=True))
        own = [Part(i, n - first, first, False) for i, (n, first) in pairs if n > first]
        return (*split, *own)

    @property
    def published(self) -> int:
        """Parts that are published; they come first."""
        return sum(n > 0 for n in self.split)

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of the outputs' addresses, one a weight."""
        return tuple(f"out{i}" for i in range(len(self.rows)))

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the addresses that are published to."""
        if self.multicast:
            return ("multicast",)
        return tuple(f"mailbox{rank}" for rank in range(self.tp))

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of all addresses but those of x and of the weights, in order."""
        return (*self.outs, "mailbox", *self.targets)

    @property
    def name(self) -> str:
        """Readable and unique."""
        pairs = zip(self.rows, self.split, strict=True)
        parts = [f"tp{self.tp}", "n" + "_".join(f"{n}s{s}" if s else f"{n}" for n, s in pairs)]
        parts += ["multicast" if self.multicast else "peer"]
        parts += [f"timeout{self.timeout}"] if self.timeout else []
        parts += [f"rows{self.max_m}"] if self.max_m != MAX_M else []
        return "_".join(parts)

"""What an attention projection kernel is compiled for, and its parameters: the ABI. No DSL here.

The K columns are split over the CTAs of a cluster, the rows of W, in tiles, over clusters and the
warps of their CTAs. A warp multiplies its tile's part of K with all tokens while that part passes
through its registers once; the partial sums of a tile then meet in the CTAs that own its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

CLUSTER = 8  # parts of K
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds two clusters of 8 CTAs.
CLUSTERS = 16
TILE = 32  # rows of W, a warp's
OWNED = TILE // CLUSTER  # rows of a tile that one CTA of a cluster adds up and stores
BLOCK = 32  # columns of W: one 16-byte load a lane and row, two mma steps
GROUP = 8  # tokens of one mma
MAX_WEIGHTS = 8

ELEMENT = 2
# Shared memory that a CTA may have, on all the chips.
SHARED_LIMIT = 232_448
# Neighbouring rows of x are 64 bytes apart modulo 128, as `common/geometry.py` has it.
PAD = 64
HEADER = 128  # mbarriers: of x, then of each tile
MAX_SLOTS = HEADER // 8 - 1
# Up to 8 warps, two on each quarter of an SM, may have 255 registers a thread.
MAX_WARPS = 8
REGISTERS = 255
# Registers a thread beside the sums and the blocks of W that are under way; fewer spill.
SPARE = 36


@dataclass(frozen=True)
class Config:
    """One kernel. m: the most tokens. k: columns. rows: of each weight, one to eight."""

    m: int
    k: int
    rows: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Groups of 8 tokens."""
        return -(-self.m // GROUP)

    @property
    def tokens(self) -> int:
        """Tokens that shared memory has room for."""
        return self.groups * GROUP

    @property
    def columns(self) -> int:
        """Columns of a CTA."""
        return self.k // CLUSTER

    @property
    def blocks(self) -> int:
        """Blocks of a CTA's columns."""
        return self.columns // BLOCK

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first tile of each weight, then the number of tiles."""
        return (0, *accumulate(-(-rows // TILE) for rows in self.rows))

    @property
    def tiles(self) -> int:
        """Tiles of all weights; a tile lies in one weight."""
        return self.firsts[-1]

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return min(CLUSTERS, self.tiles)

    @property
    def slots(self) -> int:
        """The most tiles of a cluster: those numbered `slot * clusters + cluster`."""
        return -(-self.tiles // self.clusters)

    @property
    def passes(self) -> int:
        """Tiles of a warp, one after the other: slots `turn * warps + warp`."""
        return -(-self.slots // MAX_WARPS)

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return -(-self.slots // self.passes)

    @property
    def ring(self) -> int:
        """Blocks of W that a thread has under way, 16 registers each."""
        return min(self.blocks, (REGISTERS - SPARE - 8 * self.groups) // 16)

    @property
    def pitch(self) -> int:
        """Bytes of a row of x in shared memory."""
        return self.columns * ELEMENT + PAD

    @property
    def sums(self) -> int:
        """Offset of the partial sums [CLUSTER][slots][tokens][OWNED], FP32, behind the rows of x.

        First the columns' part, then the tile.
        """
        return HEADER + self.tokens * self.pitch

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.sums + CLUSTER * self.slots * self.tokens * OWNED * 4

    @property
    def weight_pointers(self) -> tuple[str, ...]:
        """Names of the weights' addresses."""
        return tuple(f"weight{i}" for i in range(len(self.rows)))

    @property
    def out_pointers(self) -> tuple[str, ...]:
        """Names of the outputs' addresses."""
        return tuple(f"out{i}" for i in range(len(self.rows)))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return ("x", *self.weight_pointers, *self.out_pointers)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters."""
        return ("m", "x_pitch")

    @property
    def name(self) -> str:
        """Readable and unique."""
        return f"m{self.m}_k{self.k}_n{'_'.join(map(str, self.rows))}"

"""How the weight-stationary GEMM divides its work; its code is `common/device/gemm.py`. No DSL.

The K columns are split over the CTAs of a cluster, the rows of W, in tiles, over clusters and the
warps of their CTAs. A warp multiplies its tile's part of K with all tokens while that part passes
through its registers once; the partial sums of a tile then meet in the CTAs that own its rows.

A tile has 32 rows, its owners are 8 CTAs with four rows each. A cluster of 8 has one set of owners,
a cluster of 16 two, which take turns: tile by tile the first or the last 8 CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 32  # rows of W, a warp's
OWNERS = 8  # CTAs that add up a tile's rows
OWNED = TILE // OWNERS  # rows that each of them adds up and stores
BLOCK = 32  # columns of W: one 16-byte load a lane and row, two mma steps
GROUP = 8  # tokens of one mma

ELEMENT = 2
# Shared memory that a CTA may have, on all the chips.
SHARED_LIMIT = 232_448
# Neighbouring rows of x are 64 bytes apart modulo 128, as `common/geometry.py` has it.
PAD = 64  # where the columns of a CTA are a multiple of 64
HEADER = 128  # mbarriers: of x, then of each tile that a CTA owns rows of
MAX_OWNED = HEADER // 8 - 1
CALL = HEADER - 8  # a word for the call's number, in kernels with fewer tiles
# Up to 8 warps, two on each quarter of an SM, may have 255 registers a thread.
MAX_WARPS = 8
REGISTERS = 255
# Registers a thread beside the sums and the blocks of W that are under way; fewer spill.
SPARE = 36


@dataclass(frozen=True)
class Geometry:
    """One grid. m: the most tokens. k: columns. tiles: of all weights.

    cluster: CTAs that split K, 8 or 16; clusters: of the grid, at most one a tile. lean: fewer
    instructions around the products, the bits are the same.
    """

    m: int
    k: int
    tiles: int
    clusters: int
    cluster: int = OWNERS
    lean: bool = False

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return self.cluster * self.clusters

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
        return self.k // self.cluster

    @property
    def blocks(self) -> int:
        """Blocks of a CTA's columns."""
        return self.columns // BLOCK

    @property
    def slots(self) -> int:
        """The most tiles of a cluster: those numbered `slot * clusters + cluster`."""
        return -(-self.tiles // self.clusters)

    @property
    def halves(self) -> int:
        """Sets of 8 owners in a cluster: slot s belongs to set s % halves."""
        return self.cluster // OWNERS

    @property
    def owned(self) -> int:
        """The most tiles that a CTA owns rows of."""
        return -(-self.slots // self.halves)

    @property
    def spread(self) -> bool:
        """Whether a token's four sums are added by four lanes: with 8 tokens that fills a warp."""
        return self.lean and self.tokens == GROUP

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
        """Offset of the partial sums [cluster][owned][tokens][OWNED], FP32, behind the rows of x.

        First the columns' part, then the tile.
        """
        return HEADER + self.tokens * self.pitch

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.sums + self.cluster * self.owned * self.tokens * OWNED * 4

    @property
    def fits(self) -> bool:
        """Whether barriers and shared memory are enough."""
        return self.owned <= MAX_OWNED and self.shared <= SHARED_LIMIT

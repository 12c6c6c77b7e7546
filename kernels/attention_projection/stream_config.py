"""What a stream kernel of the attention projection is compiled for: the ABI. No DSL here.

As in `config.py` the CTAs of a cluster split K. A CTA holds its columns of x in shared memory; the
rows of W pass by once, in tiles, through a ring of shared memory, and tcgen05 multiplies a tile
with all tokens. The sums of a tile lie in tensor memory, and then meet in the CTAs that own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

CLUSTER = 8  # parts of K
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds two clusters of 8 CTAs.
CLUSTERS = 16
MMA_ROWS = 128  # of one tcgen05.mma on one CTA
BLOCK = 64  # columns of a copy: 128 bytes, the widest swizzle
STEP = 16  # columns of one tcgen05.mma
ROW = 128  # bytes of a row of a block
EIGHT = 8  # rows of a swizzle pattern, tokens of a group
QUAD = 4  # tokens of one store between CTAs
MAX_WEIGHTS = 8
MAX_STAGES, MAX_EARLY = 14, 32
ELEMENT = 2

# Shared memory that a CTA may have on sm_100a and sm_103a.
SHARED_LIMIT = 232_448
HEADER = 1024  # mbarriers and the address in tensor memory; the ring is aligned to 1024 behind it
TENSOR_COLUMNS = 512
# 60 KB under way on each of 128 SMs are 7.9 MB: 8 TB/s for 1 us.
LEAST_BYTES = 60 * 1024
# Rows that a tile costs beside its own: it is waited for, sent and added up.
TILE_COST = 16

# Warps of a CTA. Four on the four quarters of tensor memory read it.
WEIGHTS, PRODUCT, TOKENS, SPARE, FIRST_READER = 0, 1, 2, 3, 4
READERS = 4
WARPS = FIRST_READER + READERS


@dataclass(frozen=True)
class StreamConfig:
    """One kernel. m: the most tokens. k: columns. rows: of each weight, one to eight.

    most_clusters, most_stages, most_early: limits below what the chip has room for.
    """

    m: int
    k: int
    rows: tuple[int, ...]
    most_clusters: int = CLUSTERS
    most_stages: int = MAX_STAGES
    most_early: int = MAX_EARLY

    @property
    def tokens(self) -> int:
        """Tokens of a product, a multiple of 8."""
        return -(-self.m // EIGHT) * EIGHT

    @property
    def columns(self) -> int:
        """Columns of a CTA."""
        return self.k // CLUSTER

    @property
    def blocks(self) -> int:
        """Blocks of a CTA's columns."""
        return self.columns // BLOCK

    @cached_property
    def tile(self) -> int:
        """Rows of a tile, a multiple of 8: those that share out the rows most evenly."""

        def cost(tile: int) -> tuple[int, int]:
            tiles = sum(-(-rows // tile) for rows in self.rows)
            slots = -(-tiles // min(self.most_clusters, tiles))
            return slots * (tile + TILE_COST), slots

        return min(range(MMA_ROWS, MMA_ROWS // 2 - 1, -EIGHT), key=cost)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first tile of each weight, then the number of tiles."""
        return (0, *accumulate(-(-rows // self.tile) for rows in self.rows))

    @property
    def tiles(self) -> int:
        """Tiles of all weights; a tile lies in one weight."""
        return self.firsts[-1]

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return min(self.most_clusters, self.tiles)

    @property
    def slots(self) -> int:
        """The most tiles of a cluster: those numbered `slot * clusters + cluster`."""
        return -(-self.tiles // self.clusters)

    @property
    def owned(self) -> int:
        """Rows of a tile that one CTA of a cluster adds up and stores, an even number."""
        return 2 * -(-self.tile // (2 * CLUSTER))

    @property
    def steps(self) -> int:
        """Blocks of W that pass through the ring."""
        return self.slots * self.blocks

    @property
    def stage(self) -> int:
        """Bytes of a place of the ring; the rows beyond a tile's stay zero."""
        return MMA_ROWS * ROW

    @property
    def x_block(self) -> int:
        """Bytes of a block of x."""
        return self.tokens * ROW

    @property
    def x_bytes(self) -> int:
        """Bytes of the columns of x."""
        return self.blocks * self.x_block

    @property
    def exchange(self) -> int:
        """Bytes of the sums of a slot, [CLUSTER][tokens / 4][owned][4], FP32."""
        return CLUSTER * self.tokens * self.owned * 4

    @cached_property
    def early(self) -> int:
        """Slots whose sums have a place of their own. Those of the others replace x at the end."""
        for early in range(min(self.slots, self.most_early), 0, -1):
            stages = (SHARED_LIMIT - HEADER - self.x_bytes - early * self.exchange) // self.stage
            late = (self.slots - early) * self.exchange
            if late <= self.x_bytes and stages * self.tile * ROW >= LEAST_BYTES:
                return early
        return 0

    @property
    def stages(self) -> int:
        """Blocks of W under way."""
        room = SHARED_LIMIT - HEADER - self.x_bytes - self.early * self.exchange
        return min(self.steps, self.most_stages, room // self.stage)

    @property
    def x_place(self) -> int:
        """Offset of x [blocks][tokens][64], each block swizzled, behind the ring."""
        return HEADER + self.stages * self.stage

    def sums_place(self, slot: int) -> int:
        """Offset of the sums of a slot."""
        if slot < self.early:
            return self.x_place + self.x_bytes + slot * self.exchange
        return self.x_place + (slot - self.early) * self.exchange

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.x_place + self.x_bytes + self.early * self.exchange

    @property
    def fits(self) -> bool:
        """Whether shared memory, mbarriers and tensor memory hold it."""
        return (
            self.stages >= 1
            and (self.slots - self.early) * self.exchange <= self.x_bytes
            and self.barriers * 8 + 8 <= HEADER
            and self.slots * self.tokens <= TENSOR_COLUMNS
        )

    # mbarriers, by number: full and empty places of the ring, blocks of x, products of a slot,
    # sums of a slot, the end of all products of the cluster.

    def full(self, stage: int) -> int:
        """Offset of the mbarrier of a place that has been filled."""
        return 8 * stage

    def empty(self, stage: int) -> int:
        """Offset of the mbarrier of a place that has been read."""
        return 8 * (self.stages + stage)

    def arrived(self, block: int) -> int:
        """Offset of the mbarrier of a block of x."""
        return 8 * (2 * self.stages + block)

    def product(self, slot: int) -> int:
        """Offset of the mbarrier of a slot's product."""
        return 8 * (2 * self.stages + self.blocks + slot)

    def sums(self, slot: int) -> int:
        """Offset of the mbarrier of a slot's sums."""
        return 8 * (2 * self.stages + self.blocks + self.slots + slot)

    @property
    def done(self) -> int:
        """Offset of the mbarrier of the cluster's last products."""
        return 8 * (2 * self.stages + self.blocks + 2 * self.slots)

    @property
    def barriers(self) -> int:
        """mbarriers."""
        return self.done // 8 + 1

    @property
    def held(self) -> int:
        """Offset of the address in tensor memory."""
        return 8 * self.barriers

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory: a power of two from 32 on."""
        return max(32, 1 << (self.slots * self.tokens - 1).bit_length())

    @property
    def weight_maps(self) -> tuple[str, ...]:
        """Names of the weights' tensor maps."""
        return tuple(f"weight{i}" for i in range(len(self.rows)))

    @property
    def out_pointers(self) -> tuple[str, ...]:
        """Names of the outputs' addresses."""
        return tuple(f"out{i}" for i in range(len(self.rows)))

    @property
    def less(self) -> str:
        """The limits below what the chip has room for, as a name has them."""
        limits = (
            ("c", self.most_clusters, CLUSTERS),
            ("s", self.most_stages, MAX_STAGES),
            ("e", self.most_early, MAX_EARLY),
        )
        return "".join(f"_{key}{value}" for key, value, whole in limits if value != whole)

    @property
    def name(self) -> str:
        """Readable and unique."""
        return f"stream_m{self.m}_k{self.k}_n{'_'.join(map(str, self.rows))}{self.less}"

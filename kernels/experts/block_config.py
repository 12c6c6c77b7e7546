"""What a block-scaled experts kernel is compiled for: shared and tensor memory. No DSL here.

The units, entries, order of slots and scratch counts are those of `config.py`. What differs: a
product is one of tcgen05 with block scales, 128 rows of W with all tokens of an entry. W comes by
tensor map, which spreads 16 values of 4 bits over 16 bytes; x was rounded to MXFP8 once, by the
cluster or by whoever gives it (mxfp8), and its rows come by tensor map beside the weights of the
same columns.

FC1: CTA r has an eighth of the expert's width, gate rows and up rows in one tile. Where they take
at most 64 rows, the columns of two neighbouring blocks lie in one tile, one above the other, and
the tokens' rows of both blocks are the columns of the product: two of its quarters are sums.

FC2: a line is one row of W, or two neighbours where a row is no multiple of 128 values. CTA r has
an eighth of the latent row, in tiles of lines. Two rows of a line have sums of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from k3fuse.kernels.common.tensor_map import TileMap
from k3fuse.kernels.experts.config import (
    BINS,
    BLOCK,
    SHARED_LIMIT,
    UNIT,
    Config,
    aligned,
)

MMA_ROWS = 128
SPAN = 128  # values of K in a copy: 128 bytes of shared memory, the swizzle
STEP = 32  # values of K of one product, which share a scale
STEPS = SPAN // STEP
HALF = MMA_ROWS // 2  # rows from one half of a tile to the next
PIECE = 512  # bytes of the scales of 128 rows and 128 columns: 32 lines of four words
TILE_BYTES = MMA_ROWS * SPAN
MOST_STAGES = 12
TENSOR_COLUMNS = 512
SCALE_COLUMNS = 4  # of tensor memory for one piece
MAP_ALIGNMENT = 32  # of weights: tensor maps of 4-bit values that are spread
MAX_WIDTH = HALF  # columns of the hidden row of a CTA
MOST_BLOCKS = 32  # words of scales of a row of x, one a lane
ROW_PITCH = 48  # bytes of eight sums of a row, so that 8 rows lie in all banks
BLOCK_PITCH = 4 * (BLOCK + 1) * UNIT  # bytes of 32 columns of 8 tokens, for the same reason

# Warps: four read tensor memory, one multiplies, two arrange scales, the last one fetches.
READERS, PRODUCT, SCALES, SCALE_WARPS, FETCH = 4, 4, 5, 2, 7
READER_THREADS = 32 * READERS
SCALE_THREADS = 32 * SCALE_WARPS


def fits_block(latent: int, inter: int) -> bool:
    """Whether the engine covers an expert of this size, in the checkpoint's order."""
    width = inter // 8
    return inter % 64 == 0 and width <= MAX_WIDTH and latent % SPAN == 0


@dataclass(frozen=True)
class BlockConfig(Config):
    """One kernel; the fields are those of `Config`."""

    @property
    def blocks(self) -> int:
        """Blocks of 128 columns of FC1."""
        return self.latent // SPAN

    @property
    def halves(self) -> int:
        """Blocks of FC1 that lie in one tile."""
        return 2 if 2 * self.width <= HALF and self.blocks % 2 == 0 else 1

    @property
    def stages1(self) -> int:
        """Stages of FC1 of one entry."""
        return self.blocks // self.halves

    @property
    def columns1(self) -> int:
        """Columns of a product of FC1: tokens, for each half."""
        return self.tokens * self.halves

    @property
    def box1(self) -> int:
        """Rows of a box of FC1, of which a tile has one for gate and one for up."""
        return self.width

    @property
    def line_rows(self) -> int:
        """Rows of W2 in a line."""
        return 1 if self.inter % SPAN == 0 else 2

    @property
    def line(self) -> int:
        """Values of a line."""
        return self.inter * self.line_rows

    @property
    def steps(self) -> int:
        """Products of FC2 that add up to one row."""
        return self.inter // STEP

    @property
    def lines(self) -> int:
        """Lines of a CTA."""
        return self.rows2 // self.line_rows

    @cached_property
    def tiles2(self) -> int:
        """Tiles of FC2 of a CTA, all with the same number of lines, a multiple of 8."""
        return next(
            n for n in range(1, self.lines + 1)
            if self.lines % n == 0 and self.lines // n <= MMA_ROWS and self.lines // n % 8 == 0
        )  # fmt: skip

    @property
    def tile_lines(self) -> int:
        """Lines of a tile."""
        return self.lines // self.tiles2

    @property
    def tile_stages(self) -> int:
        """Stages of a tile of FC2."""
        return self.line // SPAN

    @property
    def stages2(self) -> int:
        """Stages of FC2 of one entry."""
        return self.tiles2 * self.tile_stages

    @property
    def rounds(self) -> int:
        """Parts of FC2 that are waited for one by one: tiles."""
        return self.tiles2

    @property
    def blocks8(self) -> int:
        """Blocks of 128 columns of a hidden row, the last one perhaps half full."""
        return -(-self.inter // SPAN)

    @property
    def passes(self) -> int:
        """Times that a warp adds up two columns a lane."""
        return -(-self.tiles2 * self.line_rows // 2)

    # The ring: a tile of W, then rows of x.

    @property
    def shared_columns(self) -> int:
        """Columns of a stage of the shared expert."""
        return 96

    @property
    def stage(self) -> int:
        """Bytes of a stage, a multiple of 1024."""
        both = TILE_BYTES + self.columns1 * SPAN
        return max(both, -(-self.shared_bytes // 1024) * 1024)

    @property
    def bytes1(self) -> int:
        """Bytes of weights in a stage of FC1."""
        return 2 * self.width * self.halves * SPAN // 2

    @property
    def bytes2(self) -> int:
        """Bytes of a stage of FC2."""
        return self.tile_lines * SPAN // 2

    # mbarriers. Stages of the shared expert and those of the experts have barriers of their own.

    @property
    def full(self) -> int:
        """A stage of the shared expert is there."""
        return 0

    @property
    def empty(self) -> int:
        """A stage of the shared expert has been read."""
        return 8 * MOST_STAGES

    @property
    def there(self) -> int:
        """A stage of an expert is there."""
        return 16 * MOST_STAGES

    @property
    def taken(self) -> int:
        """A stage of an expert has been multiplied."""
        return 24 * MOST_STAGES

    @property
    def product1(self) -> int:
        """FC1 of an entry is done."""
        return 32 * MOST_STAGES

    @property
    def read1(self) -> int:
        """The sums of FC1 have been read."""
        return self.product1 + 8

    @property
    def scales1_there(self) -> int:
        """The scales of FC1 are arranged."""
        return self.product1 + 16

    @property
    def scales2_there(self) -> int:
        """The scales of FC2 are arranged."""
        return self.product1 + 24

    @property
    def hidden_there(self) -> int:
        """The hidden rows of an entry are MXFP8."""
        return self.product1 + 32

    @property
    def arrived(self) -> int:
        """The hidden rows of a unit have come from the whole cluster."""
        return self.product1 + 40

    @property
    def free(self) -> int:
        """All CTAs have read the hidden rows of a unit."""
        return self.product1 + 48

    @property
    def product2(self) -> int:
        """Barriers: a round of FC2 is done."""
        return self.product1 + 56

    @property
    def held(self) -> int:
        """The address in tensor memory."""
        return self.product2 + 8 * self.rounds

    @property
    def totals(self) -> int:
        """Totals of the sort, a word a warp."""
        return self.held + 16

    @property
    def order(self) -> int:
        """Words: the pairs sorted by expert."""
        return aligned(self.totals + 32)

    @property
    def list(self) -> int:
        """This cluster's entries."""
        return aligned(self.order + 4 * self.pairs)

    @property
    def sums(self) -> int:
        """Sums of FC1 of a unit, FP32 [128][8], rows `ROW_PITCH` apart."""
        return aligned(self.list + 16 * self.entries)

    @property
    def bins(self) -> int:
        """Words of the sort, before there are sums."""
        return self.sums

    @property
    def rows(self) -> int:
        """Hidden rows of a unit from the whole cluster, FP32 [inter / 32][32 + 1][8]."""
        return aligned(self.sums + max(MMA_ROWS * ROW_PITCH, 4 * BINS))

    @property
    def hidden_rows(self) -> int:
        """Where the sort puts pairs in any order, before there are rows."""
        return self.rows

    @property
    def first_scales(self) -> int:
        """Scales of W in FC1, a piece a stage."""
        return aligned(self.rows + max(self.blocks2 * BLOCK_PITCH, 4 * self.pairs))

    @property
    def token_scales(self) -> int:
        """Scales of x in FC1, a piece a stage."""
        return self.first_scales + self.stages1 * PIECE

    @property
    def second_scales(self) -> int:
        """Scales of W in FC2, a piece a stage."""
        return self.token_scales + self.stages1 * PIECE

    @property
    def second_bytes(self) -> int:
        """Bytes of the scales of W in FC2."""
        return self.stages2 * PIECE

    @property
    def hidden_scales(self) -> int:
        """Scales of the hidden rows, a piece for 128 columns."""
        return self.second_scales + self.second_bytes

    @property
    def hidden8(self) -> int:
        """Hidden rows in MXFP8, [blocks8][tokens][128] in the swizzle."""
        return -(-(self.hidden_scales + self.blocks8 * PIECE) // 1024) * 1024

    @property
    def ring(self) -> int:
        """The stages."""
        return self.hidden8 + self.blocks8 * self.tokens * SPAN

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(MOST_STAGES, (SHARED_LIMIT - self.ring) // self.stage)

    @property
    def filled_rows(self) -> int:
        """Rows of a place of the ring that are filled before its first product."""
        return min(self.tile_lines, 2 * self.width)

    @property
    def unfilled(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what products read and nobody may have filled: scales and hidden rows,
        and of each stage the rows that the smallest tile leaves, and those of tokens."""
        low = self.filled_rows * SPAN
        size = TILE_BYTES - low + self.columns1 * SPAN
        tiles = ((self.ring + slot * self.stage + low, size) for slot in range(self.stages))
        return ((self.first_scales, self.ring - self.first_scales), *tiles)

    # Columns of tensor memory: sums of FC1, sums of FC2, scales.

    @property
    def tensor2(self) -> int:
        """Sums of FC2, `tokens` for each tile and row of a line."""
        return self.columns1

    @property
    def tensor_scales(self) -> int:
        """Scales of W and of x, of each place of the ring."""
        used = self.columns1 + self.tiles2 * self.line_rows * self.tokens
        return padded4(used)

    @property
    def tensor_hidden(self) -> int:
        """Scales of the hidden rows."""
        return self.tensor_scales + self.stages * 2 * SCALE_COLUMNS

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory: a power of two from 32 on."""
        used = self.tensor_hidden + self.blocks8 * SCALE_COLUMNS
        return max(32, 1 << (used - 1).bit_length())

    @property
    def fits(self) -> bool:
        """Whether shared and tensor memory hold it, and the first entry's FC1 reaches all places
        of the ring that the shared expert has used."""
        reached = min(self.stages, self.shared_stages) <= self.stages1
        return self.stages >= 2 and reached and self.tensor_columns <= TENSOR_COLUMNS

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the tensor maps, the first parameters."""
        return ("w13", "w2", "x8_tiles")

    def tiles(self, name: str, experts: int) -> TileMap:
        """A tensor map, with rows for that many experts; with mxfp8 that many rows of x."""
        if name == "w13":
            rows, box = experts * 2 * self.stored, (SPAN, self.box1)
            return TileMap("u4_padded", (self.latent, rows), (self.latent // 2,), box, SPAN)
        if name == "w2":
            rows, box = experts * self.latent // self.line_rows, (SPAN, self.tile_lines)
            return TileMap("u4_padded", (self.line, rows), (self.line // 2,), box, SPAN)
        rows = experts if self.mxfp8 else self.clusters * self.m
        return TileMap("u8", (self.latent, rows), (self.latent,), (SPAN, 1), SPAN)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of the address parameters in order, behind the maps."""
        x, made = (("x",), ("x8",)) if not self.mxfp8 else ((), ())
        routed = (*x, "ids", "weights", "w13_scale", "w2_scale", *made, "x8_scale")
        scratch = ("rows", "arrivals", "routed")
        shared = ("shared_x", "shared_down", "shared_out") if self.shared else ()
        return (*routed, *scratch, *shared)

    @property
    def name(self) -> str:
        """Readable and unique."""
        return f"block_{super().name}"


def padded4(columns: int) -> int:
    """The least multiple of four from `columns` on."""
    return -(-columns // SCALE_COLUMNS) * SCALE_COLUMNS


def shared_uses(config: Config, slot: int) -> int:
    """Stages of the shared expert that pass through a place of the ring."""
    return len(range(slot, config.shared_stages, config.stages))

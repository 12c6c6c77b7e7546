"""What an experts kernel is compiled for, its parameters and its shared memory. No DSL here.

A cluster of eight CTAs takes one expert after the other: the entries of a list that every CTA
makes from the ids. An entry is an expert and up to `tokens` (token, slot) pairs, eight to a unit.
CTA r of the cluster owns an eighth of the expert's width in FC1 and an eighth of the latent row in
FC2. Weights come through a ring of stages; seven warps multiply, an eighth one fetches.
"""

from __future__ import annotations

from dataclasses import dataclass

CLUSTER = 8
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds two clusters of 8 CTAs.
CLUSTERS = 16
WARPS = 7  # that multiply
THREADS = 32 * (WARPS + 1)
UNIT = 8  # tokens of one mma
BLOCK = 32  # columns that share a scale
TOP_K = 16
BINS = 1024  # of the sort by expert: one for each expert, the last one for ids out of range
NONE = BINS - 1
MAX_EXPERTS = 1023

COLUMNS = 8  # of the hidden row in a tile of FC1: their gate and up rows are its 16 rows
TILE = 16  # rows of W in an mma
SHARED_ROWS = 8 * WARPS  # rows of the shared expert that a CTA owns
SHARED_LIMIT = 232_448  # bytes that a CTA may have, on all the chips
MAX_STAGES = 6


# Shuffled scales: a piece has 128 rows and 4 blocks; line l holds rows l, l + 32, l + 64, l + 96.
PIECE = 512
HALF_PIECE = PIECE // 2
GROUP = 32  # rows among which rows are shuffled
MIN_STORED = 256  # vLLM pads narrower experts for its TRTLLM kernels


def stored_width(inter: int) -> int:
    """Width of a shuffled expert as it is stored."""
    return max(inter, MIN_STORED)


def padded(size: int, rest: int) -> int:
    """The least number of bytes from `size` on that is `rest` modulo 128."""
    return size + (rest - size) % 128


def aligned(size: int) -> int:
    """The least multiple of 128 from `size` on."""
    return padded(size, 0)


@dataclass(frozen=True)
class Config:
    """One kernel.

    m: the most tokens. latent: columns of a token's row. inter: width of an expert on this rank.
    hidden, shared: rows and columns of the shared expert's down-projection, 0 for none. top_k:
    slots of a token. clusters: of the grid. floor: the hidden row's scale follows the floor rule.
    float_weights: routing weights are FP32, else BF16. wide_ids: ids are 64 bits wide, else 32.
    shuffled: weights lie as `layouts.py` has them. mxfp8: rows come as E4M3 and E8M0, else in BF16,
    and the kernel rounds them itself. packed: f32x2 arithmetic.
    """

    m: int
    latent: int
    inter: int
    hidden: int
    shared: int
    top_k: int
    clusters: int
    floor: bool
    float_weights: bool
    wide_ids: bool
    shuffled: bool
    mxfp8: bool
    packed: bool

    @property
    def tokens(self) -> int:
        """Pairs of one entry: a multiple of 8."""
        return -(-self.m // UNIT) * UNIT

    @property
    def pairs(self) -> int:
        """The most (token, slot) pairs."""
        return self.m * self.top_k

    @property
    def entries(self) -> int:
        """The most entries of one cluster."""
        return -(-self.pairs // self.clusters)

    @property
    def width(self) -> int:
        """Columns of the hidden row that one CTA owns."""
        return self.inter // CLUSTER

    @property
    def tiles1(self) -> int:
        """Tiles of FC1 of one CTA, one a stage."""
        return self.width // COLUMNS

    @property
    def blocks1(self) -> int:
        """Blocks of FC1's columns that one warp has."""
        return self.latent // WARPS // BLOCK

    @property
    def blocks2(self) -> int:
        """Blocks of FC2's columns."""
        return self.inter // BLOCK

    @property
    def rows2(self) -> int:
        """Rows of FC2 of one CTA."""
        return self.latent // CLUSTER

    @property
    def runs(self) -> int:
        """Tiles of FC2 of one warp: run u of warp w is the 16 rows from 16 (7 u + w) on."""
        return self.rows2 // (TILE * WARPS)

    @property
    def passes(self) -> int:
        """Times that a warp adds up two columns a lane."""
        return 1

    @property
    def pitch1(self) -> int:
        """Bytes of a row of FC1 in a stage: 8 rows' words of one column lie in 32 banks."""
        return padded(self.latent // 2, 16)

    @property
    def scales1(self) -> int:
        """Bytes of the scales of a row of FC1."""
        return self.latent // BLOCK

    @property
    def stored(self) -> int:
        """Width of an expert as its weights are stored."""
        return stored_width(self.inter) if self.shuffled else self.inter

    @property
    def scale_bytes1(self) -> int:
        """Bytes of the scales in a stage of FC1.

        Shuffled: 16 of the 32 lines of each piece of 128 rows and 4 blocks, a quarter of them used.
        """
        return self.scales1 // 4 * HALF_PIECE if self.shuffled else TILE * self.scales1

    @property
    def bytes1(self) -> int:
        """Bytes of a stage of FC1: 16 rows, then their scales."""
        return TILE * self.pitch1 + self.scale_bytes1

    @property
    def each2(self) -> int:
        """Tiles of FC2 that one warp has in a stage: as many as fit a stage of FC1's size."""
        fits = [n for n in range(1, self.runs + 1) if self.runs % n == 0]
        return max(n for n in fits if n == 1 or self.bytes2_of(n * TILE * WARPS) <= self.bytes1)

    @property
    def stage_rows2(self) -> int:
        """Rows of a stage of FC2."""
        return self.each2 * TILE * WARPS

    @property
    def stages2(self) -> int:
        """Stages of FC2 of one entry."""
        return self.runs // self.each2

    @property
    def group2(self) -> int:
        """Bytes of the shuffled scales of 128 rows of FC2: pieces of 4 blocks."""
        return self.stored // BLOCK // 4 * PIECE

    def spans2(self, rows: int) -> int:
        """The most groups of 128 rows that `rows` neighbours lie in, from a multiple of 16 on."""
        return (rows + 111) // 128 + 1

    def bytes2_of(self, rows: int) -> int:
        """Bytes of `rows` rows of FC2 and their scales."""
        scales = self.spans2(rows) * self.group2 if self.shuffled else rows * self.blocks2
        return rows * self.inter // 2 + scales

    @property
    def bytes2(self) -> int:
        """Bytes of a stage of FC2: rows, then their scales."""
        return self.bytes2_of(self.stage_rows2)

    @property
    def shared_columns(self) -> int:
        """Columns of a stage of the shared expert: fewer where many tokens come along."""
        return 192 if self.m <= UNIT else 96

    @property
    def shared_pitch(self) -> int:
        """Bytes of a row in a stage of the shared expert: rows 64 bytes apart modulo 128."""
        return padded(2 * self.shared_columns, 64)

    @property
    def shared_stages(self) -> int:
        """Stages of the shared expert's down-projection."""
        return self.shared // self.shared_columns

    @property
    def shared_bytes(self) -> int:
        """Bytes of a stage of the shared expert: rows of W, then rows of x."""
        return (SHARED_ROWS + self.m) * self.shared_pitch if self.shared else 0

    @property
    def stage(self) -> int:
        """Bytes from one stage of the ring to the next."""
        return aligned(max(self.bytes1, self.bytes2, self.shared_bytes))

    # Offsets in shared memory. The first 256 bytes: mbarriers (stages full, stages empty, four of
    # the exchange), then the warps' totals of the sort.

    @property
    def full(self) -> int:
        """Barriers: a stage is there."""
        return 0

    @property
    def empty(self) -> int:
        """Barriers: a stage may be filled."""
        return 8 * MAX_STAGES

    @property
    def arrived(self) -> int:
        """Two barriers: the hidden rows of a unit are there."""
        return 16 * MAX_STAGES

    @property
    def free(self) -> int:
        """Two barriers: all CTAs have read the hidden rows of a unit."""
        return 16 * MAX_STAGES + 16

    @property
    def totals(self) -> int:
        """Totals of the sort, a word a warp."""
        return 16 * MAX_STAGES + 32

    @property
    def bins(self) -> int:
        """Words: pairs of each expert, then its first pair."""
        return 256

    @property
    def order(self) -> int:
        """Words: the pairs sorted by expert, token * top_k + slot."""
        return self.bins + 4 * BINS

    @property
    def list(self) -> int:
        """This cluster's entries, 16 bytes: expert, first pair, number of pairs."""
        return aligned(self.order + 4 * self.pairs)

    @property
    def own(self) -> int:
        """This CTA's columns of the hidden rows, FP32 [unit][width][8]."""
        return aligned(self.list + 16 * self.entries)

    @property
    def sums(self) -> int:
        """Partial sums of FC1, FP32 [warp][tile][lane][4]."""
        return aligned(self.own + 4 * self.width * self.tokens)

    @property
    def sums_tile(self) -> int:
        """Bytes of the partial sums of one tile."""
        return 512

    @property
    def rows(self) -> int:
        """Hidden rows of one unit from the whole cluster, FP32 [2][inter][8]."""
        return self.sums + WARPS * self.tiles1 * self.sums_tile

    @property
    def rows_bytes(self) -> int:
        """Bytes of one of the two."""
        return self.inter * UNIT * 4

    @property
    def hidden_pitch(self) -> int:
        """Bytes of a hidden row in BF16."""
        return padded(2 * self.inter, 64)

    @property
    def hidden_rows(self) -> int:
        """Hidden rows after MXFP8, in BF16."""
        return self.rows + 2 * self.rows_bytes

    @property
    def ring(self) -> int:
        """The stages."""
        return aligned(self.hidden_rows + self.tokens * self.hidden_pitch)

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(MAX_STAGES, (SHARED_LIMIT - self.ring) // self.stage)

    @property
    def fits(self) -> bool:
        """Whether there is room for two stages, the least."""
        return self.stages >= 2

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory."""
        return self.ring + self.stages * self.stage

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of the address parameters in order."""
        x = ("x", "x_scale") if self.mxfp8 else ("x",)
        routed = (*x, "ids", "weights", "w13", "w13_scale", "w2", "w2_scale")
        scratch = ("rows", "arrivals", "routed")
        shared = ("shared_x", "shared_down", "shared_out") if self.shared else ()
        return (*routed, *scratch, *shared)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; the betas are the bits of FP32."""
        shared = ("shared_pitch",) if self.shared else ()
        pitch = () if self.mxfp8 else ("x_pitch",)
        return ("m", "experts", *pitch, "beta", "linear_beta", *shared)

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = [f"m{self.m}_l{self.latent}_i{self.inter}"]
        parts += [f"h{self.hidden}_s{self.shared}"] if self.shared else []
        parts += [f"k{self.top_k}"] if self.top_k != TOP_K else []
        parts += [f"c{self.clusters}"] if self.clusters != CLUSTERS else []
        parts += ["floor"] if self.floor else []
        parts += ["fp32"] if self.float_weights else []
        parts += [] if self.wide_ids else ["ids32"]
        parts += ["shuffled"] if self.shuffled else []
        parts += ["mxfp8"] if self.mxfp8 else []
        return "_".join(parts)

"""The block-scaled kernel on weights as `layouts.py` has them. No DSL here.

Rows are shuffled within 32, so any 16 neighbours that start at a multiple of 16 are a closed set:
eight columns' up and gate rows of w13, and eight pairs of neighbouring columns of w2. Tiles are
neighbours as they are stored; what a row is comes in where its sum is used.

FC1: CTA r has the stored rows from 2 width r on, which are `width` columns' up and gate rows.
Scales come word by word, because a CTA's rows begin within a piece of 128.

FC2: a tile is a piece of scales, 128 rows; at both ends of a CTA's rows a part of one. Pieces go
to shared memory as they are, a CTA's in one copy, with those of its neighbours' rows in the first
and the last one. The last columns of a row, where they fill half a block, lie beside padding that a
tensor map would read; they come 8 bytes a lane, two tiles' in one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from k3fuse.kernels.common.tensor_map import TileMap
from k3fuse.kernels.experts.block_config import (
    MMA_ROWS,
    PIECE,
    SPAN,
    STEPS,
    BlockConfig,
)
from k3fuse.kernels.experts.config import CLUSTER, GROUP, stored_width

LANE_BYTES = 8  # of a copy by one lane: 16 values, which take 16 bytes of shared memory
ROW_LANES = 4  # lanes that copy the last columns of a row


def fits_shuffled(latent: int, inter: int) -> bool:
    """Whether a warp has whole groups of 32 rows of FC2, and a row a block of 128 columns."""
    return latent % (CLUSTER * GROUP) == 0 and inter >= SPAN and stored_width(inter) % SPAN == 0


@dataclass(frozen=True)
class ShuffledBlockConfig(BlockConfig):
    """One kernel; the fields are those of `Config`, and `shuffled` is set."""

    # FC1: one box of a CTA's rows.

    @property
    def box1(self) -> int:
        """Rows of a box of FC1: all of a CTA's."""
        return 2 * self.width

    @property
    def words1(self) -> int:
        """Words of scales of a line of a block of FC1: rows l, l + 32, ... of the tile."""
        return -(-2 * self.width // GROUP)

    # FC2: tiles are pieces of 128 rows. A round is as many as share a stage: one, or two.

    @property
    def line_rows(self) -> int:
        """Rows of W2 in a line."""
        return 1

    @property
    def whole2(self) -> int:
        """Blocks of 128 columns of a row of FC2 that are full."""
        return self.inter // SPAN

    @property
    def ends(self) -> bool:
        """Whether a row ends in half a block."""
        return self.inter % SPAN != 0

    @property
    def end_steps(self) -> int:
        """Products of half a block."""
        return self.steps % STEPS

    @property
    def pieces2(self) -> int:
        """Pieces of scales of a tile, one for 128 columns as they are stored."""
        return self.stored // SPAN

    def first_tile(self, part: int) -> int:
        """The first piece of 128 rows of the expert that CTA `part` has rows of."""
        return part * self.rows2 // MMA_ROWS

    def whole_tile(self, tile: int) -> bool:
        """Whether every CTA has all rows of its tile number `tile`."""
        for part in range(CLUSTER):
            first = (self.first_tile(part) + tile) * MMA_ROWS
            start = part * self.rows2
            if first < start or first + MMA_ROWS > start + self.rows2:
                return False
        return True

    @property
    def round_tiles(self) -> int:
        """Tiles of a round."""
        return 2 if self.ends else 1

    @property
    def rounds(self) -> int:
        """Rounds of FC2 of an entry, for the CTA with the most tiles."""
        most = max(
            (part * self.rows2 + self.rows2 - 1) // MMA_ROWS - self.first_tile(part) + 1
            for part in range(CLUSTER)
        )
        return -(-most // self.round_tiles)

    @cached_property
    def tiles2(self) -> int:
        """Tiles of FC2 of a CTA; some have no rows of some CTAs."""
        return self.rounds * self.round_tiles

    @property
    def tile_lines(self) -> int:
        """Rows of a tile."""
        return MMA_ROWS

    @property
    def parts2(self) -> tuple[tuple[int, int], ...]:
        """(tile of the round, block) of the stages of a round that hold one block each."""
        return tuple((t, b) for t in range(self.round_tiles) for b in range(self.whole2))

    @property
    def round_stages(self) -> int:
        """Stages of a round: blocks, then the half blocks of its tiles together."""
        return len(self.parts2) + int(self.ends)

    @property
    def stages2(self) -> int:
        """Stages of FC2 of one entry."""
        return self.rounds * self.round_stages

    @property
    def box2(self) -> int:
        """Rows of a box of FC2: a CTA has all of them or none."""
        return gcd(self.rows2, MMA_ROWS)

    @property
    def filled_rows(self) -> int:
        """Rows of a place of the ring that are filled before its first product: of FC1, if all
        places have one. A tile of FC2 may have none."""
        return 2 * self.width if self.stages <= self.stages1 else 0

    @property
    def second_bytes(self) -> int:
        """Bytes of the scales of W in FC2: pieces of a tile, tile by tile."""
        return self.tiles2 * self.pieces2 * PIECE

    @property
    def ends_there(self) -> int:
        """Barriers: half blocks of a round are there, of even entries and of odd ones.

        The ring holds less than what lies between entries of one kind (`fits`).
        """
        return self.product2 + 8 * self.rounds

    @property
    def held(self) -> int:
        """The address in tensor memory."""
        return self.ends_there + 16 * self.rounds

    @property
    def fits(self) -> bool:
        """As in the other order; and a barrier of half blocks is passed before it is used again."""
        apart = self.stages1 + 2 * self.stages2
        return super().fits and (not self.ends or self.stages <= apart)

    def tiles(self, name: str, experts: int) -> TileMap:
        """As in the other order. Padding behind a row of w2 is outside its map."""
        if name != "w2":
            return super().tiles(name, experts)
        size = self.whole2 * SPAN, experts * self.latent
        return TileMap("u4_padded", size, (self.stored // 2,), (SPAN, self.box2), SPAN)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of the address parameters in order, behind the maps."""
        names = super().addresses
        return (*names, "w2_ends") if self.ends else names


def end_barriers(config: BlockConfig) -> list[int]:
    """The mbarriers of half blocks; none where no row ends in one. All lanes of a warp arrive."""
    if not isinstance(config, ShuffledBlockConfig) or not config.ends:
        return []
    return [config.ends_there + 8 * number for number in range(2 * config.rounds)]

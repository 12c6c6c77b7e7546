"""Which columns of a latent row a warp of the block-scaled kernel stores and adds up. Imports DSL.

Warp w has lines 32 w to 32 w + 31 of each tile, as tensor memory gives them to it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts.block_config import MMA_ROWS, BlockConfig
from k3fuse.kernels.experts.block_shuffled import ShuffledBlockConfig
from k3fuse.kernels.experts.config import GROUP


def first_column(config: BlockConfig, part: Any, tile: Any, line: Any) -> Any:
    """The column of a tile's line, the first one where it has two."""
    row = (tile * Int32(config.tile_lines) + line) * Int32(config.line_rows)
    return part * Int32(config.rows2) + row


def own_columns(config: BlockConfig, part: Any, warp: Any, lane: Any, turn: int) -> tuple[Any, Any]:
    """The first of the lane's two columns of a pass, and whether it has any.

    32 lines have two columns each, or two tiles' have one each.
    """
    if isinstance(config, ShuffledBlockConfig):
        tile = Int32(2 * turn) + lane // Int32(16)
        row = tile_row(config, part, tile) + warp * Int32(GROUP)
        has = ptx.select(tile < Int32(config.tiles2), own_row(config, part, row), Int32(0))
        return row + lane % Int32(16) * Int32(2), has
    if config.line_rows == 2:
        tile, line, step = Int32(turn), lane, 1
    else:
        tile, line, step = Int32(2 * turn) + lane // Int32(16), lane % Int32(16) * Int32(2), 2
    line = warp * Int32(32) + line
    inside = line + Int32(step) <= Int32(config.tile_lines)
    has = ptx.select(inside, Int32(1), Int32(0))
    has = ptx.select(tile < Int32(config.tiles2), has, Int32(0))
    return first_column(config, part, tile, line), has


def tile_row(config: ShuffledBlockConfig, part: Any, tile: Any) -> Any:
    """Shuffled: the first stored row of a tile, in its expert."""
    return (part * Int32(config.rows2) // Int32(MMA_ROWS) + tile) * Int32(MMA_ROWS)


def own_row(config: ShuffledBlockConfig, part: Any, row: Any) -> Any:
    """Whether (1 or 0) a stored row is one of the CTA's."""
    start = part * Int32(config.rows2)
    behind = ptx.select(row < start + Int32(config.rows2), Int32(1), Int32(0))
    return ptx.select(row >= start, behind, Int32(0))


def shuffled_column(row: Any) -> Any:
    """The column of a latent row that a stored row of w2 makes, both in one expert."""
    inside = row % Int32(GROUP)
    return row - inside + inside % Int32(8) * Int32(4) + inside // Int32(8)


def shuffled_rows(config: ShuffledBlockConfig, part: Any, column: Any) -> tuple[Any, Any, Any]:
    """(up row, gate row, column of the hidden row): of a CTA's column of FC1 its tile's rows.

    Eight columns' rows are 16 neighbours: even or odd columns of 16, up and then gate.
    """
    unit, inside = column // Int32(8), column % Int32(8)
    up = unit * Int32(16) + inside
    unit = part * Int32(config.width // 8) + unit
    whole = unit // Int32(2) * Int32(16) + inside * Int32(2) + unit % Int32(2)
    return up, up + Int32(8), whole

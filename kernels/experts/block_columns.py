"""Which columns of a latent row a warp of the block-scaled kernel stores and adds up. Imports DSL.

Warp w has lines 32 w to 32 w + 31 of each tile, as tensor memory gives them to it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts.block_config import BlockConfig


def first_column(config: BlockConfig, part: Any, tile: Any, line: Any) -> Any:
    """The column of a tile's line, the first one where it has two."""
    row = (tile * Int32(config.tile_lines) + line) * Int32(config.line_rows)
    return part * Int32(config.rows2) + row


def own_columns(config: BlockConfig, part: Any, warp: Any, lane: Any, turn: int) -> tuple[Any, Any]:
    """The first of the lane's two columns of a pass, and whether it has any.

    32 lines have two columns each, or two tiles' have one each.
    """
    if config.line_rows == 2:
        tile, line, step = Int32(turn), lane, 1
    else:
        tile, line, step = Int32(2 * turn) + lane // Int32(16), lane % Int32(16) * Int32(2), 2
    line = warp * Int32(32) + line
    inside = line + Int32(step) <= Int32(config.tile_lines)
    has = ptx.select(inside, Int32(1), Int32(0))
    has = ptx.select(tile < Int32(config.tiles2), has, Int32(0))
    return first_column(config, part, tile, line), has

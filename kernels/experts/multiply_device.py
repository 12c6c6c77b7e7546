"""Products of a tile: MXFP4 weights from a stage with MXFP8 rows in registers. Imports the DSL.

E2M1 values are exact in BF16, and so are E4M3 values with their scale. An mma of 16 rows and 8
tokens sums up a block of 32 columns; the block's weight scale is applied to that sum in FP32, and
the blocks are added in order.

A lane has, of each row and block, the eight values of one word. `decode_fp4` pairs value j with
value j + 4, so the rows of x hold their columns in the same order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import ptx, vector
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.experts import words
from k3fuse.kernels.experts.config import BLOCK, HALF_PIECE, PIECE, TILE, UNIT, WARPS, Config

WORDS = BLOCK // UNIT  # of a lane's columns of one block, in BF16


def multiply(sums: list[Any], pair: Any, scales: Any, x: list[Any], packed: bool) -> list[Any]:
    """Add one block: a word of rows g and g + 8, their scales, four words of x."""
    top, low = words.decode_fp4(pair[0]), words.decode_fp4(pair[1])
    block: list[Any] = [Float32(0.0)] * 4
    for half in range(2):
        i, j = 2 * half, 2 * half + 1
        block = ptx.mma_bf16(block, (top[i], low[i], top[j], low[j]), (x[i], x[j]))
    factors = [scales[0], scales[0], scales[1], scales[1]]
    return vector.fma(block, factors, sums, packed)


def poisoned(sums: list[Any], nan: list[Any]) -> list[Any]:
    """The sums of two rows; NaN where one of the row's scales is."""
    flags = [nan[0] != Int32(0), nan[1] != Int32(0)]
    bad = ptx.as_f32(Int32(words.NAN))
    return [ptx.select(flags[i // 2], bad, value) for i, value in enumerate(sums)]


def tile1(config: Config, stage: Any, index: Any, x: Any, warp: Any, lane: Any) -> list[Any]:
    """A warp's columns of a stage of FC1: sums of rows g (tokens 2 t, 2 t + 1) and g + 8.

    These are gate and up; shuffled: up and gate. index: the tile's number in the expert. x:
    register tensor of `fragments`.
    """
    line, column = lane // Int32(4), lane % Int32(4)
    row = stage + line * Int32(config.pitch1) + column * Int32(4)
    row = row + warp * Int32(config.blocks1 * BLOCK // 2)
    scales = stage + Int32(TILE * config.pitch1)
    if config.shuffled:
        scales = scales + warp * Int32(config.blocks1 // 4 * HALF_PIECE) + line * Int32(16)
        scales = scales + index % Int32(8) // Int32(2) * Int32(4)
        word, step = HALF_PIECE, 8 * 16
    else:
        scales = scales + line * Int32(config.scales1) + warp * Int32(config.blocks1)
        word, step = 4, 8 * config.scales1
    held = [
        [ptx.shared_load4(scales, word * i + step * low) for i in range(config.blocks1 // 4)]
        for low in range(2)
    ]
    sums: list[Any] = [Float32(0.0)] * 4
    for block in range(config.blocks1):
        pair = [ptx.shared_load4(row, 16 * block + 8 * config.pitch1 * low) for low in range(2)]
        factors = [words.scale(held[low][block // 4], block % 4) for low in range(2)]
        columns = [x[WORDS * block + i] for i in range(WORDS)]
        sums = multiply(sums, pair, factors, columns, config.packed)
    return poisoned(sums, [words.has_nan(held[low]) for low in range(2)])


def tile2(config: Config, stage: Any, first: Any, tile: Any, x: list[Any], lane: Any) -> list[Any]:
    """A tile of a stage of FC2 with one unit: sums of rows g and g + 8, tokens 2 t, 2 t + 1.

    first: the stage's first row in the expert.
    """
    line, column = lane // Int32(4), lane % Int32(4)
    pitch = config.inter // 2
    row = tile * Int32(TILE) + line
    scales = stage + Int32(config.stage_rows2 * pitch)
    if config.shuffled:
        held = shuffled_scales2(config, scales, first, row)
    else:
        scales = scales + row * Int32(config.blocks2)
        held = [
            [words.shared_load2(scales, 2 * i + 8 * config.blocks2 * low) for i in range(halves)]
            for low, halves in enumerate([config.blocks2 // 2] * 2)
        ]
    each = 4 if config.shuffled else 2
    row = stage + row * Int32(pitch) + column * Int32(4)
    sums: list[Any] = [Float32(0.0)] * 4
    for block in range(config.blocks2):
        pair = [ptx.shared_load4(row, 16 * block + 8 * pitch * low) for low in range(2)]
        factors = [words.scale(held[low][block // each], block % each) for low in range(2)]
        columns = x[WORDS * block : WORDS * (block + 1)]
        sums = multiply(sums, pair, factors, columns, config.packed)
    return poisoned(sums, [words.has_nan(held[low]) for low in range(2)])


def shuffled_scales2(config: Config, scales: Any, first: Any, row: Any) -> list[list[Any]]:
    """Scales of rows `row` and `row` + 8 of a stage, four blocks a word; none of the padding."""
    whole = first + row  # of 16 neighbours from a multiple of 16 on, so all are in one group
    group = whole // Int32(128) - first // Int32(128)
    place = scales + group * Int32(config.group2) + whole % Int32(32) * Int32(16)
    place = place + whole % Int32(128) // Int32(32) * Int32(4)
    held = []
    for low in range(2):
        found = []
        for i in range(-(-config.blocks2 // 4)):
            word = ptx.shared_load4(place, PIECE * i + 8 * 16 * low)
            live = min(4, config.blocks2 - 4 * i)
            found.append(word if live == 4 else word & Int32((1 << (8 * live)) - 1))
        held.append(found)
    return held


def hidden_fragments(config: Config, base: Any, unit: Any, lane: Any) -> list[Any]:
    """The hidden rows of a unit: of token lane / 4, the lane's words of every block."""
    token = unit * Int32(UNIT) + lane // Int32(4)
    row = base + Int32(config.hidden_rows) + token * Int32(config.hidden_pitch)
    row = row + lane % Int32(4) * Int32(16)
    return [word for i in range(config.blocks2) for word in ptx.shared_load16(row, 64 * i)]


@cute.jit
def fragments(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    x: cute.Tensor,
    first: Int32,
    count: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Load a warp's columns of a unit's tokens, rounded to MXFP8, into registers x.

    first: place of the unit's first pair in the order; count: its pairs. Of token lane / 4 a lane
    has 8 columns of each block; tokens that do not exist are zeros.
    """
    token = lane // Int32(4)
    valid = ptx.select(token < count, Int32(1), Int32(0))
    place = first + ptx.least_of(token, count - 1)
    pair = ptx.shared_load4(base + Int32(config.order) + place * Int32(4))
    column = warp * Int32(config.blocks1 * BLOCK) + lane % Int32(4) * Int32(UNIT)
    token = pair // Int32(config.top_k)
    if cutlass.const_expr(config.mxfp8):
        decode(config, given, x, token, column, warp, lane, valid)
    else:
        round_rows(config, given, x, token * given.x_pitch + column, valid)


def decode(
    config: Config, given: Any, x: Any, token: Any, column: Any, warp: Any, lane: Any, valid: Any
) -> None:
    """A token's E4M3 values times their scales, which is exact in BF16.

    Its four lanes load a word of the warp's scales each, at most four, and pass them on.
    """
    address = given.x + (token * Int32(config.latent) + column).to(Int64)
    place = token * Int32(config.scales1) + warp * Int32(config.blocks1)
    count, mine = config.blocks1 // 4, lane % Int32(4)
    own = ptx.select(mine < Int32(count), valid, Int32(0))
    word = words.load4_if(given.x_scale + (place + mine * Int32(4)).to(Int64), 0, own)
    scales = [ptx.shuffle_word_from(word, lane - mine + Int32(i)) for i in range(count)]
    loaded = [words.load8_if(address, BLOCK * i, valid) for i in range(config.blocks1)]
    for block, (low, high) in enumerate(loaded):
        up = words.scale_pair(scales[block // 4], block % 4)
        for i, word in enumerate(words.decode_fp8(low, high, up)):
            x[WORDS * block + i] = word


@cute.jit
def round_rows(
    config: cutlass.Constexpr, given: cutlass.Constexpr, x: cute.Tensor, start: Int32, valid: Int32
) -> None:
    """A token's values from `start` on, in BF16: rounded to MXFP8 by the round-up rule."""
    address = given.x + bytes_of(start)
    for block in cutlass.range_constexpr(config.blocks1):
        loaded = words.load16_if(address, 2 * BLOCK * block, valid)
        for i in cutlass.range_constexpr(WORDS):
            x[WORDS * block + i] = loaded[i]
    for block in cutlass.range_constexpr(config.blocks1):
        held = [x[WORDS * block + i] for i in range(WORDS)]
        magnitude = words.magnitude_of(held)
        for mask in cutlass.range_constexpr(1, 3):
            magnitude = words.most(magnitude, words.shuffle_word_xor(magnitude, mask))
        down, up = words.power_of(magnitude, False)
        values = ptx.unpack(held)
        for i in cutlass.range_constexpr(WORDS):
            low, high = values[i], values[i + WORDS]
            x[WORDS * block + i] = words.through_fp8(low, high, down, up, down, up)


def partial_sums(config: Config, base: Any, place: Any, warp: Any, lane: Any) -> Any:
    """Where a lane's partial sums of one tile of FC1 lie: 16 bytes."""
    address = base + Int32(config.sums) + warp * Int32(config.tiles1 * config.sums_tile)
    return address + place * Int32(config.sums_tile) + lane * Int32(16)


def all_partial_sums(config: Config, place: Any, offset: int) -> list[Any]:
    """The four sums at `place` of the first warp's, over all warps in order."""
    total = list(ptx.shared_load16_f32(place, offset))
    for warp in range(1, WARPS):
        step = warp * config.tiles1 * config.sums_tile
        total = vector.add(total, list(ptx.shared_load16_f32(place, offset + step)), config.packed)
    return total

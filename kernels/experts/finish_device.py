"""Rows of FC2, the sum over the slots, and the shared expert's rows. Imports the DSL.

Warp w of CTA r has the same columns in every cluster. It stores them, for each pair, in BF16, and
counts; the warp that counts a token's last slot adds the token's slots up, in order. Whoever that
is, the bits are the same. It clears the count for the next launch.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.experts import block_columns, words
from k3fuse.kernels.experts.block_config import BlockConfig
from k3fuse.kernels.experts.config import (
    BLOCK,
    CLUSTER,
    SHARED_ROWS,
    TILE,
    UNIT,
    WARPS,
    Config,
)
from k3fuse.kernels.experts.fetch_device import release, wait_full

LINE = 8  # lanes of a run: two columns each


def pair_at(config: Config, base: Any, first: Any, index: Any, count: Any) -> Any:
    """Pair number `index` of an entry; the last one beyond."""
    place = first + ptx.least_of(index, count - 1)
    return ptx.shared_load4(base + Int32(config.order) + place * Int32(4))


def store_tile(
    config: Config,
    given: Any,
    base: Any,
    sums: list[Any],
    first: Any,
    count: Any,
    unit: Any,
    row: Any,
    lane: Any,
) -> None:
    """Rows of FC2 as columns of the pairs' rows, in BF16. row: the first one of the tile."""
    token = unit * Int32(UNIT) + lane % Int32(4) * Int32(2)
    line = lane // Int32(4)
    column = pair_of(row, line) if config.shuffled else row + line
    # Shuffled: rows g and g + 8 are neighbouring columns.
    kept = [sums[0], sums[2], sums[1], sums[3]] if config.shuffled else sums
    low, high = ptx.pack(kept)
    for odd in range(2):
        index = token + Int32(odd)
        pair = pair_at(config, base, first, index, count)
        valid = ptx.select(index < count, Int32(1), Int32(0))
        address = given.rows + bytes_of(column) + bytes_of(pair * Int32(config.latent))
        if config.shuffled:
            words.store4_if(address, high if odd else low, valid)
        else:
            words.store2_if(address, low, bool(odd), valid)
            words.store2_if(address + Int64(TILE), high, bool(odd), valid)


def pair_of(row: Any, line: Any) -> Any:
    """The first of two neighbouring columns that shuffled rows `row + line` and 8 more have."""
    return row // Int32(32) * Int32(32) + line * Int32(4) + row % Int32(32) // Int32(8)


def own_columns(config: Config, part: Any, warp: Any, lane: Any, turn: int = 0) -> tuple[Any, Any]:
    """The first of the lane's two columns of a latent row in a pass, and whether it has any."""
    if isinstance(config, BlockConfig):
        return block_columns.own_columns(config, part, warp, lane, turn)
    run, inside = lane // Int32(LINE), lane % Int32(LINE)
    row = part * Int32(config.rows2) + (run * Int32(WARPS) + warp) * Int32(TILE)
    column = pair_of(row, inside) if config.shuffled else row + inside * Int32(2)
    return column, ptx.select(run < Int32(config.runs), Int32(1), Int32(0))


@cute.jit
def clear_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    first: Int32,
    count: Int32,
    part: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """An entry of ids out of range: its rows are zeros."""
    for turn in cutlass.range_constexpr(config.passes):
        column, has = own_columns(config, part, warp, lane, turn)
        for index in cutlass.range(count, unroll=1):
            pair = pair_at(config, base, first, index, count)
            address = given.rows + bytes_of(pair * Int32(config.latent) + column)
            words.store4_if(address, Int32(0), has)


@cute.jit
def count_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    first: Int32,
    count: Int32,
    part: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """This warp's columns of an entry's pairs are stored: count them, add up what is complete."""
    for turn in cutlass.range((count + Int32(31)) // Int32(32), unroll=1):
        index = turn * Int32(32) + lane
        pair = pair_at(config, base, first, index, count)
        token = pair // Int32(config.top_k)
        place = (token * Int32(CLUSTER) + part) * Int32(WARPS) + warp
        address = given.arrivals + (place * Int32(4)).to(Int64)
        valid = ptx.select(index < count, Int32(1), Int32(0))
        # The atomic of one lane publishes what all of them have stored, and gets the others' rows.
        words.sync_warp()
        before = words.arrive(address, valid)
        last = words.votes(ptx.select(before == Int32(config.top_k - 1), Int32(1), Int32(0)))
        words.sync_warp()
        for bit in cutlass.range(ptx.least(count - turn * Int32(32), 32), unroll=1):
            if (last >> bit) & Int32(1) != 0:
                add_slots(config, given, ptx.shuffle_word_from(token, bit), part, warp, lane)


@cute.jit
def add_slots(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    token: Int32,
    part: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """The weighted sum of a token's rows over the slots, in order, in FP32; one rounding."""
    own_slot = ptx.select(lane < Int32(config.top_k), Int32(1), Int32(0))
    slot = token * Int32(config.top_k) + lane
    if cutlass.const_expr(config.float_weights):
        word = words.load4_if(given.weights + (slot * Int32(4)).to(Int64), 0, own_slot)
    else:
        word = words.load2_if(given.weights + bytes_of(slot), own_slot) << Int32(16)
    weight = ptx.as_f32(word)
    for turn in cutlass.range_constexpr(config.passes):
        column, has = own_columns(config, part, warp, lane, turn)
        row = given.rows + bytes_of(token * Int32(config.top_k * config.latent) + column)
        pairs = [words.load4_if(row, 2 * config.latent * slot, has) for slot in range(config.top_k)]
        total = [Float32(0.0), Float32(0.0)]
        for slot in cutlass.range_constexpr(config.top_k):
            factor = ptx.shuffle_from(weight, Int32(slot))
            values = ptx.unpack([pairs[slot]])
            total = [sum_ + value * factor for sum_, value in zip(total, values, strict=True)]
        target = given.routed + bytes_of(token * Int32(config.latent) + column)
        words.store4_if(target, ptx.pack(total)[0], has)
    if lane == 0:
        place = (token * Int32(CLUSTER) + part) * Int32(WARPS) + warp
        ptx.store4(given.arrivals + (place * Int32(4)).to(Int64), Int32(0))


def shared_block(
    config: Config, given: Any, stage: Any, sums: list[Any], w: Any, block: int, line: Any
) -> None:
    """Add the products of 32 columns of a warp's rows with all tokens."""
    for group, held in enumerate(sums):
        halves = []
        for half in range(halves_of(config)):
            token = Int32(TILE * group + UNIT * half) + line
            token = ptx.least_of(token, given.m - 1) + Int32(SHARED_ROWS)
            place = stage + token * Int32(config.shared_pitch)
            halves.append(ptx.shared_load16(place, 2 * BLOCK * block))
        top, low = halves[0], halves[-1] if len(halves) > 1 else [Int32(0)] * 4
        for step in range(2):
            i, j = 2 * step, 2 * step + 1
            held = ptx.mma_bf16(held, (top[i], low[i], top[j], low[j]), (w[i], w[j]))
        sums[group] = held


def halves_of(config: Config) -> int:
    """Halves of the 16 rows of an mma that hold tokens."""
    return 1 if config.m <= UNIT else 2


@cute.jit
def shared_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    cta: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """A warp's eight rows of the shared expert's down-projection, all tokens.

    Tokens are the 16 rows of the mma, rows of W its 8 columns. K in order, in one chain.
    """
    line, column = lane // Int32(4), lane % Int32(4)
    groups = -(-config.m // TILE) if config.shared else 0
    sums: list[Any] = [[Float32(0.0)] * 4 for _ in range(groups)]
    for number in cutlass.range_constexpr(config.shared_stages):
        stage = wait_full(config, base, Int32(number)) + column * Int32(16)
        weights = stage + (warp * Int32(UNIT) + line) * Int32(config.shared_pitch)
        for block in cutlass.range_constexpr(config.shared_columns // BLOCK):
            w = ptx.shared_load16(weights, 2 * BLOCK * block)
            shared_block(config, given, stage, sums, w, block, line)
        release(config, base, Int32(number), lane)
    row = cta * Int32(SHARED_ROWS) + warp * Int32(UNIT) + column * Int32(2)
    for group in cutlass.range_constexpr(len(sums)):
        pairs = ptx.pack(sums[group])
        for half in cutlass.range_constexpr(halves_of(config)):
            token = Int32(TILE * group + UNIT * half) + line
            valid = ptx.select(token < given.m, Int32(1), Int32(0))
            address = given.shared_out + bytes_of(token * Int32(config.hidden) + row)
            words.store4_if(address, pairs[half], valid)

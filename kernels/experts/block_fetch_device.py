"""The warp that fetches, block-scaled engine: stages of the experts into the ring. Imports the DSL.

Tiles of FC1 of an entry, then those of FC2 of the entry before it: the order in which they are
multiplied, so that FC1 goes on while the hidden rows of the entry before are exchanged.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts import block_words, words
from k3fuse.kernels.experts.block_config import (
    HALF,
    MMA_ROWS,
    SPAN,
    STEPS,
    TILE_BYTES,
    BlockConfig,
    shared_uses,
)
from k3fuse.kernels.experts.block_shuffled import (
    LANE_BYTES,
    ROW_LANES,
    ShuffledBlockConfig,
)
from k3fuse.kernels.experts.finish_device import pair_at


def entry_at(config: BlockConfig, base: Any, entry: Any) -> list[Any]:
    """Expert, first pair and number of pairs of an entry of the list."""
    place = base + Int32(config.list) + entry * Int32(16)
    return [ptx.shared_load4(place, 4 * i) for i in range(3)]


def place_of(config: BlockConfig, base: Any, number: Any) -> tuple[Any, Any, Any]:
    """(slot of the ring, its address, parity of the fetch) of the `number`-th stage of experts."""
    slot = number % Int32(config.stages)
    address = base + Int32(config.ring) + slot * Int32(config.stage)
    return slot, address, number // Int32(config.stages) % Int32(2)


def ends_barrier(config: ShuffledBlockConfig, base: Any, entry: Any, turn: Any) -> Any:
    """The mbarrier of the half blocks of a round of FC2 of an entry."""
    number = entry % Int32(2) * Int32(config.rounds) + turn
    return base + Int32(config.ends_there) + number * Int32(8)


@cute.jit
def claim(config: cutlass.Constexpr, base: Int32, number: Int32) -> None:
    """Wait until a stage may be filled again."""
    if number >= config.stages:
        slot, _, _ = place_of(config, base, number)
        turn = (number // Int32(config.stages) + Int32(1)) % Int32(2)
        ptx.barrier_wait(base + Int32(config.taken) + slot * Int32(8), turn)


@cute.jit
def after_shared(config: cutlass.Constexpr, base: Int32, number: Int32) -> None:
    """Wait until the last stage of the shared expert has been read that was in this place.

    FC1 of the first entry has a stage for each of these places (`BlockConfig.fits`).
    """
    for slot in cutlass.range_constexpr(min(config.stages, config.shared_stages)):
        if number == slot:
            turn = Int32((shared_uses(config, slot) + 1) % 2)
            ptx.barrier_wait(base + Int32(config.empty + 8 * slot), turn)


@cute.jit
def fetch_first(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    number: Int32,
    part: Int32,
    cluster: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """FC1 of an entry from stage `number` on: gate and up rows, and rows of x, a lane each."""
    expert, first, count = entry_at(config, base, entry)
    row = expert * Int32(2 * config.stored) + part * Int32(config.box1)
    rows = [pair_row(config, base, first, count, cluster, lane, turn) for turn in turns(config)]
    for step in cutlass.range(config.stages1, unroll=1):
        claim(config, base, number + step)
        if number + step < config.stages:
            after_shared(config, base, number + step)
        slot, stage, _ = place_of(config, base, number + step)
        barrier = base + Int32(config.there) + slot * Int32(8)
        column = step * Int32(config.halves * SPAN)
        if lane == 0:
            size = count * Int32(config.halves * SPAN) + Int32(config.bytes1)
            ptx.barrier_expect(barrier, size)
            for half in cutlass.range_constexpr(config.halves):
                for box in cutlass.range_constexpr(2 * config.width // config.box1):
                    block_words.load_tile_once(
                        stage + Int32((half * HALF + box * config.box1) * SPAN), given.w13,
                        column + Int32(half * SPAN), row + Int32(box * config.inter), barrier,
                        policy,
                    )  # fmt: skip
        for turn in cutlass.range_constexpr(len(rows)):
            token = lane + Int32(32 * turn)
            if token < count:
                for half in cutlass.range_constexpr(config.halves):
                    target = stage + (token + Int32(half * config.tokens)) * Int32(SPAN)
                    block_words.load_tile(
                        target + Int32(TILE_BYTES), given.x8_tiles, column + Int32(half * SPAN),
                        rows[turn], barrier,
                    )  # fmt: skip


def turns(config: BlockConfig) -> range:
    """Tokens of a lane."""
    return range(-(-config.tokens // 32))


def pair_row(
    config: BlockConfig, base: Any, first: Any, count: Any, cluster: Any, lane: Any, turn: int
) -> Any:
    """The row of the MXFP8 rows that a lane fetches."""
    return row_of(config, cluster, pair_at(config, base, first, lane + Int32(32 * turn), count))


def row_of(config: BlockConfig, cluster: Any, pair: Any) -> Any:
    """The row of a pair's token: of all rows, or of those that the cluster has rounded itself."""
    token = pair // Int32(config.top_k)
    return token if config.mxfp8 else cluster * Int32(config.m) + token


@cute.jit
def fetch_second(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    number: Int32,
    part: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """FC2 of an entry from stage `number` on."""
    expert, _, _ = entry_at(config, base, entry)
    first = expert * Int32(config.latent // config.line_rows) + part * Int32(config.lines)
    for step in cutlass.range(config.stages2, unroll=1):
        claim(config, base, number + step)
        slot, stage, _ = place_of(config, base, number + step)
        barrier = base + Int32(config.there) + slot * Int32(8)
        tile, block = step // Int32(config.tile_stages), step % Int32(config.tile_stages)
        if lane == 0:
            ptx.barrier_expect(barrier, Int32(config.bytes2))
            block_words.load_tile_once(
                stage, given.w2, block * Int32(STEPS * 32), first + tile * Int32(config.tile_lines),
                barrier, policy,
            )  # fmt: skip


@cute.jit
def fetch_shuffled(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    number: Int32,
    part: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """FC2 of an entry in the shuffled order: of each tile the boxes that are this CTA's."""
    expert, _, _ = entry_at(config, base, entry)
    start = part * Int32(config.rows2)
    above = expert * Int32(config.latent)
    for turn in cutlass.range(config.rounds, unroll=1):
        first = start // Int32(MMA_ROWS) + turn * Int32(config.round_tiles)
        for step in cutlass.range_constexpr(config.round_stages):
            now = number + turn * Int32(config.round_stages) + Int32(step)
            claim(config, base, now)
            slot, stage, _ = place_of(config, base, now)
            barrier = base + Int32(config.there) + slot * Int32(8)
            if cutlass.const_expr(step < len(config.parts2)):
                tile, block = config.parts2[step]
                row = (first + Int32(tile)) * Int32(MMA_ROWS)
                if lane == 0:
                    own = ptx.least_of(row + Int32(MMA_ROWS), start + Int32(config.rows2))
                    own = own - words.most(row, start)
                    own = ptx.select(own > Int32(0), own, Int32(0))
                    ptx.barrier_expect(barrier, own * Int32(SPAN // 2))
                    for box in cutlass.range_constexpr(MMA_ROWS // config.box2):
                        at = row + Int32(box * config.box2)
                        if at >= start and at < start + Int32(config.rows2):
                            block_words.load_tile_once(
                                stage + Int32(box * config.box2 * SPAN), given.w2,
                                Int32(block * SPAN), above + at, barrier, policy,
                            )  # fmt: skip
            else:
                for tile in cutlass.range_constexpr(config.round_tiles):
                    row = (first + Int32(tile)) * Int32(MMA_ROWS)
                    for box in cutlass.range_constexpr(MMA_ROWS // config.box2):
                        at = row + Int32(box * config.box2)
                        if at >= start and at < start + Int32(config.rows2):
                            target = stage + Int32(box * config.box2 * SPAN)
                            fetch_end(config, given, target, above + at, tile, lane, policy)
                block_words.arrive_after_copies(ends_barrier(config, base, entry, turn))
                if lane == 0:
                    ptx.barrier_arrive(barrier)


@cute.jit
def fetch_end(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    target: Int32,
    row: Int32,
    tile: cutlass.Constexpr[int],
    lane: Int32,
    policy: Int64,
) -> None:
    """The half block behind the last whole one of a box's rows, to its place in the swizzle.

    A lane copies 16 values, 8 rows at a time. tile: of the round, the first or the second half.
    """
    line, inside = lane // Int32(ROW_LANES), lane % Int32(ROW_LANES)
    pitch = config.stored // 2
    source = given.w2_ends + (row + line).to(Int64) * Int64(pitch)
    source = source + (inside * Int32(LANE_BYTES)).to(Int64)
    place = target + line * Int32(SPAN) + ((inside + Int32(tile * ROW_LANES)) ^ line) * Int32(16)
    for turn in cutlass.range_constexpr(config.box2 // 8):
        offset = config.whole2 * SPAN // 2 + 8 * turn * pitch
        block_words.copy8_once(place, 8 * turn * SPAN, source, offset, policy)


@cute.jit
def fetch(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    live: Int32,
    part: Int32,
    cluster: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """All entries that name an expert."""
    number = Int32(0)
    for step in cutlass.range(live + Int32(1), unroll=1):
        if step < live:
            fetch_first(config, given, base, step, number, part, cluster, lane, policy)
            number = number + Int32(config.stages1)
        if step > 0:
            if cutlass.const_expr(config.shuffled):
                fetch_shuffled(config, given, base, step - Int32(1), number, part, lane, policy)
            else:
                fetch_second(config, given, base, step - Int32(1), number, part, lane, policy)
            number = number + Int32(config.stages2)

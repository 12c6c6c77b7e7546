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
from k3fuse.kernels.experts import block_words
from k3fuse.kernels.experts.block_config import (
    HALF,
    SPAN,
    STEPS,
    TILE_BYTES,
    BlockConfig,
    shared_uses,
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
    """FC1 of an entry from stage `number` on: gate rows, up rows, and rows of x, a lane each."""
    expert, first, count = entry_at(config, base, entry)
    row = expert * Int32(2 * config.inter) + part * Int32(config.width)
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
                for up in cutlass.range_constexpr(2):
                    block_words.load_tile_once(
                        stage + Int32((half * HALF + up * config.width) * SPAN), given.w13,
                        column + Int32(half * SPAN), row + Int32(up * config.inter), barrier,
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
            fetch_second(config, given, base, step - Int32(1), number, part, lane, policy)
            number = number + Int32(config.stages2)

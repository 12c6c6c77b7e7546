"""The warp that fetches: stages of weights into the ring, in the order they are used.

Imports the DSL. First the shared expert's down-projection, whose weights need no ids: as many
stages as fit are under way before the predecessor has ended. Then, for each entry, FC1 (a gate and
an up tile a stage) and FC2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.experts import words
from k3fuse.kernels.experts.config import (
    COLUMNS,
    HALF_PIECE,
    NONE,
    SHARED_ROWS,
    TILE,
    Config,
)


def slot_of(config: Config, number: Any) -> Any:
    """The stage of the ring that the `number`-th fetch goes to."""
    return number % Int32(config.stages)


def turn_of(config: Config, number: Any) -> Any:
    """How often that stage was filled before, modulo 2."""
    return number // Int32(config.stages) % Int32(2)


def stage_at(config: Config, base: Any, slot: Any) -> Any:
    """Where a stage lies."""
    return base + Int32(config.ring) + slot * Int32(config.stage)


def number_of(config: Config, entry: Any) -> Any:
    """The number of an entry's first fetch."""
    return Int32(config.shared_stages) + entry * Int32(config.tiles1 + config.stages2)


def wait_full(config: Config, base: Any, number: Any) -> Any:
    """Wait for a fetch; returns where it lies."""
    slot = slot_of(config, number)
    ptx.barrier_wait(base + Int32(config.full) + slot * Int32(8), turn_of(config, number))
    return stage_at(config, base, slot)


@cute.jit
def release(config: cutlass.Constexpr, base: Int32, number: Int32, lane: Int32) -> None:
    """This warp has read a stage."""
    words.sync_warp()
    if lane == 0:
        ptx.barrier_arrive(base + Int32(config.empty) + slot_of(config, number) * Int32(8))


@cute.jit
def claim(config: cutlass.Constexpr, base: Int32, number: Int32, size: Int32, lane: Int32) -> None:
    """Wait until a stage may be filled; expect `size` bytes there."""
    slot = slot_of(config, number)
    if number >= config.stages:
        # The warps have read what the fetch before put there.
        turn = (number // Int32(config.stages) + Int32(1)) % Int32(2)
        ptx.barrier_wait(base + Int32(config.empty) + slot * Int32(8), turn)
    if lane == 0:
        ptx.barrier_expect(base + Int32(config.full) + slot * Int32(8), size)


@cute.jit
def fetch_shared(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    number: cutlass.Constexpr[int],
    cta: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """Rows of the shared expert's weights; their stage also expects rows of x."""
    size = 2 * config.shared_columns
    claim(config, base, Int32(number), (given.m + Int32(SHARED_ROWS)) * Int32(size), lane)
    barrier = base + Int32(config.full + number % config.stages * 8)
    stage = stage_at(config, base, Int32(number % config.stages))
    for turn in cutlass.range_constexpr(-(-SHARED_ROWS // 32)):
        row = lane + Int32(32 * turn)
        if row < SHARED_ROWS:
            start = (cta * Int32(SHARED_ROWS) + row).to(Int64) * Int64(2 * config.shared)
            source = given.shared_down + start + Int64(number * size)
            target = stage + row * Int32(config.shared_pitch)
            ptx.bulk_load_once(target, source, size, barrier, policy)


@cute.jit
def fetch_tokens(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    number: cutlass.Constexpr[int],
    lane: Int32,
) -> None:
    """Rows of the shared expert's x, behind the weights of the same columns."""
    size = 2 * config.shared_columns
    barrier = base + Int32(config.full + number % config.stages * 8)
    stage = stage_at(config, base, Int32(number % config.stages))
    for turn in cutlass.range_constexpr(-(-config.m // 32)):
        token = lane + Int32(32 * turn)
        if token < given.m:
            source = given.shared_x + bytes_of(token * given.shared_pitch) + Int64(number * size)
            target = stage + (token + Int32(SHARED_ROWS)) * Int32(config.shared_pitch)
            ptx.bulk_load(target, source, size, barrier)


@cute.jit
def fetch_entry(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    part: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """All stages of one entry."""
    expert = ptx.shared_load4(base + Int32(config.list) + entry * Int32(16))
    if expert != NONE:
        first = number_of(config, entry)
        for tile in cutlass.range(config.tiles1, unroll=1):
            fetch_tile(config, given, base, first + tile, expert, part, tile, lane, policy)
        for step in cutlass.range(config.stages2, unroll=1):
            number = first + Int32(config.tiles1) + step
            fetch_rows(config, given, base, number, expert, part, step, lane, policy)


@cute.jit
def fetch_tile(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    number: Int32,
    expert: Int32,
    part: Int32,
    tile: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """A stage of FC1: eight rows of gate and up each, a lane a row, and their scales."""
    size = config.latent // 2
    claim(config, base, number, Int32(TILE * size + config.scale_bytes1), lane)
    slot = slot_of(config, number)
    barrier = base + Int32(config.full) + slot * Int32(8)
    stage = stage_at(config, base, slot)
    scales = stage + Int32(TILE * config.pitch1)
    if cutlass.const_expr(config.shuffled):
        index = part * Int32(config.tiles1) + tile
        row = expert * Int32(2 * config.stored) + index * Int32(TILE) + lane
        if lane < TILE:
            source = given.w13 + row.to(Int64) * Int64(size)
            ptx.bulk_load_once(stage + lane * Int32(config.pitch1), source, size, barrier, policy)
        # Half a piece has the tile's 16 lines.
        each = config.scales1 // 4
        piece = (expert * Int32(config.stored // 64) + index // Int32(8)) * Int32(each) + lane
        half = piece * Int32(2) + index % Int32(2)
        if lane < each:
            source = given.w13_scale + half.to(Int64) * Int64(HALF_PIECE)
            ptx.bulk_load_once(
                scales + lane * Int32(HALF_PIECE), source, HALF_PIECE, barrier, policy
            )
    else:
        # Rows: lane 8 and on are up. Scales, by lanes 16 and 17: the latter is up.
        last = lane >= Int32(TILE)
        upper = ptx.select(last, lane - Int32(TILE), lane // Int32(COLUMNS))
        inside = ptx.select(last, Int32(0), lane % Int32(COLUMNS))
        row = expert * Int32(2 * config.inter) + upper * Int32(config.inter)
        row = row + part * Int32(config.width) + tile * Int32(COLUMNS) + inside
        source = given.w13_scale + row.to(Int64) * Int64(config.scales1)
        source = ptx.select(last, source, given.w13 + row.to(Int64) * Int64(size))
        target = scales + upper * Int32(COLUMNS * config.scales1)
        target = ptx.select(last, target, stage + lane * Int32(config.pitch1))
        size = ptx.select(last, Int32(COLUMNS * config.scales1), Int32(size))
        if lane < TILE + 2:
            ptx.bulk_load_once(target, source, size, barrier, policy)


@cute.jit
def fetch_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    number: Int32,
    expert: Int32,
    part: Int32,
    step: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """A stage of FC2: neighbouring rows and their scales."""
    rows, size = config.stage_rows2, config.inter // 2
    first = part * Int32(config.rows2) + step * Int32(rows)
    row = expert * Int32(config.latent) + first
    slot = slot_of(config, number)
    barrier = base + Int32(config.full) + slot * Int32(8)
    stage = stage_at(config, base, slot)
    scales = stage + Int32(rows * size)
    weights = given.w2 + row.to(Int64) * Int64(config.stored // 2)
    if cutlass.const_expr(config.shuffled):
        group = first // Int32(128)
        groups = (first + Int32(rows - 1)) // Int32(128) - group + Int32(1)
        claim(config, base, number, Int32(rows * size) + groups * Int32(config.group2), lane)
        if lane < groups:
            group = expert * Int32(config.latent // 128) + group + lane
            source = given.w2_scale + group.to(Int64) * Int64(config.group2)
            target = scales + lane * Int32(config.group2)
            ptx.bulk_load_once(target, source, config.group2, barrier, policy)
        if cutlass.const_expr(config.stored > config.inter):
            # The padding behind each row stays where it is.
            for turn in cutlass.range(rows // 32 + 1, unroll=1):
                line = lane + turn * Int32(32)
                if line < rows:
                    source = weights + (line * Int32(config.stored // 2)).to(Int64)
                    ptx.bulk_load_once(stage + line * Int32(size), source, size, barrier, policy)
        else:
            if lane == 0:
                ptx.bulk_load_once(stage, weights, rows * size, barrier, policy)
    else:
        claim(config, base, number, Int32(config.bytes2), lane)
        each = config.blocks2
        last = lane > Int32(0)
        source = given.w2_scale + row.to(Int64) * Int64(each)
        source = ptx.select(last, source, weights)
        target = ptx.select(last, scales, stage)
        if lane < 2:
            size = ptx.select(last, Int32(rows * each), Int32(rows * size))
            ptx.bulk_load_once(target, source, size, barrier, policy)

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
from k3fuse.kernels.experts.config import BLOCK, COLUMNS, NONE, SHARED_ROWS, TILE, Config


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
    """A stage of FC1: eight gate and eight up rows by lanes 0 to 15, their scales by 16 and 17."""
    claim(config, base, number, Int32(TILE * (config.latent // 2 + config.scales1)), lane)
    slot = slot_of(config, number)
    barrier = base + Int32(config.full) + slot * Int32(8)
    stage = stage_at(config, base, slot)
    scales = lane >= Int32(TILE)
    # Rows: lane 8 and on are up. Scales: lane 17 is up.
    upper = ptx.select(scales, lane - Int32(TILE), lane // Int32(COLUMNS))
    inside = ptx.select(scales, Int32(0), lane % Int32(COLUMNS))
    row = expert * Int32(2 * config.inter) + upper * Int32(config.inter)
    row = row + part * Int32(config.width) + tile * Int32(COLUMNS) + inside
    weights = given.w13 + row.to(Int64) * Int64(config.latent // 2)
    source = given.w13_scale + row.to(Int64) * Int64(config.scales1)
    source = ptx.select(scales, source, weights)
    target = Int32(TILE * config.pitch1) + upper * Int32(COLUMNS * config.scales1)
    target = stage + ptx.select(scales, target, lane * Int32(config.pitch1))
    size = ptx.select(scales, Int32(COLUMNS * config.scales1), Int32(config.latent // 2))
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
    """A stage of FC2: neighbouring rows by lane 0, their scales by lane 1."""
    weights, scales = config.inter // 2, config.inter // BLOCK
    rows = config.stage_rows2
    claim(config, base, number, Int32(config.bytes2), lane)
    slot = slot_of(config, number)
    barrier = base + Int32(config.full) + slot * Int32(8)
    stage = stage_at(config, base, slot)
    row = expert * Int32(config.latent) + part * Int32(config.rows2) + step * Int32(rows)
    other = lane > Int32(0)
    source = given.w2_scale + row.to(Int64) * Int64(scales)
    source = ptx.select(other, source, given.w2 + row.to(Int64) * Int64(weights))
    target = stage + ptx.select(other, Int32(rows * weights), Int32(0))
    if lane < 2:
        size = ptx.select(other, Int32(rows * scales), Int32(rows * weights))
        ptx.bulk_load_once(target, source, size, barrier, policy)

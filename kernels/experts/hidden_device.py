"""Between FC1 and FC2: sums over the warps, SiTU, exchange in the cluster, MXFP8. Imports the DSL.

Each CTA has an eighth of the hidden row, which is no whole number of blocks of 32. So the FP32
values go to all CTAs of the cluster, and each of them rounds the whole row to MXFP8: the same bits.

There are two buffers. A CTA that has read one says so to its peers; they wait for that before they
fill it again.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.situ import situ
from k3fuse.kernels.experts import words
from k3fuse.kernels.experts.config import BLOCK, CLUSTER, COLUMNS, UNIT, WARPS, Config
from k3fuse.kernels.experts.multiply_device import all_partial_sums

WORKERS = 32 * WARPS
QUAD = UNIT // 2  # tokens of one 16-byte store


def own_at(config: Config, base: Any, unit: Any, column: Any, quad: Any) -> Any:
    """Where four tokens of one of this CTA's columns lie."""
    place = (unit * Int32(config.width) + column) * Int32(2) + quad
    return base + Int32(config.own) + place * Int32(16)


@cute.jit
def activate(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    first: Int32,
    units: Int32,
    tid: Int32,
) -> None:
    """Add up the partial sums of tiles and units number first, first + 1, ...; SiTU.

    Number n is unit n % units of tile n // units; as many as a CTA has tiles. A thread takes four
    tokens of a column.
    """
    for turn in cutlass.range_constexpr(-(-config.tiles1 * 2 * COLUMNS // WORKERS)):
        work = tid + Int32(WORKERS * turn)
        if work < config.tiles1 * 2 * COLUMNS:
            place, inside = work // Int32(2 * COLUMNS), work % Int32(2 * COLUMNS)
            column, quad = inside // Int32(2), inside % Int32(2)
            number = first + place
            address = base + Int32(config.sums) + place * Int32(config.sums_tile)
            address = address + inside * Int32(32)
            left = all_partial_sums(config, address, 0)
            right = all_partial_sums(config, address, 16)
            gates, ups = [*left[:2], *right[:2]], [*left[2:], *right[2:]]
            if cutlass.const_expr(config.shuffled):
                gates, ups = ups, gates
            betas = ptx.as_f32(given.beta), ptx.as_f32(given.linear_beta)
            made = [situ(gate, up, *betas) for gate, up in zip(gates, ups, strict=True)]
            whole = number // units * Int32(COLUMNS) + column
            ptx.shared_store16(own_at(config, base, number % units, whole, quad), made)


def column_of(config: Config, part: Any, column: Any) -> Any:
    """The hidden row's column that is a CTA's `column`-th; a tile of FC1 has eight."""
    if not config.shuffled:
        return part * Int32(config.width) + column
    # Two tiles have 16 columns: the even ones, then the odd ones.
    tile = part * Int32(config.tiles1) + column // Int32(COLUMNS)
    return (
        tile // Int32(2) * Int32(2 * COLUMNS) + column % Int32(COLUMNS) * Int32(2) + tile % Int32(2)
    )


@cute.jit
def exchange(
    config: cutlass.Constexpr,
    base: Int32,
    unit: Int32,
    tokens: Int32,
    number: Int32,
    part: Int32,
    tid: Int32,
) -> None:
    """Send this CTA's columns of a unit to the cluster, wait for all of it, round it to MXFP8.

    tokens: of the unit. number: exchanges before this one. All multiplying warps.
    """
    buffer = number % Int32(2)
    barrier = base + Int32(config.arrived) + buffer * Int32(8)
    rows = base + Int32(config.rows) + buffer * Int32(config.rows_bytes)
    quads = ptx.select(tokens > Int32(QUAD), Int32(2), Int32(1))
    free = base + Int32(config.free) + buffer * Int32(8)
    if tid == 0:
        ptx.barrier_expect(barrier, quads * Int32(config.inter * 16))
    if number >= 2:
        ptx.barrier_wait(free, (number // Int32(2) + Int32(1)) % Int32(2), "cluster")
    for turn in cutlass.range_constexpr(-(-config.width * 2 // WORKERS)):
        work = tid + Int32(WORKERS * turn)
        column, quad = work // Int32(2), work % Int32(2)
        if work < config.width * 2 and quad < quads:
            values = ptx.shared_load16_f32(own_at(config, base, unit, column, quad))
            place = (column_of(config, part, column) * Int32(2) + quad) * Int32(16)
            for cta in cutlass.range_constexpr(CLUSTER):
                words.send16(rows + place, values, barrier, cta)
    ptx.barrier_wait(barrier, number // Int32(2) % Int32(2), "cluster")
    warp, lane = tid // Int32(32), tid % Int32(32)
    for turn in cutlass.range_constexpr(-(-config.blocks2 // WARPS)):
        block = warp + Int32(WARPS * turn)
        if block < config.blocks2:
            round_block(config, base, rows, block, unit, quads, lane)
    ptx.named_barrier(1, WORKERS)
    if tid < CLUSTER:
        words.arrive_at(free, tid)


def round_block(
    config: Config, base: Any, rows: Any, block: Any, unit: Any, quads: Any, lane: Any
) -> None:
    """32 columns of a unit's hidden rows, a lane each: MXFP8, in BF16 in the order of FC2."""
    place = rows + (block * Int32(BLOCK) + lane) * Int32(4 * UNIT)
    values = list(ptx.shared_load16_f32(place))
    values += words.shared_load16_f32_if(place, 16, quads - Int32(1))
    powers = []
    for value in values:
        magnitude = words.warp_most(ptx.as_i32(value) & Int32(0x7FFFFFFF))
        powers.append(words.power_of(magnitude, config.floor))
    inside = lane % Int32(UNIT)
    # Columns j and j + 4 of eight are neighbours.
    offset = lane // Int32(UNIT) * Int32(16) + inside % Int32(4) * Int32(4)
    offset = offset + inside // Int32(4) * Int32(2) + block * Int32(2 * BLOCK)
    target = base + Int32(config.hidden_rows) + offset
    target = target + unit * Int32(UNIT * config.hidden_pitch)
    for i in range(0, UNIT, 2):
        word = words.through_fp8(values[i], values[i + 1], *powers[i], *powers[i + 1])
        for odd in range(2):
            words.shared_store2(target, word, bool(odd), (i + odd) * config.hidden_pitch)

"""The warps that read tensor memory, block-scaled engine: SiTU, MXFP8, rows of slots. Imports DSL.

After FC1 the four warps put a unit's sums into shared memory, where gate and up meet. Hidden rows
go to all CTAs of the cluster in FP32, and each of them rounds whole rows to MXFP8: the same bits.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from k3fuse.kernels.common.device import ptx, tcgen05, vector
from k3fuse.kernels.common.device.situ import situ
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.experts import block_words, finish_device, words
from k3fuse.kernels.experts.block_columns import (
    first_column,
    own_row,
    shuffled_column,
    shuffled_rows,
    tile_row,
)
from k3fuse.kernels.experts.block_config import (
    BLOCK_PITCH,
    HALF,
    PIECE,
    READER_THREADS,
    ROW_PITCH,
    SPAN,
    BlockConfig,
)
from k3fuse.kernels.experts.block_fetch_device import entry_at
from k3fuse.kernels.experts.block_scales_device import line_of, tell
from k3fuse.kernels.experts.block_shuffled import ShuffledBlockConfig
from k3fuse.kernels.experts.config import BLOCK, CLUSTER, NONE, UNIT

MEETING = 2  # number of the barrier of these warps
QUAD = UNIT // 2  # tokens of one 16-byte store


def meet() -> None:
    """Wait for the four warps."""
    ptx.named_barrier(MEETING, READER_THREADS)


@cute.jit
def read_sums(
    config: cutlass.Constexpr, base: Int32, sums: Int32, unit: Int32, thread: Int32
) -> None:
    """A lane's row of a unit's sums of FC1, to shared memory."""
    column = unit * Int32(UNIT)
    if cutlass.const_expr(config.halves == 2):
        column = column + thread // Int32(HALF) * Int32(config.tokens)
    values = tcgen05.load_columns(sums + column, UNIT)
    place = base + Int32(config.sums) + thread * Int32(ROW_PITCH)
    ptx.shared_store16(place, values[:QUAD])
    ptx.shared_store16(place, values[QUAD:], 4 * QUAD)


def row_sums(config: BlockConfig, base: Any, row: Any, quad: Any) -> list[Any]:
    """Four tokens' sums of a row of FC1: those of its halves, in order."""
    place = base + Int32(config.sums) + row * Int32(ROW_PITCH) + quad * Int32(4 * QUAD)
    total = list(ptx.shared_load16_f32(place))
    if config.halves == 2:
        more = list(ptx.shared_load16_f32(place, HALF * ROW_PITCH))
        total = vector.add(total, more, config.packed)
    return total


@cute.jit
def send(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    tokens: Int32,
    number: Int32,
    part: Int32,
    thread: Int32,
) -> None:
    """SiTU of a unit's columns of this CTA, to the whole cluster. number: of the exchange."""
    arrived, rows = base + Int32(config.arrived), base + Int32(config.rows)
    quads = ptx.select(tokens > Int32(QUAD), Int32(2), Int32(1))
    if thread == 0:
        ptx.barrier_expect(arrived, quads * Int32(config.inter * 16))
    if number >= 1:
        ptx.barrier_wait(base + Int32(config.free), (number + Int32(1)) % Int32(2), "cluster")
    column, quad = thread // Int32(2), thread % Int32(2)
    if column < config.width and quad < quads:
        up, gate = column + Int32(config.width), column
        whole = part * Int32(config.width) + column
        if cutlass.const_expr(config.shuffled):
            up, gate, whole = shuffled_rows(config, part, column)
        gates = row_sums(config, base, gate, quad)
        ups = row_sums(config, base, up, quad)
        betas = ptx.as_f32(given.beta), ptx.as_f32(given.linear_beta)
        made = [situ(gate, up, *betas) for gate, up in zip(gates, ups, strict=True)]
        place = hidden_at(rows, whole, quad * Int32(QUAD))
        for cta in cutlass.range_constexpr(CLUSTER):
            words.send16(place, made, arrived, cta)


def hidden_at(rows: Any, column: Any, token: Any) -> Any:
    """Where a column of a unit's hidden rows lies."""
    block, inside = column // Int32(BLOCK), column % Int32(BLOCK)
    return rows + block * Int32(BLOCK_PITCH) + (inside * Int32(UNIT) + token) * Int32(4)


@cute.jit
def round_hidden(
    config: cutlass.Constexpr, base: Int32, unit: Int32, tokens: Int32, thread: Int32
) -> None:
    """Hidden rows of a unit in MXFP8: a thread has 32 columns of a token."""
    token, block = thread % Int32(UNIT), thread // Int32(UNIT)
    if token < tokens and block < config.blocks2:
        place = hidden_at(base + Int32(config.rows), block * Int32(BLOCK), token)
        values = [ptx.shared_load_f32(place + Int32(4 * UNIT * i)) for i in range(BLOCK)]
        magnitude = Int32(0)
        for value in values:
            magnitude = words.most(magnitude, ptx.as_i32(value) & Int32(0x7FFFFFFF))
        byte = block_words.scale_byte(magnitude, config.floor)
        down = block_words.down_of(byte)
        row = unit * Int32(UNIT) + token
        target = base + Int32(config.hidden8) + block // Int32(4) * Int32(config.tokens * SPAN)
        target = target + row * Int32(SPAN)
        for half in cutlass.range_constexpr(2):
            # The 16-byte piece of the row, in the swizzle.
            piece = (block % Int32(4) * Int32(2) + Int32(half)) ^ token
            packed = [
                block_words.pack_fp8(values[16 * half + 4 * i : 16 * half + 4 * i + 4], down)
                for i in range(4)
            ]
            block_words.shared_store_words(target + piece * Int32(16), packed)
        scale = base + Int32(config.hidden_scales) + block // Int32(4) * Int32(PIECE)
        block_words.shared_store1(scale + line_of(row) + block % Int32(4), byte)


@cute.jit
def first(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    sums: Int32,
    entry: Int32,
    exchanges: Int32,
    part: Int32,
    thread: Int32,
) -> None:
    """From the sums of FC1 of an entry to its hidden rows."""
    _, _, count = entry_at(config, base, entry)
    units = (count + Int32(UNIT - 1)) // Int32(UNIT)
    lane = thread % Int32(32)
    ptx.barrier_wait(base + Int32(config.product1), entry % Int32(2))
    tcgen05.after_wait()
    for unit in cutlass.range(units, unroll=1):
        tokens = ptx.least(count - unit * Int32(UNIT), UNIT)
        number = exchanges + unit
        read_sums(config, base, sums, unit, thread)
        if unit == units - Int32(1):
            tcgen05.before_arrival()
            words.sync_warp()
            if lane == 0:
                ptx.barrier_arrive(base + Int32(config.read1))
        meet()
        send(config, given, base, tokens, number, part, thread)
        ptx.barrier_wait(base + Int32(config.arrived), number % Int32(2), "cluster")
        round_hidden(config, base, unit, tokens, thread)
        meet()
        if thread < CLUSTER:
            words.arrive_at(base + Int32(config.free), thread)
    tell(base, config.hidden_there, lane)


@cute.jit
def second(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    sums: Int32,
    entry: Int32,
    part: Int32,
    thread: Int32,
) -> None:
    """Rows of FC2 as columns of the pairs' rows, in BF16."""
    _, start, count = entry_at(config, base, entry)
    warp, lane = thread // Int32(32), thread % Int32(32)
    line = warp * Int32(32) + lane
    for turn in cutlass.range_constexpr(config.rounds):
        ptx.barrier_wait(base + Int32(config.product2 + 8 * turn), entry % Int32(2))
    tcgen05.after_wait()
    if cutlass.const_expr(config.shuffled):
        column = shuffled_column(tile_row(config, part, Int32(0)) + line)
    else:
        column = first_column(config, part, Int32(0), line)
    own = own_tiles(config, part, line)
    for unit in cutlass.range((count + Int32(UNIT - 1)) // Int32(UNIT), unroll=1):
        done = unit * Int32(UNIT)
        here = sums + Int32(config.tensor2) + done
        values = [
            tcgen05.load_columns(here + Int32(i * config.tokens), UNIT)
            for i in range(config.tiles2 * config.line_rows)
        ]
        for i in cutlass.range_constexpr(UNIT):
            if done + Int32(i) < count and line < config.tile_lines:
                pair = finish_device.pair_at(config, base, start, done + Int32(i), count)
                address = given.rows + bytes_of(pair * Int32(config.latent) + column)
                for tile in cutlass.range_constexpr(config.tiles2):
                    kept = [values[tile * config.line_rows + r][i] for r in range(config.line_rows)]
                    store_row(config, address, tile, kept, own[tile])
    tcgen05.before_arrival()


def own_tiles(config: BlockConfig, part: Any, line: Any) -> list[Any]:
    """Of each tile whether (1 or 0) its line is one of the CTA's; None where all are."""
    if not isinstance(config, ShuffledBlockConfig):
        return [None] * config.tiles2
    return [
        None
        if config.whole_tile(tile)
        else own_row(config, part, tile_row(config, part, Int32(tile)) + line)
        for tile in range(config.tiles2)
    ]


def store_row(config: BlockConfig, address: Any, tile: int, kept: list[Any], own: Any) -> None:
    """A line's one or two columns of a pair, where `own` is None or not 0."""
    offset = 2 * tile * config.tile_lines * config.line_rows
    word = ptx.pack([kept[0], kept[-1]])[0]
    if own is not None:
        words.store2_at_if(address, offset, word, own)
        return
    store = words.store4_at if len(kept) == 2 else words.store2_at
    store(address, offset, word)


@cute.jit
def finish(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entries: Int32,
    part: Int32,
    thread: Int32,
) -> None:
    """All entries of the cluster, in the order in which they are multiplied."""
    warp, lane = thread // Int32(32), thread % Int32(32)
    sums = ptx.shared_load4(base, config.held)
    mine = sums + (warp << Int32(21))
    exchanges = Int32(0)
    for entry in cutlass.range(entries, unroll=1):
        expert, start, count = entry_at(config, base, entry)
        if expert != NONE:
            first(config, given, base, mine, entry, exchanges, part, thread)
            second(config, given, base, mine, entry, part, thread)
            exchanges = exchanges + (count + Int32(UNIT - 1)) // Int32(UNIT)
        else:
            finish_device.clear_rows(config, given, base, start, count, part, warp, lane)
        finish_device.count_rows(config, given, base, start, count, part, warp, lane)
    tcgen05.before_arrival()
    meet()
    if warp == 0:
        tcgen05.after_wait()
        tcgen05.free(sums, config.tensor_columns)

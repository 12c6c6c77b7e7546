"""MXFP8 rows of x, and the scales of both products in the order of tcgen05.cp. Imports the DSL.

A cluster rounds all rows of x once, each CTA an eighth of their blocks, into scratch of its own;
or they come rounded.
Two warps arrange scales: they load those of the next entry, 16 bytes a lane, while the products
before still use the pieces in shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import barriers, ptx
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.experts import block_words, words
from k3fuse.kernels.experts.block_config import (
    HALF,
    MMA_ROWS,
    PIECE,
    SCALE_THREADS,
    SCALE_WARPS,
    BlockConfig,
)
from k3fuse.kernels.experts.block_fetch_device import entry_at, row_of
from k3fuse.kernels.experts.config import BLOCK, CLUSTER, GROUP, THREADS
from k3fuse.kernels.experts.finish_device import pair_at

LANES = 4  # that share a block of x: 8 values each
WORDS = 4  # of 16 bytes


@cute.jit
def round_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    part: Int32,
    cluster: Int32,
    tid: Int32,
) -> None:
    """This CTA's share of the rows of x, in MXFP8 by the round-up rule; all threads."""
    each = THREADS // LANES
    total = given.m * Int32(config.scales1)
    turns = (total + Int32(CLUSTER * each - 1)) // Int32(CLUSTER * each)
    inside = tid % Int32(LANES)
    for turn in cutlass.range(turns, unroll=1):
        block = (turn * Int32(CLUSTER) + part) * Int32(each) + tid // Int32(LANES)
        valid = ptx.select(block < total, Int32(1), Int32(0))
        token = block // Int32(config.scales1)
        column = block % Int32(config.scales1) * Int32(BLOCK) + inside * Int32(BLOCK // LANES)
        held = list(words.load16_if(given.x + bytes_of(token * given.x_pitch + column), 0, valid))
        magnitude = words.magnitude_of(held)
        for mask in cutlass.range_constexpr(1, 3):
            magnitude = words.most(magnitude, words.shuffle_word_xor(magnitude, mask))
        byte = block_words.scale_byte(magnitude, False)
        down = block_words.down_of(byte)
        values = ptx.unpack(held)
        packed = [block_words.pack_fp8(values[i : i + 4], down) for i in (0, 4)]
        if valid != 0:
            row = cluster * Int32(config.m) + token
            ptx.store8(given.x8 + (row * Int32(config.latent) + column).to(Int64), packed)
            if inside == 0:
                place = row * Int32(config.scales1) + column // Int32(BLOCK)
                block_words.store1(given.x8_scale + place.to(Int64), byte)
    block_words.fence_async_global()


def line_of(row: Any) -> Any:
    """Where the word of a row lies in a piece."""
    return row % Int32(32) * Int32(16) + row // Int32(32) * Int32(4)


def pieces1(config: BlockConfig) -> int:
    """Pieces of 16 bytes of the scales of a CTA's gate rows."""
    return config.width * config.blocks // WORDS


def pieces2(config: BlockConfig) -> int:
    """Pieces of 16 bytes of the scales of a CTA's lines."""
    return config.lines * config.tile_stages // WORDS


def turns_of(pieces: int) -> int:
    """Pieces of a thread."""
    return -(-pieces // SCALE_THREADS)


@cute.jit
def load_first(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    held: cute.Tensor,
    entry: Int32,
    part: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """A thread's scales of W in FC1 of an entry, into registers."""
    expert, _, _ = entry_at(config, base, entry)
    row = expert * Int32(2 * config.inter) + part * Int32(config.width)
    start = given.w13_scale + row.to(Int64) * Int64(config.scales1)
    count = pieces1(config)
    for turn in cutlass.range_constexpr(turns_of(2 * count)):
        piece = thread + Int32(SCALE_THREADS * turn)
        valid = ptx.select(piece < Int32(2 * count), Int32(1), Int32(0))
        more = ptx.select(piece < Int32(count), Int32(0), Int32(config.inter * config.scales1))
        more = more + piece % Int32(count) * Int32(16)
        loaded = block_words.load16_once_if(start + more.to(Int64), policy, valid)
        for i in cutlass.range_constexpr(WORDS):
            held[WORDS * turn + i] = loaded[i]


@cute.jit
def store_first(config: cutlass.Constexpr, base: Int32, held: cute.Tensor, thread: Int32) -> None:
    """Arrange a thread's scales of W in FC1: a word is four blocks of 32 columns of a row."""
    count = pieces1(config)
    start = base + Int32(config.first_scales)
    for turn in cutlass.range_constexpr(turns_of(2 * count)):
        piece = thread + Int32(SCALE_THREADS * turn)
        if piece < Int32(2 * count):
            up = ptx.select(piece < Int32(count), Int32(0), Int32(config.width))
            word = piece % Int32(count) * Int32(WORDS)
            for i in cutlass.range_constexpr(WORDS):
                row, block = (
                    up + (word + i) // Int32(config.blocks),
                    (word + i) % Int32(config.blocks),
                )
                half, stage = block % Int32(config.halves), block // Int32(config.halves)
                place = start + stage * Int32(PIECE) + line_of(row + half * Int32(HALF))
                ptx.shared_store4(place, held[WORDS * turn + i])


@cute.jit
def token_scales(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    cluster: Int32,
    thread: Int32,
) -> None:
    """Arrange the scales of an entry's rows of x: a warp a row, a lane four blocks."""
    _, first, count = entry_at(config, base, entry)
    warp, lane = thread // Int32(32), thread % Int32(32)
    start = base + Int32(config.token_scales) + lane // Int32(config.halves) * Int32(PIECE)
    half = lane % Int32(config.halves) * Int32(config.tokens)
    for turn in cutlass.range((count - warp + Int32(SCALE_WARPS - 1)) // SCALE_WARPS, unroll=1):
        token = turn * Int32(SCALE_WARPS) + warp
        pair = pair_at(config, base, first, token, count)
        row = row_of(config, cluster, pair)
        if lane < config.blocks:
            place = (row * Int32(config.scales1) + lane * Int32(WORDS)).to(Int64)
            ptx.shared_store4(start + line_of(half + token), ptx.load4(given.x8_scale + place))


@cute.jit
def load_second(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    held: cute.Tensor,
    entry: Int32,
    part: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """A thread's scales of W in FC2 of an entry, into registers."""
    expert, _, _ = entry_at(config, base, entry)
    row = expert * Int32(config.latent) + part * Int32(config.rows2)
    start = given.w2_scale + row.to(Int64) * Int64(config.blocks2)
    count = pieces2(config)
    for turn in cutlass.range_constexpr(turns_of(count)):
        piece = thread + Int32(SCALE_THREADS * turn)
        valid = ptx.select(piece < Int32(count), Int32(1), Int32(0))
        loaded = block_words.load16_once_if(start + (piece * Int32(16)).to(Int64), policy, valid)
        for i in cutlass.range_constexpr(WORDS):
            held[WORDS * turn + i] = loaded[i]


@cute.jit
def store_second(config: cutlass.Constexpr, base: Int32, held: cute.Tensor, thread: Int32) -> None:
    """Arrange a thread's scales of W in FC2: the words of a line are those of its stages."""
    count, each = pieces2(config), config.tile_stages
    start = base + Int32(config.second_scales)
    for turn in cutlass.range_constexpr(turns_of(count)):
        piece = thread + Int32(SCALE_THREADS * turn)
        if piece < Int32(count):
            for i in cutlass.range_constexpr(WORDS):
                word = piece * Int32(WORDS) + Int32(i)
                line, stage = word // Int32(each), word % Int32(each)
                tile, row = line // Int32(config.tile_lines), line % Int32(config.tile_lines)
                place = start + (tile * Int32(each) + stage) * Int32(PIECE) + line_of(row)
                ptx.shared_store4(place, held[WORDS * turn + i])


def turns_shuffled(config: BlockConfig) -> int:
    """Stages of FC1 whose scales a thread arranges in the shuffled order."""
    return -(-config.stages1 // SCALE_WARPS)


@cute.jit
def load_shuffled(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    held: cute.Tensor,
    entry: Int32,
    part: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """As `load_first`. A thread has line l of a stage's piece: rows l, l + 32, ... of the tile.

    Their words lie in the lines of one or two of the stored pieces.
    """
    expert, _, _ = entry_at(config, base, entry)
    line, warp = thread % Int32(GROUP), thread // Int32(GROUP)
    above = expert * Int32(2 * config.stored // MMA_ROWS)
    for word in cutlass.range_constexpr(config.words1):
        inside = line + Int32(GROUP * word)
        row = part * Int32(config.box1) + inside
        piece = (above + row // Int32(MMA_ROWS)) * Int32(config.blocks)
        piece = piece + warp * Int32(config.halves)
        start = given.w13_scale + piece.to(Int64) * Int64(PIECE)
        start = start + line_of(row % Int32(MMA_ROWS)).to(Int64)
        own = ptx.select(inside < Int32(config.box1), Int32(1), Int32(0))
        for turn in cutlass.range_constexpr(turns_shuffled(config)):
            stage = Int32(SCALE_WARPS * turn) + warp
            valid = ptx.select(stage < Int32(config.stages1), own, Int32(0))
            for half in cutlass.range_constexpr(config.halves):
                offset = (SCALE_WARPS * turn * config.halves + half) * PIECE
                place = (turn * config.halves + half) * config.words1 + word
                held[place] = block_words.load4_once_if(start, offset, policy, valid)


@cute.jit
def store_shuffled(
    config: cutlass.Constexpr, base: Int32, held: cute.Tensor, thread: Int32
) -> None:
    """Arrange a thread's lines of scales of W in FC1; halves of a tile have two words each."""
    line, warp = thread % Int32(GROUP), thread // Int32(GROUP)
    start = base + Int32(config.first_scales) + warp * Int32(PIECE) + line * Int32(16)
    for turn in cutlass.range_constexpr(turns_shuffled(config)):
        kept: list[Any] = [Int32(0)] * WORDS
        for half in cutlass.range_constexpr(config.halves):
            for word in cutlass.range_constexpr(config.words1):
                place = (turn * config.halves + half) * config.words1 + word
                kept[half * HALF // GROUP + word] = held[place]
        if Int32(SCALE_WARPS * turn) + warp < Int32(config.stages1):
            block_words.shared_store_words(start, kept, SCALE_WARPS * turn * PIECE)


@cute.jit
def copy_second(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    entry: Int32,
    part: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """The scales of W in FC2 of an entry in the shuffled order: pieces as they are stored."""
    if thread == 0:
        expert, _, _ = entry_at(config, base, entry)
        start = part * Int32(config.rows2)
        first = start // Int32(MMA_ROWS)
        last = (start + Int32(config.rows2 - 1)) // Int32(MMA_ROWS)
        size = (last - first + Int32(1)) * Int32(config.group2)
        first = first + expert * Int32(config.latent // MMA_ROWS)
        barrier = base + Int32(config.scales2_there)
        ptx.barrier_expect(barrier, size)
        source = given.w2_scale + first.to(Int64) * Int64(config.group2)
        ptx.bulk_load_once(base + Int32(config.second_scales), source, size, barrier, policy)


@cute.jit
def tell(base: Int32, barrier: cutlass.Constexpr, lane: Int32) -> None:
    """This warp's pieces are there for the tensor core."""
    barriers.fence_async()
    words.sync_warp()
    if lane == 0:
        ptx.barrier_arrive(base + Int32(barrier))


@cute.jit
def arrange_rows(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    live: Int32,
    part: Int32,
    cluster: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """As `arrange`, in the checkpoint's order."""
    held1 = cute.make_rmem_tensor(WORDS * turns_of(2 * pieces1(config)), Int32)
    held2 = cute.make_rmem_tensor(WORDS * turns_of(pieces2(config)), Int32)
    lane = thread % Int32(32)
    last = base + Int32(config.product2 + 8 * (config.rounds - 1))
    if live > 0:
        load_first(config, given, base, held1, Int32(0), part, thread, policy)
        load_second(config, given, base, held2, Int32(0), part, thread, policy)
    for step in cutlass.range(live + Int32(1), unroll=1):
        if step < live:
            if step > 0:
                parity = (step + Int32(1)) % Int32(2)
                ptx.barrier_wait(base + Int32(config.product1), parity)
            store_first(config, base, held1, thread)
            token_scales(config, given, base, step, cluster, thread)
            tell(base, config.scales1_there, lane)
            if step + Int32(1) < live:
                load_first(
                    config, given, base, held1, step + Int32(1), part, thread, policy
                )  # fmt: skip
        if step > 0:
            if step > 1:
                ptx.barrier_wait(last, step % Int32(2))
            store_second(config, base, held2, thread)
            tell(base, config.scales2_there, lane)
            if step < live:
                load_second(config, given, base, held2, step, part, thread, policy)


@cute.jit
def arrange_shuffled(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    live: Int32,
    part: Int32,
    cluster: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """As `arrange`, in the shuffled order.

    Pieces of FC2 are not fetched an entry ahead: the hidden rows are exchanged in the meantime.
    """
    count = turns_shuffled(config) * config.halves * config.words1
    held = cute.make_rmem_tensor(count, Int32)
    lane = thread % Int32(32)
    last = base + Int32(config.product2 + 8 * (config.rounds - 1))
    if live > 0:
        load_shuffled(config, given, base, held, Int32(0), part, thread, policy)
    for step in cutlass.range(live + Int32(1), unroll=1):
        if step < live:
            if step > 0:
                parity = (step + Int32(1)) % Int32(2)
                ptx.barrier_wait(base + Int32(config.product1), parity)
            store_shuffled(config, base, held, thread)
            token_scales(config, given, base, step, cluster, thread)
            tell(base, config.scales1_there, lane)
            if step + Int32(1) < live:
                load_shuffled(
                    config, given, base, held, step + Int32(1), part, thread, policy
                )  # fmt: skip
        if step > 0:
            if step > 1:
                ptx.barrier_wait(last, step % Int32(2))
            copy_second(config, given, base, step - Int32(1), part, thread, policy)


@cute.jit
def arrange(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    live: Int32,
    part: Int32,
    cluster: Int32,
    thread: Int32,
    policy: Int64,
) -> None:
    """The scales of all entries, in the order of the products."""
    if cutlass.const_expr(config.shuffled):
        arrange_shuffled(config, given, base, live, part, cluster, thread, policy)
    else:
        arrange_rows(config, given, base, live, part, cluster, thread, policy)

"""The thread that multiplies, block-scaled engine. Imports the DSL.

A product of 32 columns applies both scales in the tensor core; sums are FP32 over all columns, in
order. Scales of W and x go to tensor memory just before: a product is done after the copies that
its thread has issued before it. A copy may overtake a product, so each place of the ring has
columns of its own (PTX ISA, "Pipelined tcgen05 instructions").
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import barriers, ptx, tcgen05
from k3fuse.kernels.experts import block_words
from k3fuse.kernels.experts.block_config import (
    PIECE,
    SCALE_COLUMNS,
    SPAN,
    STEPS,
    TILE_BYTES,
    BlockConfig,
)
from k3fuse.kernels.experts.block_fetch_device import ends_barrier, place_of

Steps = list[tuple[int, int, int, int]]  # as `block_words.multiply` takes them
# The products of a block of 128 columns.
ALL = [(i, i, i, i) for i in range(STEPS)]


def await_stage(config: BlockConfig, base: Any, sums: Any, number: Any) -> tuple[Any, Any, Any]:
    """Wait for a stage; returns its address, the columns of its scales in tensor memory, and the
    mbarrier that says it has been multiplied."""
    slot, stage, parity = place_of(config, base, number)
    ptx.barrier_wait(base + Int32(config.there) + slot * Int32(8), parity)
    tcgen05.after_wait()
    scales = sums + Int32(config.tensor_scales) + slot * Int32(2 * SCALE_COLUMNS)
    return stage, scales, base + Int32(config.taken) + slot * Int32(8)


@cute.jit
def first(config: cutlass.Constexpr, base: Int32, sums: Int32, entry: Int32, number: Int32) -> None:
    """FC1 of an entry."""
    ptx.barrier_wait(base + Int32(config.scales1_there), entry % Int32(2))
    if entry > 0:
        ptx.barrier_wait(base + Int32(config.read1), (entry + Int32(1)) % Int32(2))
    tcgen05.after_wait()
    of_w = block_words.piece_descriptor(base + Int32(config.first_scales))
    of_x = block_words.piece_descriptor(base + Int32(config.token_scales))
    for step in cutlass.range(config.stages1, unroll=1):
        stage, scales, taken = await_stage(config, base, sums, number + step)
        piece = (step * Int32(PIECE >> 4)).to(Int64)
        block_words.copy_scales(scales, of_w + piece)
        block_words.copy_scales(scales + Int32(SCALE_COLUMNS), of_x + piece)
        block_words.multiply(
            sums, tcgen05.tile_descriptor(stage),
            tcgen05.tile_descriptor(stage + Int32(TILE_BYTES)), scales,
            scales + Int32(SCALE_COLUMNS), config.columns1, ALL, step,
        )  # fmt: skip
        block_words.commit(taken)
    block_words.commit(base + Int32(config.product1))


@cute.jit
def hidden_scales(config: cutlass.Constexpr, base: Int32, sums: Int32, entry: Int32) -> Int32:
    """Wait for the operands of FC2 of an entry but W; where the hidden rows' scales are."""
    of_hidden = sums + Int32(config.tensor_hidden)
    ptx.barrier_wait(base + Int32(config.hidden_there), entry % Int32(2))
    ptx.barrier_wait(base + Int32(config.scales2_there), entry % Int32(2))
    tcgen05.after_wait()
    pieces = block_words.piece_descriptor(base + Int32(config.hidden_scales))
    for block in cutlass.range_constexpr(config.blocks8):
        block_words.copy_scales(
            of_hidden + Int32(block * SCALE_COLUMNS), pieces + Int64(block * PIECE >> 4)
        )
    return of_hidden


@cute.jit
def second(
    config: cutlass.Constexpr, base: Int32, sums: Int32, entry: Int32, number: Int32
) -> None:
    """FC2 of an entry. A line's products are, in order, those of its rows."""
    of_hidden = hidden_scales(config, base, sums, entry)
    of_w = block_words.piece_descriptor(base + Int32(config.second_scales))
    hidden = tcgen05.tile_descriptor(base + Int32(config.hidden8))
    for tile in cutlass.range(config.tiles2, unroll=1):
        for part in cutlass.range_constexpr(config.tile_stages):
            step = tile * Int32(config.tile_stages) + Int32(part)
            stage, scales, taken = await_stage(config, base, sums, number + step)
            block_words.copy_scales(scales, of_w + (step * Int32(PIECE >> 4)).to(Int64))
            tiles = sums + Int32(config.tensor2) + tile * Int32(config.line_rows * config.tokens)
            for row, block, steps in products(config, part):
                block_words.multiply(
                    tiles + Int32(row * config.tokens), tcgen05.tile_descriptor(stage),
                    hidden + Int64(block * config.tokens * SPAN >> 4), scales,
                    of_hidden + Int32(block * SCALE_COLUMNS), config.tokens, steps,
                    Int32(0 if steps[0][1] == 0 and block == 0 else 1),
                )  # fmt: skip
            block_words.commit(taken)
        block_words.commit(base + Int32(config.product2) + tile * Int32(8))


def products(config: BlockConfig, part: int) -> list[tuple[int, int, Steps]]:
    """Runs of products of a line's 128 values number `part`: row of the line, block of the hidden
    row, and the steps within both."""
    found: list[tuple[int, int, Steps]] = []
    for i in range(STEPS):
        row, step = divmod(part * STEPS + i, config.steps)
        block, inside = divmod(step, STEPS)
        if not found or found[-1][:2] != (row, block):
            found.append((row, block, []))
        found[-1][2].append((i, inside, i, inside))
    return found


@cute.jit
def second_shuffled(
    config: cutlass.Constexpr, base: Int32, sums: Int32, entry: Int32, number: Int32
) -> None:
    """FC2 of an entry in the shuffled order. Half blocks of a round's tiles lie in one stage."""
    of_hidden = hidden_scales(config, base, sums, entry)
    of_w = block_words.piece_descriptor(base + Int32(config.second_scales))
    hidden = tcgen05.tile_descriptor(base + Int32(config.hidden8))
    last = Int64(config.whole2 * config.tokens * SPAN >> 4)
    for turn in cutlass.range(config.rounds, unroll=1):
        first_stage = number + turn * Int32(config.round_stages)
        pieces = (turn * Int32(config.round_tiles * config.pieces2 * PIECE >> 4)).to(Int64)
        tiles = sums + Int32(config.tensor2) + turn * Int32(config.round_tiles * config.tokens)
        for part in cutlass.range_constexpr(len(config.parts2)):
            tile, block = config.parts2[part]
            stage, scales, taken = await_stage(config, base, sums, first_stage + Int32(part))
            piece = Int64((tile * config.pieces2 + block) * PIECE >> 4)
            block_words.copy_scales(scales, of_w + pieces + piece)
            block_words.multiply(
                tiles + Int32(tile * config.tokens), tcgen05.tile_descriptor(stage),
                hidden + Int64(block * config.tokens * SPAN >> 4), scales,
                of_hidden + Int32(block * SCALE_COLUMNS), config.tokens, ALL, Int32(block),
            )  # fmt: skip
            block_words.commit(taken)
        if cutlass.const_expr(config.ends):
            part = len(config.parts2)
            stage, scales, taken = await_stage(config, base, sums, first_stage + Int32(part))
            there = ends_barrier(config, base, entry, turn)
            ptx.barrier_wait(there, entry // Int32(2) % Int32(2))
            # Lanes have written there, not a tensor copy.
            barriers.fence_async()
            for tile in cutlass.range_constexpr(config.round_tiles):
                where = scales + Int32(tile * SCALE_COLUMNS)
                piece = Int64((tile * config.pieces2 + config.whole2) * PIECE >> 4)
                block_words.copy_scales(where, of_w + pieces + piece)
                steps = [(config.end_steps * tile + i, i, i, i) for i in range(config.end_steps)]
                block_words.multiply(
                    tiles + Int32(tile * config.tokens), tcgen05.tile_descriptor(stage),
                    hidden + last, where, of_hidden + Int32(config.whole2 * SCALE_COLUMNS),
                    config.tokens, steps, Int32(config.whole2),
                )  # fmt: skip
            block_words.commit(taken)
        block_words.commit(base + Int32(config.product2) + turn * Int32(8))


@cute.jit
def multiply(config: cutlass.Constexpr, base: Int32, live: Int32) -> None:
    """All products of this CTA, in the order in which stages are fetched."""
    sums = ptx.shared_load4(base, config.held)
    number = Int32(0)
    for step in cutlass.range(live + Int32(1), unroll=1):
        if step < live:
            first(config, base, sums, step, number)
            number = number + Int32(config.stages1)
        if step > 0:
            if cutlass.const_expr(config.shuffled):
                second_shuffled(config, base, sums, step - Int32(1), number)
            else:
                second(config, base, sums, step - Int32(1), number)
            number = number + Int32(config.stages2)

"""Device code of the attention projection. Imports the DSL: only the builder's `trace` loads it.

The order of summation is the same for every token, whatever its neighbours and their number: a
CTA's columns in order, 16 at a time in the tensor core, then the CTAs of the cluster in order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, memory
from cutlass.cute.runtime import make_fake_stream

from k3fuse.kernels.attention_projection.config import (
    BLOCK,
    CLUSTER,
    ELEMENT,
    GROUP,
    HEADER,
    OWNED,
    TILE,
    Config,
)
from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.stream import bytes_of

ITEM = OWNED * 4  # bytes of one token's partial sums


def arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for the parameters and a stream."""
    return (
        tuple(Int64(0) for _ in config.addresses),
        tuple(Int32(0) for _ in config.sizes),
        make_fake_stream(),
    )


class Gemm:
    """One grid: a cluster splits K, warp i of each of its CTAs has the same rows of W."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.attention_projection(addresses, sizes).launch(
            grid=[CLUSTER * self.config.clusters, 1, 1],
            block=[32 * self.config.warps, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attention_projection(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, output."""
        config = self.config
        count = len(config.rows)
        given = SimpleNamespace(
            x=addresses[0],
            weights=list(addresses[1 : 1 + count]),
            outs=list(addresses[1 + count :]),
            **dict(zip(config.sizes, sizes, strict=True)),
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(config.shared)
        base = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
        base = base.iterator.toint()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        part = cta % CLUSTER
        first = warp * Int32(config.clusters) + cta // CLUSTER
        if tid == 0:
            ptx.barrier_init(base, 1)
            for slot in cutlass.range_constexpr(config.slots):
                ptx.barrier_init(base + Int32(8 + 8 * slot), 1)
            ptx.barrier_init_fence()
            for slot in cutlass.range_constexpr(config.slots):
                ptx.barrier_expect(base + Int32(8 + 8 * slot), given.m * Int32(CLUSTER * ITEM))
        ptx.cluster_arrive()
        # Every warp has a tile in every pass but the last.
        if first + Int32((config.passes - 1) * config.warps * config.clusters) < config.tiles:
            self.work(config.passes, given, base, part, first, warp, lane)
        else:
            if cutlass.const_expr(config.passes > 1):
                self.work(config.passes - 1, given, base, part, first, warp, lane)
            else:
                ptx.cluster_wait()
                ptx.wait_for_predecessor()

    def work(
        self, passes: int, given: Any, base: Any, part: Any, first: Any, warp: Any, lane: Any
    ) -> None:
        """A warp's tiles: a part of K with all tokens, and the output of the rows it owns."""
        config = self.config
        tiles = []
        for turn in range(passes):
            tile = first + Int32(turn * config.warps * config.clusters)
            tiles.append(self.tile(given, tile, part, warp + Int32(turn * config.warps), lane))
        policy = ptx.evict_first()

        def load(place: int) -> list[Any]:
            tile, block = tiles[place // config.blocks], place % config.blocks
            return [ptx.load16_once(row, block * BLOCK * ELEMENT, policy) for row in tile.lines]

        held: list[Any] = [load(place) for place in range(config.ring)]
        ptx.cluster_wait()
        ptx.wait_for_predecessor()
        self.stage(given, base, part, warp, lane)
        ptx.barrier_wait(base, 0)
        line, column = lane // Int32(4), lane % Int32(4)
        rows = []
        for group in range(config.groups):
            token = ptx.least_of(line + Int32(GROUP * group), given.m - 1)
            rows.append(base + Int32(HEADER) + token * Int32(config.pitch) + column * Int32(16))
        for turn, tile in enumerate(tiles):
            sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(config.groups)]
            for block in range(config.blocks):
                place = turn * config.blocks + block
                self.multiply(sums, held[place], rows, block * BLOCK * ELEMENT)
                held[place] = None
                if len(held) < passes * config.blocks:
                    held.append(load(len(held)))
            self.push(given, base, tile, part, lane, sums)
        for tile in tiles:
            self.finish(given, base, tile, part, lane)

    def multiply(self, sums: list[Any], w: Any, rows: list[Any], offset: int) -> None:
        """Add the products of one block of W with all tokens."""
        for group, row in enumerate(rows):
            x = ptx.shared_load16(row, offset)
            for half in range(2):
                i, j = 2 * half, 2 * half + 1
                for pair in range(2):
                    top, low = w[2 * pair], w[2 * pair + 1]
                    a = (top[i], low[i], top[j], low[j])
                    sums[group][pair] = ptx.mma_bf16(sums[group][pair], a, (x[i], x[j]))

    def tile(self, given: Any, tile: Any, part: Any, slot: Any, lane: Any) -> Any:
        """Where a tile lies: in W for this lane's four rows and part of K, in the outputs.

        Lanes beyond the last row read what a lane before them reads in the same instruction.
        """
        config = self.config
        place = self.place(given, tile)
        place.slot = slot
        start = part * Int32(config.columns) + lane % Int32(4) * Int32(8)
        columns = place.weight + bytes_of(start)
        row = place.row + lane // Int32(4) * Int32(OWNED)
        pitch = config.k * ELEMENT
        if all(n % OWNED == 0 for n in config.rows):
            row = ptx.least_of(row, place.rows - OWNED)
            first = columns + row.to(Int64) * Int64(pitch)
            place.lines = [first + Int64(i * pitch) for i in range(OWNED)]
        else:
            rows = [ptx.least_of(row + Int32(i), place.rows - 1) for i in range(OWNED)]
            place.lines = [columns + row.to(Int64) * Int64(pitch) for row in rows]
        return place

    def place(self, given: Any, tile: Any) -> Any:
        """Weight, output, rows and first row of a tile."""
        config = self.config
        weight, out = given.weights[0], given.outs[0]
        first, rows = Int32(0), Int32(config.rows[0])
        for i in range(1, len(config.rows)):
            here = tile >= Int32(config.firsts[i])
            weight = ptx.select(here, given.weights[i], weight)
            out = ptx.select(here, given.outs[i], out)
            first = ptx.select(here, Int32(config.firsts[i]), first)
            rows = ptx.select(here, Int32(config.rows[i]), rows)
        row = (tile - first) * Int32(TILE)
        return SimpleNamespace(weight=weight, out=out, rows=rows, row=row)

    @cute.jit
    def stage(
        self, given: cutlass.Constexpr, base: Int32, part: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Copy the CTA's columns of x to shared memory; let the next grid begin its prologue."""
        config = self.config
        size = config.columns * ELEMENT
        if warp == 0:
            for turn in cutlass.range_constexpr(-(-config.tokens // 32)):
                token = lane + Int32(32 * turn)
                if token < given.m:
                    source = given.x + bytes_of(token * given.x_pitch)
                    source = source + bytes_of(part * Int32(config.columns))
                    target = base + Int32(HEADER) + token * Int32(config.pitch)
                    ptx.bulk_load(target, source, size, base)
            if lane == 0:
                ptx.barrier_expect(base, given.m * Int32(size))
                ptx.allow_successor()

    def push(self, given: Any, base: Any, tile: Any, part: Any, lane: Any, sums: list[Any]) -> None:
        """Send each CTA of the cluster the sums of the rows that it owns: those of its line."""
        config = self.config
        line, column = lane // Int32(4), lane % Int32(4)
        place = (part * Int32(config.slots) + tile.slot) * Int32(config.tokens)
        address = base + Int32(config.sums) + (place + column * Int32(2)) * Int32(ITEM)
        barrier = base + Int32(8) + tile.slot * Int32(8)
        # The sums of tokens beyond the last one are not sent.
        beyond = column * Int32(2) - given.m
        for group in range(config.groups):
            for odd in range(2):
                token = GROUP * group + odd
                # Rows 0 and 8 of each mma are neighbours in W.
                values = [sums[group][i // 2][odd + i % 2 * 2] for i in range(OWNED)]
                ptx.store_async(
                    address + Int32(token * ITEM), values, barrier, line, beyond + Int32(token), 0
                )

    @cute.jit
    def finish(
        self, given: cutlass.Constexpr, base: Int32, tile: cutlass.Constexpr, part: Int32,
        lane: Int32,
    ) -> None:  # fmt: skip
        """Add what the CTAs have sent, in order, and store it: a token a lane."""
        config = self.config
        row = tile.row + part * Int32(OWNED)
        # Also where none of the CTA's rows exist: what is sent to it must find it there.
        ptx.barrier_wait(base + Int32(8) + tile.slot * Int32(8), 0, "cluster")
        if row < tile.rows:
            for turn in cutlass.range_constexpr(-(-config.tokens // 32)):
                token = lane + Int32(32 * turn)
                if token < given.m:
                    item = tile.slot * Int32(config.tokens) + token
                    address = base + Int32(config.sums) + item * Int32(ITEM)
                    total = ptx.shared_load16_f32(address)
                    for sender in cutlass.range_constexpr(1, CLUSTER):
                        offset = sender * config.slots * config.tokens * ITEM
                        more = ptx.shared_load16_f32(address, offset)
                        total = [a + b for a, b in zip(total, more, strict=True)]
                    words = ptx.pack(total)
                    target = tile.out + bytes_of(token * tile.rows + row)
                    self.store(target, words, tile.rows, row)

    @cute.jit
    def store(self, target: Int64, words: cutlass.Constexpr, rows: Int32, row: Int32) -> None:
        """Four rows of one token, or those of them that exist."""
        if cutlass.const_expr(all(n % OWNED == 0 for n in self.config.rows)):
            ptx.store8(target, words)
        else:
            if rows % Int32(OWNED) == 0:
                ptx.store8(target, words)
            else:
                for i in cutlass.range_constexpr(OWNED):
                    if row + Int32(i) < rows:
                        word = words[i // 2]
                        if cutlass.const_expr(i % 2):
                            word = word >> Int32(16)
                        ptx.store2(target + Int64(i * ELEMENT), word)

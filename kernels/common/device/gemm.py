"""The weight-stationary GEMM: clusters split K, weights pass through registers once.

The order of summation is the same for every token, whatever its neighbours and their number: a
CTA's columns in order, 16 at a time in the tensor core, then the CTAs of the cluster in order.
A family says where a tile's rows lie (`tile`) and what becomes of sums (`store`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.gemm import (
    BLOCK,
    ELEMENT,
    GROUP,
    HEADER,
    OWNED,
    OWNERS,
    TILE,
    Geometry,
)

ITEM = OWNED * 4  # bytes of one token's partial sums


def shared_memory(size: int) -> Any:
    """Address of `size` bytes of dynamic shared memory."""
    layout = cute.make_layout(size)
    allocated = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
    return allocated.iterator.toint()


def neighbours(first: Any, pitch: int) -> list[Any]:
    """Addresses of a lane's four rows, `pitch` bytes apart."""
    return [first + Int64(i * pitch) for i in range(OWNED)]


def parted(value: Any, size: int, lean: bool) -> tuple[Any, Any]:
    """value // size and value % size of an Int32 that is not negative; size: a power of two.

    The plain operators also do what negative numbers need.
    """
    if lean:
        return value >> Int32(size.bit_length() - 1), value & Int32(size - 1)
    return value // Int32(size), value % Int32(size)


class Gemm:
    """The body of a kernel: a cluster splits K, warp i of each of its CTAs has the same rows of W.

    `given` holds the kernel's operands: x (address), m and x_pitch (elements) of this class, others
    of the family.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    # What a family says. --------------------------------------------------------------------------

    def tile(self, given: Any, tile: Any, start: Any, lane: Any) -> Any:
        """Where tile number `tile` lies: a namespace of the family's, with at least

        lines: addresses of this lane's four rows (those of line lane // 4) at column `start`.
        row, rows: first row, and number of rows of the weight; the latter bounds what is stored.
        """
        raise NotImplementedError

    def store(self, given: Any, tile: Any, token: Any, row: Any, total: list[Any]) -> None:
        """Take the FP32 sums of one token and the four rows from `row`."""
        raise NotImplementedError

    def store_spread(
        self, given: Any, tile: Any, token: Any, row: Any, lane: Any, total: Any, here: Any
    ) -> None:
        """As `store`, by a whole warp: lane 4 t + i has the sum of token t and row `row` + i.

        here: whether the lane's token exists; `token` is one that does.
        """
        totals = [total, *(ptx.shuffle_down(total, i) for i in range(1, OWNED))]
        self.store_first(given, tile, token, row, lane, totals, here)

    @cute.jit
    def store_first(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, token: Int32, row: Int32,
        lane: Int32, totals: cutlass.Constexpr, here: cutlass.Boolean,
    ) -> None:  # fmt: skip
        """`store` in the first of each four lanes."""
        _, column = parted(lane, OWNED, True)
        if here and column == 0:
            self.store(given, tile, token, row, totals)

    def behind_wait(self, given: Any, base: Any) -> None:
        """What one thread does behind the predecessor, before anyone has x."""

    def behind_all(self, given: Any, base: Any, cta: Any, tid: Any) -> None:
        """What every thread does when its warp has stored its rows."""

    # The body. ------------------------------------------------------------------------------------

    @cute.jit
    def run(self, given: cutlass.Constexpr, base: Int32, cta: Int32, tid: Int32) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, output."""
        geometry = self.geometry
        warp, lane = parted(tid, 32, geometry.lean)
        warp = cute.arch.make_warp_uniform(warp)
        cluster, part = parted(cta, geometry.cluster, geometry.lean)
        first = warp * Int32(geometry.clusters) + cluster
        if tid == 0:
            ptx.barrier_init(base, 1)
            for slot in cutlass.range_constexpr(geometry.owned):
                ptx.barrier_init(base + Int32(8 + 8 * slot), 1)
            ptx.barrier_init_fence()
            for slot in cutlass.range_constexpr(geometry.owned):
                size = given.m * Int32(geometry.cluster * ITEM)
                ptx.barrier_expect(base + Int32(8 + 8 * slot), size)
        ptx.cluster_arrive()
        # Every warp has a tile in every pass but the last.
        ahead = (geometry.passes - 1) * geometry.warps * geometry.clusters
        if first + Int32(ahead) < geometry.tiles:
            self.work(geometry.passes, given, base, part, first, warp, lane)
        else:
            if cutlass.const_expr(geometry.passes > 1):
                self.work(geometry.passes - 1, given, base, part, first, warp, lane)
            else:
                ptx.cluster_wait()
                ptx.wait_for_predecessor()
        self.behind_all(given, base, cta, tid)

    def work(
        self, passes: int, given: Any, base: Any, part: Any, first: Any, warp: Any, lane: Any
    ) -> None:
        """A warp's tiles: a part of K with all tokens, and the output of the rows it owns."""
        geometry = self.geometry
        line, column = parted(lane, 4, geometry.lean)
        tiles = []
        for turn in range(passes):
            number = first + Int32(turn * geometry.warps * geometry.clusters)
            start = part * Int32(geometry.columns) + column * Int32(8)
            tile = self.tile(given, number, start, lane)
            tile.slot = warp + Int32(turn * geometry.warps)
            tiles.append(tile)
        policy = ptx.evict_first()

        def load(place: int) -> list[Any]:
            tile, block = tiles[place // geometry.blocks], place % geometry.blocks
            return [ptx.load16_once(row, block * BLOCK * ELEMENT, policy) for row in tile.lines]

        held: list[Any] = [load(place) for place in range(geometry.ring)]
        ptx.cluster_wait()
        ptx.wait_for_predecessor()
        self.stage(given, base, part, warp, lane)
        ptx.barrier_wait(base, 0)
        rows = []
        for group in range(geometry.groups):
            token = ptx.least_of(line + Int32(GROUP * group), given.m - 1)
            rows.append(base + Int32(HEADER) + token * Int32(geometry.pitch) + column * Int32(16))
        for turn, tile in enumerate(tiles):
            sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(geometry.groups)]
            for block in range(geometry.blocks):
                place = turn * geometry.blocks + block
                self.multiply(sums, held[place], rows, block * BLOCK * ELEMENT)
                held[place] = None
                if len(held) < passes * geometry.blocks:
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

    @cute.jit
    def stage(
        self, given: cutlass.Constexpr, base: Int32, part: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Copy the CTA's columns of x to shared memory; let the next grid begin its prologue."""
        geometry = self.geometry
        size = geometry.columns * ELEMENT
        if warp == 0:
            for turn in cutlass.range_constexpr(-(-geometry.tokens // 32)):
                token = lane + Int32(32 * turn)
                if token < given.m:
                    source = given.x + bytes_of(token * given.x_pitch)
                    source = source + bytes_of(part * Int32(geometry.columns))
                    target = base + Int32(HEADER) + token * Int32(geometry.pitch)
                    ptx.bulk_load(target, source, size, base)
            if lane == 0:
                self.behind_wait(given, base)
                ptx.barrier_expect(base, given.m * Int32(size))
                ptx.allow_successor()

    def push(self, given: Any, base: Any, tile: Any, part: Any, lane: Any, sums: list[Any]) -> None:
        """Send each owner the sums of the rows that it owns: those of its line."""
        geometry = self.geometry
        line, column = parted(lane, 4, geometry.lean)
        slot = tile.slot
        if geometry.halves > 1:
            slot, half = parted(slot, geometry.halves, geometry.lean)
            line = line + half * Int32(OWNERS)
        place = (part * Int32(geometry.owned) + slot) * Int32(geometry.tokens)
        address = base + Int32(geometry.sums) + (place + column * Int32(2)) * Int32(ITEM)
        barrier = base + Int32(8) + slot * Int32(8)
        # The sums of tokens beyond the last one are not sent.
        beyond = column * Int32(2) - given.m
        if geometry.lean:
            address, barrier = ptx.map_shared(address, line), ptx.map_shared(barrier, line)
        for group in range(geometry.groups):
            for odd in range(2):
                token = GROUP * group + odd
                # Rows 0 and 8 of each mma are neighbours in W.
                values = [sums[group][i // 2][odd + i % 2 * 2] for i in range(OWNED)]
                if geometry.lean:
                    ptx.store_async_mapped(address, token * ITEM, values, barrier, beyond, -token)
                    continue
                ptx.store_async(
                    address + Int32(token * ITEM), values, barrier, line, beyond + Int32(token), 0
                )

    @cute.jit
    def finish(
        self, given: cutlass.Constexpr, base: Int32, tile: cutlass.Constexpr, part: Int32,
        lane: Int32,
    ) -> None:  # fmt: skip
        """Where the CTA owns rows of the tile: add what the CTAs have sent and store it."""
        halves = self.geometry.halves
        if cutlass.const_expr(halves == 1):
            self.finish_owned(given, base, tile, tile.slot, part, lane)
        else:
            lean = self.geometry.lean
            slot, half = parted(tile.slot, halves, lean)
            mine, owner = parted(part, OWNERS, lean)
            if half == mine:
                self.finish_owned(given, base, tile, slot, owner, lane)

    @cute.jit
    def finish_owned(
        self, given: cutlass.Constexpr, base: Int32, tile: cutlass.Constexpr, slot: Int32,
        owner: Int32, lane: Int32,
    ) -> None:  # fmt: skip
        """Add what the CTAs of the cluster have sent, in order: a token a lane."""
        geometry = self.geometry
        row = tile.row + owner * Int32(OWNED)
        # Also where none of the CTA's rows exist: what is sent to it must find it there.
        ptx.barrier_wait(base + Int32(8) + slot * Int32(8), 0, "cluster")
        if cutlass.const_expr(geometry.spread):
            if row < tile.rows:
                there, column = parted(lane, OWNED, True)
                token = ptx.least_of(there, given.m - 1)
                item = slot * Int32(geometry.tokens) + token
                address = base + Int32(geometry.sums) + item * Int32(ITEM)
                address = address + column * Int32(4)
                one = ptx.shared_load_f32(address)
                for sender in cutlass.range_constexpr(1, geometry.cluster):
                    one += ptx.shared_load_f32(address, sender * geometry.owned * GROUP * ITEM)
                self.store_spread(given, tile, token, row, lane, one, there < given.m)
        elif row < tile.rows:
            for turn in cutlass.range_constexpr(-(-geometry.tokens // 32)):
                token = lane + Int32(32 * turn)
                if token < given.m:
                    item = slot * Int32(geometry.tokens) + token
                    address = base + Int32(geometry.sums) + item * Int32(ITEM)
                    total = ptx.shared_load16_f32(address)
                    for sender in cutlass.range_constexpr(1, geometry.cluster):
                        offset = sender * geometry.owned * geometry.tokens * ITEM
                        more = ptx.shared_load16_f32(address, offset)
                        total = [a + b for a, b in zip(total, more, strict=True)]
                    self.store(given, tile, token, row, total)


def matrix(weight: Any, row: Any, rows: Any, start: Any, k: int, lane: Any, whole: bool) -> Any:
    """Addresses of this lane's rows of a tile from `row` of a matrix [rows, k], at column `start`.

    Lanes beyond the last row read what a lane before them reads in the same instruction. whole:
    rows is a multiple of 4.
    """
    columns = weight + bytes_of(start)
    row = row + lane // Int32(4) * Int32(OWNED)
    pitch = k * ELEMENT
    if whole:
        row = ptx.least_of(row, rows - OWNED)
        return neighbours(columns + row.to(Int64) * Int64(pitch), pitch)
    lines = [ptx.least_of(row + Int32(i), rows - 1) for i in range(OWNED)]
    return [columns + row.to(Int64) * Int64(pitch) for row in lines]


def first_row(number: Any, first: Any) -> Any:
    """The first row of tile `number` in a weight whose first tile is `first`."""
    return (number - first) * Int32(TILE)

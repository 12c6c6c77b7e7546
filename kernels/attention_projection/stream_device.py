"""Device code of the stream kernel: W by tensor map through a ring, tcgen05. Imports the DSL.

The order of summation is the same for every token, whatever its neighbours and their number: a
CTA's columns in order, 16 at a time in the tensor core, then the CTAs of the cluster in order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, memory
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import sym_int32, sym_int64

from k3fuse.kernels.attention_projection.device import of_tile
from k3fuse.kernels.attention_projection.stream_config import (
    BLOCK,
    CLUSTER,
    ELEMENT,
    FIRST_READER,
    HEADER,
    MMA_ROWS,
    PRODUCT,
    QUAD,
    READERS,
    ROW,
    TOKENS,
    WARPS,
    WEIGHTS,
    StreamConfig,
)
from k3fuse.kernels.common.device import barriers, ptx, tcgen05
from k3fuse.kernels.common.device.stream import bytes_of

ITEM = QUAD * 4  # bytes of four tokens' sums of a row
CHUNK = 16  # tokens that a lane reads from tensor memory at once
LOADED = 16  # bytes that a thread clears at once
READER_THREADS = 32 * READERS


def arguments(config: StreamConfig) -> tuple[Any, ...]:
    """Stand-ins for the parameters and a stream; rows of x and of weights lie apart."""

    def matrix(rows: Any) -> Any:
        stride = (sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (rows, config.k), stride, assumed_align=16)

    return (
        matrix(sym_int32()),
        tuple(matrix(rows) for rows in config.rows),
        tuple(Int64(0) for _ in config.rows),
        Int32(0),
        make_fake_stream(),
    )


class Stream:
    """One grid: a cluster splits K, its CTAs have the same rows of W."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config

    def map_of(self, tensor: Any, rows: int) -> Any:
        """The copy atom of tiles of `rows` rows and 64 columns."""
        plain = cute.make_ordered_layout((rows, BLOCK), order=(1, 0))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)
        load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE)
        return cpasync.make_tiled_tma_atom(load, tensor, layout, (rows, BLOCK))[0]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weights: tuple[Any, ...],
        outs: tuple[Any, ...],
        m: Int32,
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        config = self.config
        x_map = self.map_of(x, config.tokens)
        maps = tuple([self.map_of(weight, config.tile) for weight in weights])
        self.attention_projection_stream(x_map, maps, outs, m).launch(
            grid=[CLUSTER * config.clusters, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attention_projection_stream(
        self, x_map: cute.CopyAtom, maps: tuple[Any, ...], outs: tuple[Any, ...], m: Int32
    ) -> None:
        """One grid for all weights of a row."""
        weights = [tcgen05.map_address(one) for one in maps]
        self.run(
            SimpleNamespace(x=tcgen05.map_address(x_map), weights=weights, outs=list(outs), m=m)
        )

    @cute.jit
    def run(self, given: cutlass.Constexpr) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, output."""
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(config.shared)
        base = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 1024)
        given.base = base.iterator.toint()
        given.cta, given.part, given.cluster = cta, cta % CLUSTER, cta // CLUSTER
        given.lane = tid % 32
        given.column = given.part * Int32(config.columns)
        warp = cute.arch.make_warp_uniform(tid // 32)
        if tid == 0:
            self.prepare(given)
            self.stream(given, 0, config.stages)
        if warp == FIRST_READER:
            tcgen05.allocate(given.base + Int32(config.held), config.tensor_columns)
            tcgen05.before_arrival()
        if warp != WEIGHTS:
            self.clear(given, tid - Int32(32))
        ptx.cluster_arrive()
        ptx.cluster_wait()
        if tid == 32 * WEIGHTS:
            self.stream(given, config.stages, config.steps)
        if warp == TOKENS:
            ptx.wait_for_predecessor()
        if tid == 32 * TOKENS:
            self.fetch(given)
            ptx.allow_successor()
        if tid == 32 * PRODUCT:
            self.multiply(given)
        if warp >= FIRST_READER:
            self.finish(given, warp - Int32(FIRST_READER))

    @cute.jit
    def prepare(self, given: cutlass.Constexpr) -> None:
        """Initialise the mbarriers; expect x and the sums of the rows that this CTA owns."""
        config, base = self.config, given.base
        for stage in cutlass.range_constexpr(config.stages):
            barriers.init(base, config.full(stage))
            barriers.init(base, config.empty(stage))
        for block in cutlass.range_constexpr(config.blocks):
            barriers.init(base, config.arrived(block))
        for slot in cutlass.range_constexpr(config.slots):
            if cutlass.const_expr(slot < config.early):
                barriers.init(base, config.product(slot))
            barriers.init(base, config.sums(slot))
        barriers.init(base, config.done, CLUSTER)
        ptx.barrier_init_fence()
        rows = ptx.least(Int32(config.tile) - given.part * Int32(config.owned), config.owned)
        quads = (given.m + Int32(QUAD - 1)) // Int32(QUAD)
        size = rows * quads * Int32(CLUSTER * ITEM)
        for slot in cutlass.range_constexpr(config.slots):
            barriers.expect(base, config.sums(slot), size)

    @cute.jit
    def clear(self, given: cutlass.Constexpr, thread: Int32) -> None:
        """Zero the rows of the ring that no tile fills; products read them, nobody the sums."""
        config = self.config
        size = (MMA_ROWS - config.tile) * ROW
        threads = 32 * (WARPS - 1)
        zero = [Float32(0.0)] * 4
        if cutlass.const_expr(size > 0):
            for turn in cutlass.range_constexpr(-(-size // (threads * LOADED))):
                place = thread * Int32(LOADED) + Int32(turn * threads * LOADED)
                if place < size:
                    for stage in cutlass.range_constexpr(config.stages):
                        first = HEADER + stage * config.stage + config.tile * ROW
                        ptx.shared_store16(given.base + place, zero, first)
            barriers.fence_async()

    def by_weight(self, given: Any) -> dict[str, list[Any]]:
        """What a tile has of its weight, by name; `width`: elements of a row of the output."""
        rows = [Int32(n) for n in self.config.rows]
        return {"map": given.weights, "out": given.outs, "rows": rows, "width": rows}

    def tile(self, given: Any, slot: int) -> Any:
        """Map, output, rows and first row of a slot's tile."""
        config = self.config
        number = given.cluster + Int32(slot * config.clusters)
        found = of_tile(number, config.firsts, self.by_weight(given))
        found.row = (number - found.first) * Int32(config.tile)
        return found

    @cute.jit
    def stream(
        self, given: cutlass.Constexpr, begin: cutlass.Constexpr, end: cutlass.Constexpr
    ) -> None:
        """Copy the blocks `begin` to `end` of this CTA's part of W, each when its place is free."""
        config = self.config
        policy = ptx.evict_first()
        for slot in cutlass.range_constexpr(begin // config.blocks, -(-end // config.blocks)):
            tile = self.tile(given, slot)
            if tile.number < config.tiles:
                low = max(begin, slot * config.blocks)
                high = min(end, (slot + 1) * config.blocks)
                for step in cutlass.range_constexpr(low, high):
                    stage, turn = step % config.stages, step // config.stages
                    if cutlass.const_expr(turn > 0):
                        barriers.wait(given.base, config.empty(stage), (turn - 1) % 2)
                    barriers.expect(given.base, config.full(stage), config.tile * ROW)
                    column = given.column + Int32((step - slot * config.blocks) * BLOCK)
                    place = HEADER + stage * config.stage
                    tcgen05.load_tile_once(
                        given.base, place, tile.map, column, tile.row, config.full(stage), policy
                    )

    @cute.jit
    def fetch(self, given: cutlass.Constexpr) -> None:
        """Copy this CTA's columns of x; what lies beyond the last token arrives as zeros."""
        config = self.config
        for block in cutlass.range_constexpr(config.blocks):
            barriers.expect(given.base, config.arrived(block), config.x_block)
            column = given.column + Int32(block * BLOCK)
            place = config.x_place + block * config.x_block
            tcgen05.load_tile(given.base, place, given.x, column, Int32(0), config.arrived(block))

    @cute.jit
    def multiply(self, given: cutlass.Constexpr) -> None:
        """All products of this CTA, in order; a slot's sums have columns of their own."""
        config, base = self.config, given.base
        kind = tcgen05.instruction(MMA_ROWS, config.tokens)
        sums = ptx.shared_load4(base, config.held)
        tcgen05.after_wait()
        ring = tcgen05.tile_descriptor(base + Int32(HEADER))
        x = tcgen05.tile_descriptor(base + Int32(config.x_place))
        for slot in cutlass.range_constexpr(config.slots):
            if given.cluster + Int32(slot * config.clusters) < config.tiles:
                for block in cutlass.range_constexpr(config.blocks):
                    step = slot * config.blocks + block
                    stage = step % config.stages
                    if cutlass.const_expr(slot == 0):
                        barriers.wait(base, config.arrived(block), 0)
                    barriers.wait(base, config.full(stage), step // config.stages % 2)
                    tcgen05.after_wait()
                    tcgen05.multiply_block(
                        sums + Int32(slot * config.tokens),
                        ring + Int64(stage * config.stage >> 4),
                        x + Int64(block * config.x_block >> 4),
                        kind,
                        fresh=block == 0,
                    )
                    if cutlass.const_expr(step + config.stages < config.steps):
                        tcgen05.commit(base, config.empty(stage))
                if cutlass.const_expr(slot < config.early):
                    tcgen05.commit(base, config.product(slot))
        # Only where the CTAs wait for it: none may have ended when it arrives.
        if given.cluster + Int32(config.early * config.clusters) < config.tiles:
            tcgen05.commit_to_cluster(base, config.done, CLUSTER)

    @cute.jit
    def finish(self, given: cutlass.Constexpr, quarter: Int32) -> None:
        """Send the sums of each slot to their owners; add what has come; give back the columns."""
        config, base = self.config, given.base
        sums = ptx.shared_load4(base, config.held)
        tcgen05.after_wait()
        row = quarter * Int32(32) + given.lane
        owner, local = row // Int32(config.owned), row % Int32(config.owned)
        # Lanes beyond the tile's rows send nothing.
        owner = ptx.least(owner, CLUSTER - 1)
        there = barriers.same_place(base, owner)
        quads = config.tokens // QUAD
        place = there + (given.part * Int32(quads * config.owned) + local) * Int32(ITEM)
        sender = SimpleNamespace(
            there=there,
            place=place,
            sums=sums + (quarter << Int32(21)),
            tokens=ptx.select(row < config.tile, given.m, Int32(0)),
        )
        for slot in cutlass.range_constexpr(config.slots + 1):
            if cutlass.const_expr(slot < config.slots):
                self.send(given, sender, slot)
            if cutlass.const_expr(slot > 0):
                # What is stored depends on x, so on the wait of the warp that has fetched it.
                self.add_up(given, quarter * Int32(32) + given.lane, slot - 1)
        tcgen05.before_arrival()
        ptx.named_barrier(1, READER_THREADS)
        if quarter == 0:
            tcgen05.after_wait()
            tcgen05.free(sums, config.tensor_columns)

    @cute.jit
    def send(
        self, given: cutlass.Constexpr, sender: cutlass.Constexpr, slot: cutlass.Constexpr
    ) -> None:
        """A lane's row of a slot's sums to the CTA that owns it, four tokens at a time."""
        config, base = self.config, given.base
        chunk = min(CHUNK, config.tokens)
        if given.cluster + Int32(slot * config.clusters) < config.tiles:
            if cutlass.const_expr(slot < config.early):
                barriers.wait(base, config.product(slot), 0)
            else:
                # The sums take the place of x, which the other CTAs may still be reading.
                barriers.wait(base, config.done, 0, "cluster")
            tcgen05.after_wait()
            for first in cutlass.range_constexpr(0, config.tokens, chunk):
                if given.m > Int32(first):
                    column = sender.sums + Int32(slot * config.tokens + first)
                    values = tcgen05.load_columns(column, chunk)
                    for token in cutlass.range_constexpr(first, first + chunk, QUAD):
                        barriers.send(
                            sender.place,
                            config.sums_place(slot) + token // QUAD * config.owned * ITEM,
                            values[token - first : token - first + QUAD],
                            sender.there,
                            config.sums(slot),
                            sender.tokens - Int32(token),
                        )

    @cute.jit
    def add_up(self, given: cutlass.Constexpr, thread: Int32, slot: cutlass.Constexpr) -> None:
        """Add what the CTAs have sent, in order, and store it: two rows of four tokens a lane."""
        config, base = self.config, given.base
        tile = self.tile(given, slot)
        pairs = config.owned // 2
        # 8 pairs of rows and 16 groups of tokens at most: one for a thread.
        quad, pair = thread // Int32(pairs), thread % Int32(pairs)
        inner = given.part * Int32(config.owned) + pair * Int32(2)
        row, token = tile.row + inner, quad * Int32(QUAD)
        if tile.number < config.tiles:
            barriers.wait(base, config.sums(slot), 0, "cluster")
            if inner < config.tile and row < tile.rows and token < given.m:
                self.store_item(given, tile, slot, quad, pair, row, token)

    @cute.jit
    def store_item(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, slot: cutlass.Constexpr,
        quad: Int32, pair: Int32, row: Int32, token: Int32,
    ) -> None:  # fmt: skip
        """Eight sums: rows `row` and `row + 1` of tokens `token` to `token + 3`."""
        config = self.config
        start = (quad * Int32(config.owned) + pair * Int32(2)) * Int32(ITEM)
        address = given.base + start
        part = config.tokens // QUAD * config.owned * ITEM
        first = config.sums_place(slot)
        total = tcgen05.load_pairs(address, first) + tcgen05.load_pairs(address, first + ITEM)
        for sender in cutlass.range_constexpr(1, CLUSTER):
            offset = first + sender * part
            more = tcgen05.load_pairs(address, offset) + tcgen05.load_pairs(address, offset + ITEM)
            total = tcgen05.add_pairs(total, more)
        self.put(given, tile, tcgen05.pack_rows(total), token, row)

    @cute.jit
    def put(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, words: cutlass.Constexpr,
        token: Int32, row: Int32,
    ) -> None:  # fmt: skip
        """Store two rows, rounded, of those of four tokens that exist: a word a token."""
        target = tile.out + bytes_of(token * tile.width + row)
        pitch = bytes_of(tile.width)
        for i in cutlass.range_constexpr(QUAD):
            if token + Int32(i) < given.m:
                self.store(target, words[i], tile.rows, row)
            target = target + pitch

    @cute.jit
    def store(self, target: Int64, word: Int32, rows: Int32, row: Int32) -> None:
        """Two rows of one token, or the one of them that exists."""
        if cutlass.const_expr(all(n % 2 == 0 for n in self.config.rows)):
            ptx.store4(target, word)
        else:
            if rows % Int32(2) == 0:
                ptx.store4(target, word)
            else:
                ptx.store2(target, word)
                if row + Int32(1) < rows:
                    ptx.store2(target + Int64(ELEMENT), word >> Int32(16))

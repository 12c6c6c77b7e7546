"""Device code of the experts with block-scaled products (tcgen05). Imports the DSL.

The order of a token's sums is the same whatever its neighbours and the cluster that has the expert:

    FC1: all columns in order, 32 at a time; with two blocks in a tile even ones, then odd ones
    FC2: all columns in order; slots in order
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float32, Int32, Int64, Uint8, memory
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import sym_int32

from k3fuse.kernels.common.device import barriers, ptx, tcgen05
from k3fuse.kernels.experts import (
    block_fetch_device,
    block_finish_device,
    block_multiply_device,
    block_scales_device,
    block_words,
    fetch_device,
    finish_device,
    sort_device,
    words,
)
from k3fuse.kernels.experts.block_config import (
    FETCH,
    PRODUCT,
    READERS,
    SCALE_WARPS,
    SCALES,
    SPAN,
    BlockConfig,
)
from k3fuse.kernels.experts.block_shuffled import end_barriers
from k3fuse.kernels.experts.config import CLUSTER, NONE, THREADS, WARPS


def arguments(config: BlockConfig) -> tuple[Any, ...]:
    """Stand-ins for the parameters and a stream; the number of experts is open."""

    def packed(name: str) -> Any:
        tiles = config.tiles(name, 1)
        shape, pitch = (sym_int32(), tiles.dims[0]), 2 * tiles.strides[0]
        return make_fake_tensor(Float4E2M1FN, shape, (pitch, 1), assumed_align=32)

    rows = sym_int32() if config.mxfp8 else config.clusters * config.m
    eights = make_fake_tensor(Uint8, (rows, config.latent), (config.latent, 1), assumed_align=16)
    return (
        packed("w13"),
        packed("w2"),
        eights,
        tuple(Int64(0) for _ in config.addresses),
        tuple(Int32(0) for _ in config.sizes),
        make_fake_stream(),
    )


class BlockExperts:
    """One grid of clusters; a cluster takes one entry of the list after the other."""

    def __init__(self, config: BlockConfig) -> None:
        self.config = config

    def map_of(self, name: str, tensor: Any, internal: Any) -> Any:
        """The copy atom of the boxes of a map: rows of 128 values."""
        rows = self.config.tiles(name, 1).box[1]
        plain = cute.make_ordered_layout((rows, SPAN), order=(1, 0))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)
        load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE)
        return cpasync.make_tiled_tma_atom(
            load, tensor, layout, (rows, SPAN), internal_type=internal
        )[0]

    @cute.jit
    def __call__(
        self,
        w13: cute.Tensor,
        w2: cute.Tensor,
        x8_tiles: cute.Tensor,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        config = self.config
        self.block_experts(
            self.map_of("w13", w13, Uint8),
            self.map_of("w2", w2, Uint8),
            self.map_of("x8_tiles", x8_tiles, None),
            addresses,
            sizes,
        ).launch(
            grid=[CLUSTER * config.clusters, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
            # Shared memory leaves room for one. Left to itself, ptxas spilled 128 bytes of the
            # shuffled kernel for 64 tokens to have 80 registers; now it has 96.
            min_blocks_per_mp=int(config.shuffled),
        )

    @cute.kernel
    def block_experts(
        self,
        w13: cute.CopyAtom,
        w2: cute.CopyAtom,
        x8_tiles: cute.CopyAtom,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
    ) -> None:
        """Shared weights before the predecessor has ended; MXFP8 of x; sort the ids; the roles."""
        config = self.config
        given = SimpleNamespace(
            w13=tcgen05.map_address(w13),
            w2=tcgen05.map_address(w2),
            x8_tiles=tcgen05.map_address(x8_tiles),
            **dict(zip(config.addresses, addresses, strict=True)),
            **dict(zip(config.sizes, sizes, strict=True)),
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(config.shared_memory)
        allocated = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 1024)
        base = allocated.iterator.toint()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        part, cluster = cta % CLUSTER, cta // CLUSTER
        policy = ptx.evict_first()
        self.barriers(base, tid)
        sort_device.clear(config, base, tid)
        if warp == 0:
            tcgen05.allocate(base + Int32(config.held), config.tensor_columns)
            tcgen05.before_arrival()
        self.clear(base, tid)
        ptx.cluster_arrive()
        ptx.cluster_wait()
        tcgen05.after_wait()
        early = min(config.stages, config.shared_stages)
        if warp == FETCH:
            for number in cutlass.range_constexpr(early):
                fetch_device.fetch_shared(config, given, base, number, cta, lane, policy)
        ptx.wait_for_predecessor()
        if warp == FETCH:
            for number in cutlass.range_constexpr(early):
                fetch_device.fetch_tokens(config, given, base, number, lane)
        if cutlass.const_expr(not config.mxfp8):
            block_scales_device.round_rows(config, given, part, cluster, tid)
        entries = sort_device.sort(config, given, base, cluster, tid)
        # From here on peers may send hidden rows, to where the sort was, and read rows of x.
        ptx.cluster_arrive()
        ptx.cluster_wait()
        live = self.live(base, entries, lane)
        if warp == FETCH:
            for number in cutlass.range_constexpr(early, config.shared_stages):
                fetch_device.fetch_shared(config, given, base, number, cta, lane, policy)
                fetch_device.fetch_tokens(config, given, base, number, lane)
            block_fetch_device.fetch(config, given, base, live, part, cluster, lane, policy)
            ptx.allow_successor()
        else:
            finish_device.shared_rows(config, given, base, cta, warp, lane)
            if warp < READERS:
                block_finish_device.finish(config, given, base, entries, part, tid)
            else:
                if warp == PRODUCT:
                    block_multiply_device.multiply(config, base, live)
                else:
                    block_scales_device.arrange(
                        config, given, base, live, part, cluster, tid - Int32(32 * SCALES), policy
                    )
        # Peers still arrive at this CTA's barriers.
        ptx.cluster_arrive()
        ptx.cluster_wait()

    @cute.jit
    def live(self, base: Int32, entries: Int32, lane: Int32) -> Int32:
        """Entries that name an expert; the others are the last ones."""
        found = Int32(0)
        for turn in cutlass.range_constexpr(-(-self.config.entries // 32)):
            entry = lane + Int32(32 * turn)
            here = Int32(0)
            if entry < entries:
                expert = block_fetch_device.entry_at(self.config, base, entry)[0]
                here = ptx.select(expert == Int32(NONE), Int32(0), Int32(1))
            found = found + block_words.count_bits(words.votes(here))
        return found

    @cute.jit
    def barriers(self, base: Int32, tid: Int32) -> None:
        """Initialise all mbarriers."""
        config = self.config
        if tid == 0:
            for slot in cutlass.range_constexpr(config.stages):
                barriers.init(base, config.full + 8 * slot)
                barriers.init(base, config.empty + 8 * slot, WARPS)
                barriers.init(base, config.there + 8 * slot)
                barriers.init(base, config.taken + 8 * slot)
            barriers.init(base, config.product1)
            barriers.init(base, config.read1, READERS)
            barriers.init(base, config.scales1_there, SCALE_WARPS)
            barriers.init(base, config.scales2_there, 1 if config.shuffled else SCALE_WARPS)
            barriers.init(base, config.hidden_there, READERS)
            barriers.init(base, config.arrived)
            barriers.init(base, config.free, CLUSTER)
            for turn in cutlass.range_constexpr(config.rounds):
                barriers.init(base, config.product2 + 8 * turn)
            for offset in end_barriers(config):
                barriers.init(base, offset, 32)
            ptx.barrier_init_fence()

    @cute.jit
    def clear(self, base: Int32, tid: Int32) -> None:
        """Zero what products read and nobody fills: scales of rows that are none, ends of tiles.

        No sum that is used has anything of it.
        """
        config = self.config
        zero = [Float32(0.0)] * 4
        for first, size in config.unfilled:
            for turn in cutlass.range(-(-size // (16 * THREADS)), unroll=1):
                place = (turn * Int32(THREADS) + tid) * Int32(16)
                if place < size:
                    ptx.shared_store16(base + place, zero, first)
        barriers.fence_async()

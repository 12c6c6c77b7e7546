"""Device code of the experts: one launch for all routed experts and the shared down-projection.

Imports the DSL: only the builder's `trace` loads it. The order of a token's sums is the same
whatever its neighbours, their number and the cluster that has the expert:

    FC1: blocks of 32 columns of a warp's part in order, then the seven warps in order
    FC2: blocks in order; slots in order
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.gemm import shared_memory
from k3fuse.kernels.experts import (
    fetch_device,
    finish_device,
    hidden_device,
    multiply_device,
    sort_device,
)
from k3fuse.kernels.experts.config import CLUSTER, NONE, THREADS, TILE, UNIT, WARPS, Config
from k3fuse.kernels.experts.hidden_device import WORKERS


class Experts:
    """One grid of clusters; a cluster takes one entry of the list after the other."""

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
        self.experts(addresses, sizes).launch(
            grid=[CLUSTER * self.config.clusters, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def experts(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Shared weights before the predecessor has ended; sort the ids; fetch and multiply."""
        config = self.config
        given = SimpleNamespace(
            **dict(zip(config.addresses, addresses, strict=True)),
            **dict(zip(config.sizes, sizes, strict=True)),
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = shared_memory(config.shared_memory)
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        part, cluster = cta % CLUSTER, cta // CLUSTER
        policy = ptx.evict_first()
        self.barriers(base, tid)
        sort_device.clear(config, base, tid)
        ptx.cluster_arrive()
        ptx.cluster_wait()
        early = min(config.stages, config.shared_stages)
        if warp == WARPS:
            for number in cutlass.range_constexpr(early):
                fetch_device.fetch_shared(config, given, base, number, cta, lane, policy)
        ptx.wait_for_predecessor()
        if warp == WARPS:
            for number in cutlass.range_constexpr(early):
                fetch_device.fetch_tokens(config, given, base, number, lane)
        entries = sort_device.sort(config, given, base, cluster, tid)
        if warp == WARPS:
            for number in cutlass.range_constexpr(early, config.shared_stages):
                fetch_device.fetch_shared(config, given, base, number, cta, lane, policy)
                fetch_device.fetch_tokens(config, given, base, number, lane)
            for entry in cutlass.range(entries, unroll=1):
                fetch_device.fetch_entry(config, given, base, entry, part, lane, policy)
            ptx.allow_successor()
        else:
            finish_device.shared_rows(config, given, base, cta, warp, lane)
            exchanges = Int32(0)
            for entry in cutlass.range(entries, unroll=1):
                place = base + Int32(config.list) + entry * Int32(16)
                expert, first, count = (ptx.shared_load4(place, 4 * i) for i in range(3))
                units = (count + Int32(UNIT - 1)) // Int32(UNIT)
                here = SimpleNamespace(
                    entry=entry, first=first, count=count, units=units, part=part, warp=warp,
                    lane=lane,
                )  # fmt: skip
                if expert != NONE:
                    self.first(given, base, here)
                    for unit in cutlass.range(units, unroll=1):
                        hidden_device.exchange(
                            config, base, unit, ptx.least(count - unit * Int32(UNIT), UNIT),
                            exchanges + unit, part, tid,
                        )  # fmt: skip
                    self.second(given, base, here)
                    exchanges = exchanges + units
                else:
                    finish_device.clear_rows(config, given, base, first, count, part, warp, lane)
                finish_device.count_rows(config, given, base, first, count, part, warp, lane)
        # Peers still arrive at this CTA's barriers.
        ptx.cluster_arrive()
        ptx.cluster_wait()

    @cute.jit
    def barriers(self, base: Int32, tid: Int32) -> None:
        """Initialise all mbarriers."""
        config = self.config
        if tid == 0:
            for slot in cutlass.range_constexpr(config.stages):
                ptx.barrier_init(base + Int32(config.full + 8 * slot), 1)
                ptx.barrier_init(base + Int32(config.empty + 8 * slot), WARPS)
            for buffer in cutlass.range_constexpr(2):
                ptx.barrier_init(base + Int32(config.arrived + 8 * buffer), 1)
                ptx.barrier_init(base + Int32(config.free + 8 * buffer), CLUSTER)
            ptx.barrier_init_fence()

    # An entry: `here` is its number in the list, its first pair's place in the order, its pairs and
    # units; and where this thread is: part of the cluster, warp, lane.

    @cute.jit
    def first(self, given: cutlass.Constexpr, base: Int32, here: cutlass.Constexpr) -> None:
        """FC1 and SiTU of an entry: this CTA's columns of the hidden rows."""
        if cutlass.const_expr(self.config.tokens == UNIT):
            self.first_of_one(given, base, here)
        else:
            if here.units == 1:
                self.first_of_one(given, base, here)
            else:
                self.first_of_many(given, base, here)

    @cute.jit
    def first_of_one(self, given: cutlass.Constexpr, base: Int32, here: cutlass.Constexpr) -> None:
        """One unit: its rows stay in registers."""
        config = self.config
        x = cute.make_rmem_tensor(config.blocks1 * multiply_device.WORDS, Int32)
        start = fetch_device.number_of(config, here.entry)
        multiply_device.fragments(
            config, given, base, x, here.first, here.count, here.warp, here.lane
        )
        for tile in cutlass.range(config.tiles1, unroll=1):
            stage = fetch_device.wait_full(config, base, start + tile)
            self.tile(base, stage, tile, x, tile, here)
            fetch_device.release(config, base, start + tile, here.lane)
        self.activate(given, base, Int32(0), Int32(1), here)

    @cute.jit
    def first_of_many(self, given: cutlass.Constexpr, base: Int32, here: cutlass.Constexpr) -> None:
        """Several units: a stage serves all of them, so their rows are loaded for each tile."""
        config = self.config
        start = fetch_device.number_of(config, here.entry)
        for tile in cutlass.range(config.tiles1, unroll=1):
            stage = fetch_device.wait_full(config, base, start + tile)
            for unit in cutlass.range(here.units, unroll=1):
                x = cute.make_rmem_tensor(config.blocks1 * multiply_device.WORDS, Int32)
                done = unit * Int32(UNIT)
                multiply_device.fragments(
                    config, given, base, x, here.first + done, here.count - done, here.warp,
                    here.lane,
                )  # fmt: skip
                number = tile * here.units + unit
                place = number % Int32(config.tiles1)
                self.tile(base, stage, tile, x, place, here)
                if place == config.tiles1 - 1:
                    self.activate(given, base, number - place, here.units, here)
                    ptx.named_barrier(1, WORKERS)
            fetch_device.release(config, base, start + tile, here.lane)

    def activate(self, given: Any, base: Any, number: Any, units: Any, here: Any) -> None:
        """All warps' partial sums are there: add them up; SiTU.

        Before the next sums and the exchange come, the caller waits, unless each thread reads its
        own columns only, as with one unit.
        """
        ptx.named_barrier(1, WORKERS)
        tid = here.warp * Int32(32) + here.lane
        hidden_device.activate(self.config, given, base, number, units, tid)

    def tile(self, base: Any, stage: Any, tile: Any, x: Any, place: Any, here: Any) -> None:
        """A warp's partial sums of this CTA's tile number `tile` of FC1, into shared memory."""
        config, warp, lane = self.config, here.warp, here.lane
        index = here.part * Int32(config.tiles1) + tile
        sums = multiply_device.tile1(config, stage, index, x, warp, lane)
        address = multiply_device.partial_sums(config, base, place, warp, lane)
        ptx.shared_store16(address, sums)

    @cute.jit
    def second(self, given: cutlass.Constexpr, base: Int32, here: cutlass.Constexpr) -> None:
        """FC2 of an entry: this CTA's columns of the pairs' rows."""
        config, lane = self.config, here.lane
        start = fetch_device.number_of(config, here.entry) + Int32(config.tiles1)
        for step in cutlass.range(config.stages2, unroll=1):
            stage = fetch_device.wait_full(config, base, start + step)
            column = here.part * Int32(config.rows2) + step * Int32(config.stage_rows2)
            for unit in cutlass.range(here.units, unroll=1):
                x = multiply_device.hidden_fragments(config, base, unit, lane)
                for i in cutlass.range_constexpr(config.each2):
                    tile = Int32(i * WARPS) + here.warp
                    sums = multiply_device.tile2(config, stage, column, tile, x, lane)
                    finish_device.store_tile(
                        config, given, base, sums, here.first, here.count, unit,
                        column + tile * Int32(TILE), lane,
                    )  # fmt: skip
            fetch_device.release(config, base, start + step, lane)

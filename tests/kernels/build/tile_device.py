"""Device code of `tile_kernel`: one tile in by TMA, out by TMA."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, Int64, memory
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


def arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Stand-ins for source and target [rows, columns] and for a number."""
    made = [
        make_fake_tensor(BFloat16, (rows, columns), (columns, 1), assumed_align=16)
        for _ in range(2)
    ]  # fmt: skip
    return made[0], Int32(0), made[1], make_fake_stream()


class TileCopy:
    """Copy one tile of 64 columns with 128-byte swizzle. `box` rows a CTA."""

    def __init__(self, rows: int, box: int) -> None:
        self.rows, self.box = rows, box

    @cute.jit
    def __call__(self, source: cute.Tensor, skip: Int32, target: cute.Tensor, stream: CUstream):
        atom = cute.make_ordered_layout((self.box, 64), order=(1, 0))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, atom)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        store = cpasync.CopyBulkTensorTileS2GOp()
        a, tile_a = cpasync.make_tiled_tma_atom(load, source, layout, (self.box, 64))
        b, tile_b = cpasync.make_tiled_tma_atom(store, target, layout, (self.box, 64))
        self.tile_copy(a, tile_a, skip, b, tile_b).launch(
            grid=[self.rows // self.box, 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def tile_copy(
        self, a: cute.CopyAtom, tile_a: cute.Tensor, skip: Int32, b: cute.CopyAtom,
        tile_b: cute.Tensor,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = memory.SmemAllocator()
        bar = smem.allocate_array(Int64, 1)
        outer = cute.make_ordered_layout((self.box, 64), order=(1, 0))
        held = smem.allocate_tensor(BFloat16, outer, 1024, swizzle=cute.make_swizzle(3, 4, 3))
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.box * 128)
        cute.arch.sync_threads()
        whole, one = cute.group_modes(held, 0, 2), cute.make_layout(1)
        first = cute.local_tile(tile_a, (self.box, 64), (cta + skip, 0))
        to, origin = cpasync.tma_partition(a, 0, one, whole, cute.group_modes(first, 0, 2))
        cute.copy(a, origin, to, tma_bar_ptr=bar)
        cute.arch.mbarrier_wait(bar, 0)
        second = cute.local_tile(tile_b, (self.box, 64), (cta, 0))
        source, goal = cpasync.tma_partition(b, 0, one, whole, cute.group_modes(second, 0, 2))
        cute.copy(b, source, goal)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)

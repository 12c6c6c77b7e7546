"""A CuTe DSL kernel with tcgen05.mma.kind::mxf8f6f4.block_scale: FP4 or FP8 tiles, UE8M0 scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as helpers
from cutlass.utils import blockscaled_layout as scaled

from dsl_tensor import Compiled, compiled, matrix, prepare, store_result

VECTOR = 32  # values that share a scale
SCALES = 512  # bytes of the scales of 128 rows and 128 values of K


def container(dtype: Any) -> Any:
    """The type of a tile in shared memory: 4-bit values take a byte each."""
    return Float8E4M3FN if dtype is Float4E2M1FN else dtype


def scales_at(start: Any, make: Any, mma: Any, tiler: Any, layout: Any) -> Any:
    """The scales in tensor memory."""
    one_stage = cute.slice_(layout, (None, None, None, 0))
    return cute.make_tensor(
        cute.recast_ptr(start, dtype=Float8E8M0FNU), make(mma, tiler, VECTOR, one_stage)
    )


def bring_scales(source: Any, target: Any, bar: Any) -> None:
    """Scales from global to shared memory, 512 bytes in a row."""
    run = cute.make_layout(SCALES)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float8E8M0FNU)
    cute.copy(
        atom, cute.make_tensor(source.iterator, run), cute.make_tensor(target.iterator, run),
        mbar_ptr=bar,
    )  # fmt: skip


def copy_scales(source: Any, target: Any) -> None:
    """Scales from shared to tensor memory, to all four quarters of the lanes."""
    compact_s, compact_t = cute.filter_zeros(source), cute.filter_zeros(target)
    op = tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(op, Float8E8M0FNU), compact_t)
    mine = copy.get_slice(0)
    words = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(compact_s))
    cute.copy(copy, words[(None, None, None, None, 0)], mine.partition_D(compact_t))


class ScaledGemm:
    """d[128, n] = (sa a)[128, 128] (sb b)[n, 128]^T in one CTA; FP4 tiles are expanded by TMA.

    sa, sb: 512 bytes each in the order that tcgen05.cp 32x128b.warpx4 takes.
    """

    def __init__(self, n: int, a_dtype: Any, b_dtype: Any) -> None:
        self.n, self.dtypes, self.tiler = n, (a_dtype, b_dtype), (128, n, 128)
        self.bytes = sum(
            rows * 128 * dtype.width // 8
            for rows, dtype in zip((128, n), self.dtypes, strict=True)
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        sa: cute.Tensor,
        sb: cute.Tensor,
        d: cute.Tensor,
        stream: CUstream,
    ):
        mma = cute.make_tiled_mma(
            tcgen05.MmaMXF8F6F4Op(
                self.dtypes[0], self.dtypes[1], (128, self.n, 32), tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        la = helpers.make_smem_layout_a(mma, self.tiler, container(self.dtypes[0]), 1)
        lb = helpers.make_smem_layout_b(mma, self.tiler, container(self.dtypes[1]), 1)
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        map_a, tile_a = cute.nvgpu.make_tiled_tma_atom_A(
            op, a, cute.select(la, mode=[0, 1, 2]), self.tiler, mma, internal_type=Uint8
        )
        map_b, tile_b = cute.nvgpu.make_tiled_tma_atom_B(
            op, b, cute.select(lb, mode=[0, 1, 2]), self.tiler, mma, internal_type=Uint8
        )
        self.kernel(mma, map_a, tile_a, map_b, tile_b, sa, sb, d, la, lb).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        map_a: cute.CopyAtom,
        tile_a: cute.Tensor,
        map_b: cute.CopyAtom,
        tile_b: cute.Tensor,
        sa: cute.Tensor,
        sb: cute.Tensor,
        d: cute.Tensor,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = utils.SmemAllocator()
        bars = smem.allocate_array(Int64, 2)
        held = smem.allocate_array(Int32, 1)
        a = smem.allocate_tensor(container(self.dtypes[0]), la.outer, 1024, swizzle=la.inner)
        b = smem.allocate_tensor(container(self.dtypes[1]), lb.outer, 1024, swizzle=lb.inner)
        layout_a = scaled.make_smem_layout_sfa(mma, self.tiler, VECTOR, 1)
        layout_b = scaled.make_smem_layout_sfb(mma, self.tiler, VECTOR, 1)
        scales_a = smem.allocate_tensor(Float8E8M0FNU, layout_a, 128)
        scales_b = smem.allocate_tensor(Float8E8M0FNU, layout_b, 128)
        prepare(bars, held, 256, tid)
        start = cute.arch.retrieve_tmem_ptr(Float32, 16, held)
        part = mma.get_slice(0)
        ga = part.partition_A(cute.local_tile(tile_a, self.tiler, (0, 0, None), proj=(1, None, 1)))
        gb = part.partition_B(cute.local_tile(tile_b, self.tiler, (0, 0, None), proj=(None, 1, 1)))
        gd = part.partition_C(cute.local_tile(d, self.tiler, (0, 0, None), proj=(1, 1, None)))
        fa, fb = mma.make_fragment_A(a), mma.make_fragment_B(b)
        shape = mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout
        total = cute.make_tensor(start, shape)
        make_a, make_b = scaled.make_tmem_layout_sfa, scaled.make_tmem_layout_sfb
        in_tmem_a = scales_at(start + 128, make_a, mma, self.tiler, layout_a)
        in_tmem_b = scales_at(start + 160, make_b, mma, self.tiler, layout_b)
        one = cute.make_layout(1)
        to_a, from_a = cpasync.tma_partition(
            map_a, 0, one, cute.group_modes(a, 0, 3), cute.group_modes(ga, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            map_b, 0, one, cute.group_modes(b, 0, 3), cute.group_modes(gb, 0, 3)
        )
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars, self.bytes + 2 * SCALES)
                bring_scales(sa, scales_a, bars)
                bring_scales(sb, scales_b, bars)
            cute.copy(map_a, from_a[(None, 0)], to_a[(None, 0)], tma_bar_ptr=bars)
            cute.copy(map_b, from_b[(None, 0)], to_b[(None, 0)], tma_bar_ptr=bars)
            cute.arch.mbarrier_wait(bars, 0)
            copy_scales(scales_a, in_tmem_a)
            copy_scales(scales_b, in_tmem_b)
            for step in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                at, place = (None, None, step, 0), (None, None, step)
                cute.gemm(mma, total, [fa[at], in_tmem_a[place]], [fb[at], in_tmem_b[place]], total)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(bars + 1)
        cute.arch.mbarrier_wait(bars + 1, 0)
        load = tcgen05.Ld32x32bOp(getattr(tcgen05.Repetition, f"x{self.n}"))
        store_result(load, total, gd, tid)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(start, 256)


@lru_cache(maxsize=16)
def scaled_gemm(n: int, a_dtype: Any, b_dtype: Any) -> Compiled:
    """`ScaledGemm`, compiled."""
    kernel = ScaledGemm(n, a_dtype, b_dtype)
    scales = [matrix(Float8E8M0FNU, 1, SCALES) for _ in range(2)]
    return compiled(
        kernel, matrix(a_dtype, 128, 128), matrix(b_dtype, n, 128), *scales,
        matrix(Float32, 128, n),
    )  # fmt: skip

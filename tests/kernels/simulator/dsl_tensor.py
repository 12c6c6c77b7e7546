"""CuTe DSL kernels on the tensor core of sm_103a: the DSL's own layouts, descriptors and tiles."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import blackwell_helpers as helpers

from k3fuse.kernels.build.host_code import launch_of, tensor_maps_of
from k3fuse.kernels.common.tensor_map import TileMap
from k3fuse.kernels.simulator import SimReport, TensorMap, simulate

LOADS = {
    "32x32b": tcgen05.Ld32x32bOp,
    "16x64b": tcgen05.Ld16x64bOp,
    "16x128b": tcgen05.Ld16x128bOp,
    "16x256b": tcgen05.Ld16x256bOp,
}
_MMA_STATE = bytes(32)  # the DSL's MMA atom as a parameter: negate and accumulate flags, lane mask


@dataclass(frozen=True)
class Compiled:
    """PTX and what the DSL's host code says: the launch, the tensor maps that it encodes."""

    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    maps: tuple[TileMap, ...]

    def run(self, params: list[Any], **options: Any) -> SimReport:
        return simulate(
            self.ptx, grid=self.grid, block=self.block, cluster=self.cluster,
            dynamic_smem=self.smem, params=[params], **options,
        )  # fmt: skip


def compiled(kernel: Any, *tensors: Any) -> Compiled:
    """Compile a host function for sm_103a."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder} --gpu-arch sm_103a"
        made: Any = cute.compile(kernel, *tensors, make_fake_stream(), options=options)
        text, host = str(made.__ptx__).rstrip("\0"), str(made.ir_module)
    launch, maps = launch_of(host), tensor_maps_of(host)
    assert launch is not None
    known = tuple(found for found in maps if found is not None)
    assert len(known) == len(maps)
    assert ".target sm_103a" in text
    return Compiled(text, launch.grid, launch.block, launch.cluster, launch.dynamic_smem, known)


def matrix(dtype: Any, rows: int, columns: int, major: str = "k") -> Any:
    """A stand-in for a [rows, columns] tensor, contiguous along columns ("k") or rows ("mn")."""
    order = (1, 0) if major == "k" else (0, 1)
    return make_fake_compact_tensor(dtype, (rows, columns), stride_order=order, assumed_align=32)


def map_of(tensor: torch.Tensor, tiles: TileMap, **changes: Any) -> TensorMap:
    """A map over a tensor as the DSL's host code encodes it."""
    given = {
        "box": tiles.box, "swizzle": tiles.swizzle, "element": tiles.element, "dims": tiles.dims,
        "strides": tiles.strides,
    }  # fmt: skip
    return TensorMap(tensor, **{**given, **changes})


@cute.jit
def prepare(bars: Any, held: Any, columns: cutlass.Constexpr, tid: Int32) -> None:
    """Two mbarriers of one arrival, and columns of tensor memory."""
    if tid == 0:
        cute.arch.mbarrier_init(bars, 1)
        cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        cute.arch.alloc_tmem(columns, held)
    cute.arch.sync_threads()


def store_result(load: Any, total: Any, target: Any, tid: Any) -> None:
    """Tensor memory to registers by a `tcgen05.ld` operation, then to global memory."""
    first = total[(None, None), 0, 0]
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(load, Float32), first)
    mine = copy.get_slice(tid)
    places = mine.partition_D(target[(None, None), 0, 0])
    values = cute.make_rmem_tensor(places.shape, Float32)
    cute.copy(copy, mine.partition_S(first), values)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(values, places)


class Gemm:
    """d[m, n] = a[m, k] b[n, k]^T in one CTA: TMA tiles, tcgen05.mma, tcgen05.ld, FP32 out.

    major: "k" or "mn" for a and b. kinds: SMEM layout atoms, by default the widest swizzle.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: Any = BFloat16,
        a_major: str = "k",
        b_major: str = "k",
        load: str = "32x32b",
        kinds: tuple[Any, Any] | None = None,
    ) -> None:
        self.m, self.n, self.k, self.dtype, self.kinds = m, n, k, dtype, kinds
        self.majors = [
            OperandMajorMode.K if major == "k" else OperandMajorMode.MN
            for major in (a_major, b_major)
        ]
        self.tiler, self.columns = (m, n, k), max(32, n)
        repeat = n // {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}[load]
        self.load = LOADS[load](getattr(tcgen05.Repetition, f"x{min(repeat, 128)}"))

    def layout(self, mma: Any, operand: int) -> Any:
        """The SMEM layout of a or b, one stage."""
        make = (helpers.make_smem_layout_a, helpers.make_smem_layout_b)[operand]
        if self.kinds is None:
            return make(mma, self.tiler, self.dtype, 1)
        rows = self.m if operand == 0 else self.n
        atom = tcgen05.make_smem_layout_atom(self.kinds[operand], self.dtype)
        return tcgen05.tile_to_mma_shape(atom, ((rows, 16), 1, self.k // 16, 1), (1, 2, 3))

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: CUstream):
        mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                self.dtype, Float32, (self.m, self.n, 16), tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM, self.majors[0], self.majors[1],
            )
        )  # fmt: skip
        la, lb = self.layout(mma, 0), self.layout(mma, 1)
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        map_a, tile_a = cute.nvgpu.make_tiled_tma_atom_A(
            op, a, cute.select(la, mode=[0, 1, 2]), self.tiler, mma
        )
        map_b, tile_b = cute.nvgpu.make_tiled_tma_atom_B(
            op, b, cute.select(lb, mode=[0, 1, 2]), self.tiler, mma
        )
        self.kernel(mma, map_a, tile_a, map_b, tile_b, d, la, lb).launch(
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
        d: cute.Tensor,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = utils.SmemAllocator()
        bars = smem.allocate_array(Int64, 2)
        held = smem.allocate_array(Int32, 1)
        sa = smem.allocate_tensor(self.dtype, la.outer, 1024, swizzle=la.inner)
        sb = smem.allocate_tensor(self.dtype, lb.outer, 1024, swizzle=lb.inner)
        prepare(bars, held, self.columns, tid)
        start = cute.arch.retrieve_tmem_ptr(Float32, 16, held)
        part = mma.get_slice(0)
        ga = part.partition_A(cute.local_tile(tile_a, self.tiler, (0, 0, None), proj=(1, None, 1)))
        gb = part.partition_B(cute.local_tile(tile_b, self.tiler, (0, 0, None), proj=(None, 1, 1)))
        gd = part.partition_C(cute.local_tile(d, self.tiler, (0, 0, None), proj=(1, 1, None)))
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        shape = mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout
        total = cute.make_tensor(start, shape)
        one = cute.make_layout(1)
        to_a, from_a = cpasync.tma_partition(
            map_a, 0, one, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3)
        )
        to_b, from_b = cpasync.tma_partition(
            map_b, 0, one, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3)
        )
        if warp == 0:
            cpasync.prefetch_descriptor(map_a)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars, (self.m + self.n) * self.k * 2)
            cute.copy(map_a, from_a[(None, 0)], to_a[(None, 0)], tma_bar_ptr=bars)
            cute.copy(map_b, from_b[(None, 0)], to_b[(None, 0)], tma_bar_ptr=bars)
            cute.arch.mbarrier_wait(bars, 0)
            for step in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                at = (None, None, step, 0)
                cute.gemm(mma, total, fa[at], fb[at], total)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(bars + 1)
        cute.arch.mbarrier_wait(bars + 1, 0)
        store_result(self.load, total, gd, tid)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(start, self.columns)


@lru_cache(maxsize=64)
def gemm(
    m: int, n: int, k: int, *, a_major: str = "k", b_major: str = "k", **options: Any
) -> Compiled:
    """`Gemm`, compiled."""
    kernel = Gemm(m, n, k, a_major=a_major, b_major=b_major, **options)
    dtype = options.get("dtype", BFloat16)
    return compiled(
        kernel, matrix(dtype, m, k, a_major), matrix(dtype, n, k, b_major), matrix(Float32, m, n)
    )


def gemm_parameters(
    kernel: Compiled, a: torch.Tensor, b: torch.Tensor, d: Any, majors: tuple[str, str]
) -> list[Any]:
    """The parameters of `Gemm`: MMA state, two maps, the result."""
    held = [
        x if major == "k" else x.T.contiguous() for x, major in zip((a, b), majors, strict=True)
    ]
    maps = [map_of(x, tiles) for x, tiles in zip(held, kernel.maps, strict=True)]
    return [_MMA_STATE, *maps, d]

"""CuTe DSL kernels for the simulator tests, compiled to PTX for sm_103a."""

from __future__ import annotations

import tempfile
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import T, dsl_user_op


def fake(dtype: Any, *shape: int) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def ptx_of(kernel: Any, *tensors: Any) -> str:
    """The PTX of a compiled host function, for sm_103a."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder} --gpu-arch sm_103a"
        text = str(cute.compile(kernel, *tensors, make_fake_stream(), options=options).__ptx__)
    assert ".target sm_103a" in text
    return text


@dsl_user_op
def load_from_peer(pointer: Any, rank: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The float at the same shared address in CTA `rank` of the cluster."""
    code = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2;"
        " ld.shared::cluster.f32 $0, [there]; }"
    )
    address = Int32(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    operands = [address, rank.ir_value(loc=loc, ip=ip)]
    return Float32(
        llvm.inline_asm(
            T.f32(), operands, code, "=f,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip
        )
    )


class Gemv:
    """y[m, n] = x[m, k] @ w[n, k]^T in BF16; `ROWS` rows of w a CTA, 4 warps split k."""

    ROWS = 4
    WARPS = 4

    def __init__(self, n: int, k: int, m: int) -> None:
        self.n, self.k, self.m = n, k, m

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: CUstream):
        grid = [self.n // self.ROWS, 1, 1]
        self.kernel(x, w, y).launch(grid=grid, block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        lane, warp = tid % 32, tid // 32
        smem = utils.SmemAllocator()
        partial = smem.allocate_tensor(
            Float32, cute.make_layout((self.WARPS, self.ROWS * self.m)), 16
        )
        total = cute.make_rmem_tensor((self.ROWS, self.m), Float32)
        total.fill(0)
        vectors = self.k // 8
        for step in cutlass.range_constexpr((vectors + 127) // 128):
            vector = tid + step * 128
            if vector < vectors:
                rows = []
                for r in cutlass.range_constexpr(self.ROWS):
                    row = cute.make_tensor(
                        (w.iterator + (bid * self.ROWS + r) * self.k + vector * 8).align(16),
                        cute.make_layout(8),
                    )
                    rows.append(row.load().to(Float32))
                for b in cutlass.range_constexpr(self.m):
                    column = cute.make_tensor(
                        (x.iterator + b * self.k + vector * 8).align(16), cute.make_layout(8)
                    )
                    values = column.load().to(Float32)
                    for r in cutlass.range_constexpr(self.ROWS):
                        acc = total[r, b]
                        for j in cutlass.range_constexpr(8):
                            acc += rows[r][j] * values[j]
                        total[r, b] = acc
        for r in cutlass.range_constexpr(self.ROWS):
            for b in cutlass.range_constexpr(self.m):
                value = total[r, b]
                for step in cutlass.range_constexpr(5):
                    value += cute.arch.shuffle_sync_bfly(value, 16 >> step)
                if lane == 0:
                    partial[warp, r * self.m + b] = value
        cute.arch.sync_threads()
        if tid < self.ROWS * self.m:
            value = Float32(0)
            for i in cutlass.range_constexpr(self.WARPS):
                value += partial[i, tid]
            y[tid % self.m, bid * self.ROWS + tid // self.m] = value.to(BFloat16)


class ClusterSum:
    """y[i] = the sum of x[i] over the CTAs of each cluster of `size`, read from their memories."""

    def __init__(self, size: int, barrier: bool = True) -> None:
        self.size, self.barrier = size, barrier

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.kernel(x, y).launch(
            grid=[2 * self.size, 1, 1], block=[32, 1, 1], cluster=[self.size, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = utils.SmemAllocator()
        own = smem.allocate_tensor(Float32, cute.make_layout(32), 16)
        own[tid] = x[bid * 32 + tid]
        if cutlass.const_expr(self.barrier):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        value = Float32(0)
        for peer in cutlass.range_constexpr(self.size):
            value += load_from_peer(own.iterator + tid, Int32(peer))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        y[bid * 32 + tid] = value


class BulkDot:
    """y[n] = w[n, k] . x[k] in FP32; one warp streams w through `STAGES` slots, four consume."""

    STAGES = 3
    CHUNK = 512

    def __init__(self, k: int, wait_for_empty: bool = True) -> None:
        self.k, self.wait_for_empty = k, wait_for_empty

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: CUstream):
        grid = [w.shape[0], 1, 1]
        self.kernel(x, w, y).launch(grid=grid, block=[160, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        smem = utils.SmemAllocator()
        full = smem.allocate_array(Int64, 2 * self.STAGES)
        empty = full + self.STAGES
        slots = smem.allocate_tensor(BFloat16, cute.make_layout((self.CHUNK, self.STAGES)), 128)
        sums = smem.allocate_tensor(Float32, cute.make_layout(4), 16)
        if tid == 0:
            for s in cutlass.range_constexpr(self.STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        chunks = self.k // self.CHUNK
        if warp == 0:
            if lane == 0:
                atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), BFloat16)
                for i in cutlass.range(chunks, unroll=1):
                    s = i % self.STAGES
                    if cutlass.const_expr(self.wait_for_empty):  # noqa: SIM102 (compile time)
                        if i >= self.STAGES:
                            cute.arch.mbarrier_wait(empty + s, ((i // self.STAGES) & 1) ^ 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(full + s, self.CHUNK * 2)
                    source = (w.iterator + bid * self.k + i * self.CHUNK).align(16)
                    target = (slots.iterator + s * self.CHUNK).align(16)
                    cute.copy(
                        atom,
                        cute.make_tensor(source, cute.make_layout(self.CHUNK)),
                        cute.make_tensor(target, cute.make_layout(self.CHUNK)),
                        mbar_ptr=full + s,
                    )
        else:
            total = Float32(0)
            for i in cutlass.range(chunks, unroll=1):
                s = i % self.STAGES
                cute.arch.mbarrier_wait(full + s, (i // self.STAGES) & 1)
                first = (tid - 32) * 4
                for j in cutlass.range_constexpr(4):
                    here = slots[first + j, s].to(Float32)
                    total += here * x[i * self.CHUNK + first + j].to(Float32)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + s)
            for step in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, 16 >> step)
            if lane == 0:
                sums[warp - 1] = total
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if tid == 32:
                y[bid] = sums[0] + sums[1] + sums[2] + sums[3]

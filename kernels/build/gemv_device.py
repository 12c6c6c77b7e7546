"""Device code of `workbench_gemv`. Imports the DSL: only the builder's `trace` loads it."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, memory
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

VECTOR = 8  # BF16 elements in one 16-byte load


def arguments(m: int, n: int, k: int) -> tuple[Any, ...]:
    """Stand-ins for x [m, k], w [n, k], y [m, n] (BF16, contiguous, 16-byte aligned), a stream."""

    def matrix(rows: int, columns: int) -> Any:
        return make_fake_tensor(BFloat16, (rows, columns), (columns, 1), assumed_align=16)

    return matrix(m, k), matrix(n, k), matrix(m, n), make_fake_stream()


class Gemv:
    """One launch: n / rows CTAs of 32 * warps threads. Sizes in elements."""

    def __init__(self, m: int, n: int, k: int, rows: int, warps: int, pdl: bool) -> None:
        self.m, self.n, self.k = m, n, k
        self.rows, self.warps, self.pdl = rows, warps, pdl

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.workbench_gemv(x, w, y).launch(
            grid=[self.n // self.rows, 1, 1],
            block=[32 * self.warps, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def workbench_gemv(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor) -> None:
        """Threads stride over K in 16-byte pieces; warps reduce by shuffle, the CTA in SMEM."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        threads = 32 * self.warps
        lane, warp = tid % 32, tid // 32
        partial = memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.warps, self.rows * self.m)), 16
        )
        acc = cute.make_rmem_tensor((self.rows, self.m), Float32)
        acc.fill(0.0)
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        pieces = self.k // VECTOR
        for step in cutlass.range((pieces + threads - 1) // threads, unroll=1):
            piece = tid + step * threads
            if piece < pieces:
                xs = cute.make_rmem_tensor((VECTOR, self.m), BFloat16)
                for i in cutlass.range_constexpr(self.m):
                    row = cute.make_tensor(xs.iterator + VECTOR * i, cute.make_layout((1, VECTOR)))
                    cute.autovec_copy(cute.local_tile(x, (1, VECTOR), (i, piece)), row)
                for r in cutlass.range_constexpr(self.rows):
                    ws = cute.make_rmem_tensor((1, VECTOR), BFloat16)
                    tile = cute.local_tile(w, (1, VECTOR), (cta * self.rows + r, piece))
                    cute.autovec_copy(tile, ws)
                    for i in cutlass.range_constexpr(self.m):
                        for j in cutlass.range_constexpr(VECTOR):
                            acc[r, i] += ws[0, j].to(Float32) * xs[j, i].to(Float32)
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        for r in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.m):
                total = cute.arch.warp_reduction_sum(acc[r, i])
                if lane == 0:
                    partial[warp, r * self.m + i] = total
        cute.arch.sync_threads()
        if tid < self.rows * self.m:
            value = Float32(0.0)
            for s in cutlass.range_constexpr(self.warps):
                value += partial[s, tid]
            y[tid % self.m, cta * self.rows + tid // self.m] = value.to(BFloat16)

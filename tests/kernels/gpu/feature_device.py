"""Device code of the feature kernels: one instruction a row, tensor cores, atomics."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op


def words(*shape: int, dtype: Any = Int32) -> Any:
    """A stand-in for a dense tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=16)


def stream() -> Any:
    return make_fake_stream()


@dsl_user_op
def apply(code: str, value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Run PTX text that reads $1 and writes $0, both 32 bits."""
    operands = [value.ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(T.i32(), operands, code, "=r,r", has_side_effects=True, loc=loc, ip=ip)
    )


@dsl_user_op
def store_asm(
    code: str, constraints: str, operands: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Run PTX text for its effect; $0 is an address."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    llvm.inline_asm(None, values, code, constraints, has_side_effects=True, loc=loc, ip=ip)


class Lanewise:
    """y[i, t] = code i of x[t], one thread an element, 128 a CTA."""

    def __init__(self, codes: tuple[str, ...]) -> None:
        self.codes = codes

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream) -> None:
        self.lanewise(x, y).launch(grid=[x.shape[0] // 128, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def lanewise(self, x: cute.Tensor, y: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        place = cta * 128 + tid
        value = x[place]
        for i in cutlass.range_constexpr(len(self.codes)):
            y[i, place] = apply(self.codes[i], value)


MMA = (
    "{ .reg .f32 d0, d1, d2, d3, zero; mov.f32 zero, 0f00000000; "
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{d0, d1, d2, d3}, {$1, $2, $3, $4}, {$5, $6}, {zero, zero, zero, zero}; "
    "st.global.v4.f32 [$0], {d0, d1, d2, d3}; }"
)


class Mma:
    """One mma.sync a warp: fragments a [32, 4], b [32, 2] in words, d [32, 4] in FP32."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: CUstream) -> None:
        self.mma(a, b, d).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def mma(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor) -> None:
        lane, _, _ = cute.arch.thread_idx()
        address = Int64(d.iterator.toint()) + Int64(lane) * 16
        left = [a[lane, i] for i in range(4)]
        right = [b[lane, i] for i in range(2)]
        store_asm(MMA, "l,r,r,r,r,r,r,~{memory}", [address, *left, *right])


class Atomics:
    """counts[x[t] % 16] += 1 and sums[x[t] % 16] += x[t] over a grid, in integers."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor, stream: CUstream
    ) -> None:
        self.atomics(x, counts, sums).launch(
            grid=[x.shape[0] // 128, 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def atomics(self, x: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        value = x[cta * 128 + tid]
        offset = Int64(value & 15) * 4
        add = "red.relaxed.gpu.global.add.u32 [$0], $1;"
        store_asm(add, "l,r,~{memory}", [Int64(counts.iterator.toint()) + offset, Int32(1)])
        store_asm(add, "l,r,~{memory}", [Int64(sums.iterator.toint()) + offset, value])


def float_words(*shape: int) -> Any:
    return words(*shape, dtype=Float32)

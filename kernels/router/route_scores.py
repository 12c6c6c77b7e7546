"""Scores and keys from logits, by instructions that round correctly. Imports the DSL.

exp(-c) = 2^n exp(-r) with n = round(-c log2 e), r = c + n ln 2 in two steps (Cody and Waite), and
exp(-r) = 1 - r + r^2 q(r) with q of degree 4, fitted to |r| <= ln 2 / 2 within 3.1e-9 of the value.
No approximate instruction is used, so the bits are the same on every chip and in the simulator;
`route_bits.py` has the same steps in NumPy.
"""

from __future__ import annotations

import struct
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from k3fuse.kernels.common.device import ptx, warp
from k3fuse.kernels.router.route_bits import (
    LEAST,
    LN2_HIGH,
    LN2_LOW,
    MAGIC,
    MOST,
    POLYNOMIAL,
    SLOPE,
    SMALLEST,
)


def _f32(value: float) -> str:
    """A PTX constant."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _half_of_exp() -> str:
    """PTX that makes h = exp(-c) / 2 of c in [-89, 86], both .b32; it may be just below 2^127.

    The sum with MAGIC leaves n - 1 in the lowest bits: with the shift they become the exponent.
    """
    q = [_f32(value) for value in (1.0, -1.0, *POLYNOMIAL)]
    steps = f"fma.rn.f32 h, r, {q[-1]}, {q[-2]};"
    for coefficient in reversed(q[:-2]):
        steps += f" fma.rn.f32 h, h, r, {coefficient};"
    return (
        f"fma.rn.f32 z, c, {_f32(SLOPE)}, {_f32(MAGIC)}; add.rn.f32 n, z, {_f32(-MAGIC)};"
        f" fma.rn.f32 r, n, {_f32(LN2_HIGH)}, c; fma.rn.f32 r, n, {_f32(LN2_LOW)}, r;"
        f" {steps} shl.b32 z, z, 23; add.s32 h, h, z;"
    )


def sigmoid(logit: Any) -> Any:
    """1 / (1 + exp(-x)), the division correctly rounded; 0 for a NaN. Bits in and out.

    max and min return the number where the other one is a NaN, and 1 + exp(89) is infinite.
    """
    code = (
        f"{{ .reg .b32 c, z, n, r, h; max.f32 c, $1, {_f32(LEAST)}; min.f32 c, c, {_f32(MOST)};"
        f" {_half_of_exp()}"
        f" fma.rn.f32 h, h, {_f32(2.0)}, {_f32(1.0)}; div.rn.f32 $0, {_f32(1.0)}, h; }}"
    )
    return ptx.asm(code, [Int32], logit, pure=True)


def power_of_e(value: Any, most: Any) -> Any:
    """exp(value - most) of value <= most; 0 below exp(-86), NaN where the difference is."""
    code = (
        "{ .reg .pred p; .reg .b32 d, c, z, n, r, h; sub.rn.f32 d, $2, $1;"
        f" min.f32 c, d, {_f32(SMALLEST)}; {_half_of_exp()} mul.rn.f32 h, h, {_f32(2.0)};"
        f" setp.gt.f32 p, d, {_f32(SMALLEST)}; selp.b32 h, 0, h, p;"
        " setp.nan.f32 p, d, d; selp.b32 $0, d, h, p; }"
    )
    return ptx.asm(code, [Float32], value, most, pure=True)


@cute.jit
def softmax(
    logits: cutlass.Constexpr,
    inside: cutlass.Constexpr,
    sums: Int32,
    lane: Int32,
    warp_: Int32,
    warps: cutlass.Constexpr[int],
) -> Any:
    """exp(x - max) / sum of four logits a thread; 0 for all where one is NaN. Bits in and out.

    inside: which of the four are experts. Sums run over a thread, the lanes, the warps in order.
    sums: address of two times eight words of shared memory.
    """
    nothing = Float32(float("-inf"))
    known = [ptx.select(inside[i], ptx.as_f32(logits[i]), nothing) for i in range(4)]
    most = _across(ptx.most_f32, ptx.most_f32(
        ptx.most_f32(known[0], known[1]), ptx.most_f32(known[2], known[3])))  # fmt: skip
    place = sums + warp_ * Int32(4)
    if lane == 0:
        ptx.shared_store_f32(place, most)
    cute.arch.sync_threads()
    most = _gathered(ptx.most_f32, sums, warps)
    powers = [power_of_e(x, most) for x in known]
    total = _across(_plus, (powers[0] + powers[1]) + (powers[2] + powers[3]))
    if lane == 0:
        ptx.shared_store_f32(place + Int32(32), total)
    cute.arch.sync_threads()
    whole = _gathered(_plus, sums + Int32(32), warps)
    # max(NaN, 0) is 0.
    scores = [ptx.most_f32(warp.divide(power, whole), Float32(0.0)) for power in powers]
    return [ptx.as_i32(score) for score in scores]


def _plus(a: Any, b: Any) -> Any:
    return a + b


def _across(combine: Any, value: Any) -> Any:
    for step in (16, 8, 4, 2, 1):
        value = combine(value, ptx.shuffle_xor(value, step))
    return value


def _gathered(combine: Any, place: Any, warps: int) -> Any:
    value = ptx.shared_load_f32(place)
    for other in range(1, warps):
        value = combine(value, ptx.shared_load_f32(place + Int32(4 * other)))
    return value


def key(score: Any, bias: Any, logit: Any, of_nan: Any) -> Any:
    """score + bias as an integer in the order of floats; `of_nan` where it or the logit is a NaN.

    Bits in; bias None for none.
    """
    known = Int32(0) if bias is None else bias
    add = "mov.b32 b, $1;" if bias is None else "add.rn.f32 b, $1, $2;"
    code = (
        f"{{ .reg .pred p; .reg .b32 b, t; {add} setp.nan.f32 p, b, $3; shr.s32 t, b, 31;"
        " lop3.b32 t, t, 0x7fffffff, b, 0x6a; selp.b32 $0, $4, t, p; }"
    )
    return ptx.asm(code, [Int32], score, known, logit, of_nan, pure=True)

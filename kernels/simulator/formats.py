"""Number formats: exact decoding tables and correctly rounded encoders, over numpy arrays.

Sources: the OCP 8-bit floating point specification (e4m3, e5m2), the OCP microscaling formats
(e2m1, ue8m0) and the PTX instruction set manual (`cvt`, NaN results, saturation).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3fuse.kernels.simulator.types import Array, Value

_U32 = np.uint32


def _table(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """Values of all codes of a sign/exponent/mantissa format without infinities, as float32."""
    code = np.arange(1 << bits)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    small = mantissa * 2.0 ** (1 - bias)
    large = (1 + mantissa) * 2.0 ** (exponent.astype(np.float64) - bias)
    sign = np.where(code >> (bits - 1), -1.0, 1.0)
    return (sign * np.where(exponent == 0, small, large)).astype(np.float32)


E4M3 = _table(8, 4, 3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _table(8, 5, 2, 15)
E5M2[[0x7C, 0xFC]] = [np.inf, -np.inf]
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
E2M1 = _table(4, 2, 1, 1)
UE8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)

DECODE: dict[str, Array] = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "ue8m0": UE8M0}
_POSITIVE = {"e4m3": E4M3[:127], "e5m2": E5M2[:124], "e2m1": E2M1[:8]}
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}


def encode_small(value: Value, name: str) -> Value:
    """float32 -> codes of e4m3, e5m2 or e2m1 (uint8), round to nearest even, `.satfinite`.

    NaN becomes the canonical NaN; e2m1 has none and takes its largest value, as `cvt` does.
    """
    grid = _POSITIVE[name].astype(np.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    size = np.minimum(np.abs(np.asarray(value, np.float64)), grid[-1])
    code = np.searchsorted(middle, size, side="left")
    tie = size == middle[np.minimum(code, len(middle) - 1)]
    code = code + (tie & (code < len(middle)) & (code % 2 == 1))
    bits = 3 if name == "e2m1" else 7
    signed = code | (np.signbit(value).astype(np.int64) << bits)
    result: Value = np.where(np.isnan(value), _NAN[name], signed).astype(np.uint8)
    return result


def encode_ue8m0(value: Value, rounding: str) -> Value:
    """|float32| -> power-of-two exponents (uint8), towards zero (`rz`) or up (`rp`), satfinite."""
    bits = np.abs(np.asarray(value, np.float32)).view(_U32)
    exponent = bits >> _U32(23)
    fraction = bits & _U32(0x7FFFFF)
    if rounding == "rp":
        # A subnormal is 2**-149 .. 2**-126; code 0 is 2**-127 and code 1 is 2**-126.
        up = np.where(exponent == 0, fraction > _U32(0x400000), fraction != 0)
        exponent = exponent + up.astype(_U32)
    result: Value = np.where(np.isnan(value), 255, np.minimum(exponent, 254)).astype(np.uint8)
    return result


def bf16_to_f32(code: Value) -> Value:
    """bfloat16 bits (uint16) -> float32, exact."""
    return (code.astype(_U32) << _U32(16)).view(np.float32)


def f32_to_bf16(value: Value, rounding: str = "rn") -> Value:
    """float32 -> bfloat16 bits (uint16): nearest even (`rn`) or towards zero (`rz`); NaN 0x7fff."""
    bits = value.view(_U32)
    high = bits >> _U32(16)
    if rounding == "rn":
        high = (bits + _U32(0x7FFF) + (high & _U32(1))) >> _U32(16)
    nan = np.isnan(value)
    if np.any(nan):
        high = np.where(nan, _U32(0x7FFF), high)
    return high.astype(np.uint16)


def pack2(low: Value, high: Value, half: Any, whole: Any) -> Value:
    """Two codes side by side in one word: `low` in the lower half."""
    bits = whole(np.dtype(half).itemsize * 8)
    return low.astype(whole) | (high.astype(whole) << bits)


_SMALLEST = np.float32(2.0**-126 * (1 + 2.0**-20))
_TIE_MASK, _TIE = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)


def fma_f32(a: Value, b: Value, c: Value) -> Value:
    """Correctly rounded a*b + c in float32 (round to nearest even).

    Where a and b have the 8 significant bits of bfloat16, their product is exact in float32. Else
    the product of two float32 is exact in float64, so only the sum rounds there; rounding that sum
    again to float32 is wrong only when the first one landed on a midpoint of float32 (or in the
    subnormal range, where midpoints lie elsewhere). Those few lanes are corrected by rounding to
    odd (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    if _few_bits(a, b):
        product = a * b
        size = product.view(_U32) & _U32(0x7FFFFFFF)
        size -= _U32(0x00800000)  # a normal number, neither 0, subnormal, infinite nor NaN, is then
        if size.max() < _U32(0x7F000000):  # below this bound
            return product + c
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    result = total.astype(np.float32)
    doubt = (total.view(np.uint64) & _TIE_MASK) == _TIE
    doubt |= np.abs(result) < _SMALLEST
    if not np.any(doubt):
        return result
    if np.ndim(result) == 0:
        return np.float32(_round_to_odd(product, c, total))
    lanes = np.flatnonzero(doubt)
    factors, addend = (np.broadcast_to(value, result.shape)[lanes] for value in (product, c))
    result[lanes] = _round_to_odd(factors, addend, total[lanes])
    return result


def _few_bits(a: Value, b: Value) -> bool:
    """Whether all values of a and b are bfloat16 numbers."""
    bits = a.view(_U32) | b.view(_U32)
    together = int(bits) if np.ndim(bits) == 0 else int(np.bitwise_or.reduce(bits))
    return together & 0xFFFF == 0


def _round_to_odd(product: Value, c: Value, total: Value) -> Value:
    """The float32 nearest to product + c, given their float64 sum."""
    addend = np.asarray(c, np.float64)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.asarray(total).view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    # Towards the error: one step up or down in magnitude makes the last bit odd.
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(inexact, bits + step, bits).view(np.float64)
    return odd.astype(np.float32)


def fma_to_odd(a: Value, b: Value, c: Value) -> Value:
    """a*b + c of bfloat16 values (held as float32), rounded to odd float32.

    The float64 sum is exact wherever it can lie near a midpoint of bfloat16; rounding it to odd
    keeps the final rounding to bfloat16 correct.
    """
    total = np.multiply(a, b, dtype=np.float64) + c
    near = np.asarray(total.astype(np.float32))
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    step = np.where(np.abs(total) > np.abs(back), 1, -1).astype(np.int32)
    wrong = (back != total) & np.isfinite(near) & ((bits & 1) == 0)
    return np.where(wrong, bits + step, bits).view(np.float32)

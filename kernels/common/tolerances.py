"""The one tolerance table: how far a kernel's output may lie from its reference.

A reduction of length K in a format with unit roundoff u, accumulated in FP32, carries an error of
about one rounding of the result plus a random walk of K accumulation roundings (u32 * sqrt(K)).
Two roundings that fall on different sides of a tie differ by one ULP = 2u of the larger operand.
Over a whole tensor such roundings are independent, so their root mean square stays below u: a
result that is off by a factor of 1.01 stays near the band of each BF16 element, and far outside of
this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
}


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may lie from the expected one.

    rtol: per element. atol: relative to the largest magnitude of the expected tensor. rms: norm of
    the difference over the norm of the expected tensor. All 0 for exact results.
    """

    rtol: float
    atol: float
    rms: float = math.inf

    @property
    def largest(self) -> float:
        """The band at the largest expected element, relative to it."""
        return self.rtol + self.atol


EXACT = Tolerance(0.0, 0.0, 0.0)


def tolerance(dtype: torch.dtype, k: int, roundings: int = 1) -> Tolerance:
    """Tolerance of a K-long reduction in FP32, stored in `dtype` after `roundings` steps.

    Integers and bools are exact. Raises ValueError for a format that is not in the table.
    """
    if not dtype.is_floating_point and not dtype.is_complex:
        return EXACT
    if dtype not in _UNIT_ROUNDOFF:
        known = ", ".join(map(str, _UNIT_ROUNDOFF))
        raise ValueError(f"dtype={dtype} has no tolerance; use one of {known}")
    u = _UNIT_ROUNDOFF[dtype]
    accumulate = _UNIT_ROUNDOFF[torch.float32] * math.sqrt(max(k, 1))
    return Tolerance(
        rtol=2 * u * roundings,
        atol=2 * u * roundings / 4 + accumulate,
        rms=u * math.sqrt(roundings) + accumulate,
    )


@dataclass(frozen=True)
class Comparison:
    """A tensor beside the expected one.

    max_error: largest difference over the largest expected magnitude. rms_error: norm of the
    difference over the norm of the expected tensor. Both are infinite where a NaN or an infinity
    is not expected. outside: elements outside the band. worst: index of the largest difference.
    """

    max_error: float
    rms_error: float
    outside: int
    worst: tuple[int, ...]
    ok: bool


def compare(actual: torch.Tensor, expected: torch.Tensor, band: Tolerance) -> Comparison:
    """Compare element by element and as a whole.

    Raises ValueError where shapes or dtypes differ: such tensors are not comparable.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"actual is {actual.dtype} {tuple(actual.shape)}, expected is {expected.dtype} "
            f"{tuple(expected.shape)}; compare tensors of one form"
        )
    if not expected.numel():
        return Comparison(0.0, 0.0, 0, (), True)
    have, want = actual.double(), expected.double()
    same = (have == want) | (have.isnan() & want.isnan())
    error = torch.where(same, 0.0, (have - want).abs())
    error = torch.where(error.isnan(), math.inf, error)
    finite = want[want.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    allowed = torch.where(want.isfinite(), band.rtol * want.abs() + band.atol * scale, 0.0)
    outside = int((error > allowed).sum())
    largest, place = (float(error.max()), int(error.argmax()))
    norm = float(finite.square().sum().sqrt())
    rms = _over(float(error.square().sum().sqrt()), norm)
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape))
    return Comparison(_over(largest, scale), rms, outside, worst, outside == 0 and rms <= band.rms)


def _over(value: float, scale: float) -> float:
    """`value / scale`; 0 for 0 / 0, infinite for anything else over 0."""
    return value / scale if scale else math.inf if value else 0.0

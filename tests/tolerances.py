"""The one tolerance table of the test-suite.

A reduction of length K in a format with unit roundoff u, accumulated in FP32, carries an error of
about one rounding of the result plus a random walk of K accumulation roundings (u32 * sqrt(K)).
Two roundings that fall on different sides of a tie differ by one ULP = 2u of the larger operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """`atol` is relative to the largest magnitude of the expected tensor; `rtol` is per element."""

    rtol: float
    atol: float


_UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
}


def tolerance(dtype: torch.dtype, k: int, roundings: int = 1) -> Tolerance:
    """Tolerance of a K-long reduction in FP32, stored in `dtype` after `roundings` steps."""
    u = _UNIT_ROUNDOFF[dtype]
    accumulate = _UNIT_ROUNDOFF[torch.float32] * math.sqrt(max(k, 1))
    return Tolerance(rtol=2 * u * roundings, atol=2 * u * roundings / 4 + accumulate)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, k: int, roundings: int = 1, what: str = ""
) -> None:
    """Raise AssertionError where `actual` leaves the table's band around `expected`."""
    band = tolerance(expected.dtype, k, roundings)
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=band.rtol, atol=band.atol * scale, msg=lambda m: f"{what}: {m}"
    )

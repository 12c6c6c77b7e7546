"""The product's tolerance table, as an assertion."""

from __future__ import annotations

import torch

from k3fuse.kernels.common.tolerances import Tolerance, tolerance

__all__ = ["Tolerance", "assert_close", "tolerance"]


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, k: int, roundings: int = 1, what: str = ""
) -> None:
    """Raise AssertionError where `actual` leaves the table's band around `expected`."""
    band = tolerance(expected.dtype, k, roundings)
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=band.rtol, atol=band.atol * scale, msg=lambda m: f"{what}: {m}"
    )

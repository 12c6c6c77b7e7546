"""How the values of an op are compared, and what a tensor's bytes are."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from tolerances import assert_close, tolerance


def assert_matches(
    actual: Tensor, expected: Tensor, *, k: int, roundings: int = 1, what: str = ""
) -> None:
    """The table's band per element, and one unit roundoff per rounding on the L2 error of a row.

    Independent roundings add up like the square root of their number, so the second band sees a
    factor of 1.01 that hides inside the first.
    """
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert_close(actual, expected, k=k, roundings=roundings, what=what)
    band = tolerance(expected.dtype, k, 1)
    limit = band.rtol / 2 * math.sqrt(roundings) + band.atol / 2
    size = expected.double().norm(dim=-1)
    error = (actual.double() - expected.double()).norm(dim=-1)
    worst = float((error / size.clamp_min(1e-300)).max()) if error.numel() else 0.0
    assert worst <= limit, f"{what}: relative L2 error {worst:.2e} of a row, allowed {limit:.2e}"


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's values, bit by bit."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def wide(tensor: Tensor) -> np.ndarray:
    """The values as float64."""
    return tensor.double().numpy()

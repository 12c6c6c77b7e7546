"""The meaning of the attention projection, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.common.numerics import linear


def attention_projection(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """One row, several linears: x [M, K], weights [N_i, K] -> [M, N_i] each, in the dtype of x.

    FP32 accumulation, one rounding per output, as the stock GEMMs.
    """
    return [linear(x, weight) for weight in weights]

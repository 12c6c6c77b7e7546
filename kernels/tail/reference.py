"""The meaning of the tail after an opaque experts op, in PyTorch."""

from __future__ import annotations

from torch import Tensor

from k3fuse.kernels.common.collective import all_reduce
from k3fuse.kernels.common.numerics import linear, rms_norm


def latent_up(
    partial: Tensor, norm_weight: Tensor, up_weight: Tensor, eps: float, group: str, rounded: bool
) -> Tensor:
    """Rank partial [M, L] -> all-reduce -> RMSNorm -> up-projection [M, H], rounded at every step.

    The norm is not linear, so the latent is reduced over the ranks before it.
    """
    latent = all_reduce(partial, group)
    normed = rms_norm(latent, norm_weight, eps, latent.dtype, rounded)
    return linear(normed, up_weight)


def tail(
    routed: Tensor, shared: Tensor, norm_weight: Tensor, up_weight: Tensor, eps: float, group: str
) -> Tensor:
    """delta [M, H]: latent_up(routed [M, L]) + all-reduced shared [M, H], in their dtype.

    The normalised row is rounded before it is multiplied by the weight, as vLLM's rms_norm does.
    """
    return latent_up(routed, norm_weight, up_weight, eps, group, True) + all_reduce(shared, group)

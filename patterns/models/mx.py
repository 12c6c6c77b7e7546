"""Microscaling formats: MXFP4 weights and MXFP8 activations, 32 elements to one E8M0 scale."""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse.patterns.models.config import MX_GROUP

E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Value of each 4-bit code: sign, two exponent bits, one mantissa bit."""


def e2m1_decode(codes: Tensor) -> Tensor:
    """FP32 value of 4-bit codes (uint8), same shape: E2M1_VALUES by arithmetic.

    A table would be one more input of the graph, whose contents nobody can check there.
    """
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).float()
    normal = (mantissa + 2.0) * torch.exp2(exponent.float() - 2.0)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return magnitude * (1.0 - 2.0 * (codes >> 3).float())


def mxfp4_dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [..., K / 2] (low nibble first) and E8M0 uint8 [..., K / 32] to FP32 [..., K].

    value = e2m1(code) * 2^(scale - 127).
    """
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    values = e2m1_decode(codes.view(*scale.shape, MX_GROUP))
    factor = torch.exp2(scale.float() - 127.0)
    return (values * factor.unsqueeze(-1)).flatten(-2)


def mxfp8_round(x: Tensor) -> Tensor:
    """`x` [..., K] as its MXFP8 form reads back: E4M3 values times E8M0 scales, FP32 [..., K].

    Round-up rule: scale exponent = exponent(amax) - 8, one more where its mantissa is above 1.75,
    so that |x| / scale <= 448, the largest E4M3 value. Groups below 2^-118 share 2^-126.
    """
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // MX_GROUP, MX_GROUP)
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    # Adding 0x1FFFFF carries into the exponent exactly where the mantissa bits exceed 0x600000.
    exponent = ((bits + 0x1FFFFF) >> 23) - (127 + 8)
    scale = torch.exp2(exponent.clamp(min=-126).float())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

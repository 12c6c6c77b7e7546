"""OCP microscaling formats: E2M1 (MXFP4) and E4M3 (MXFP8) values, one E8M0 scale per 32.

E8M0 is a biased exponent: byte b is 2**(b-127), 255 is NaN. E2M1 codes are sign, two exponent bits
and one mantissa bit; two codes share a byte, the first in the low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
_E4M3_EXPONENT = 8  # 448 = 1.75 * 2**8
_E2M1_EXPONENT = 2  # 6 = 1.5 * 2**2
_NAN_SCALE = 255


def decode_e8m0(scales: Tensor) -> Tensor:
    """FP32 value of every E8M0 byte (uint8), same shape."""
    _require_bytes("scales", scales)
    wide = scales.to(torch.int32)
    # The biased exponent is the FP32 exponent field, except 2**-127, which FP32 holds as subnormal.
    bits = torch.where(wide == 0, torch.full_like(wide, 0x00400000), wide << 23)
    bits = torch.where(wide == _NAN_SCALE, torch.full_like(wide, 0x7FC00000), bits)
    return bits.view(torch.float32)


def decode_e2m1(packed: Tensor) -> Tensor:
    """FP32 values [..., 2n] of packed E2M1 codes (uint8) [..., n]."""
    _require_bytes("packed", packed)
    table = torch.tensor(
        E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=packed.device
    )
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return table[codes.flatten(-2).long()]


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """FP32 [..., n] of packed codes [..., n/2] and scales [..., n/32] (both uint8).

    Raises ValueError if the shapes do not belong together.
    """
    if packed.shape[:-1] != scales.shape[:-1] or packed.shape[-1] * 2 != scales.shape[-1] * BLOCK:
        raise ValueError(
            f"scales has shape {tuple(scales.shape)} for packed {tuple(packed.shape)}; expected "
            f"one scale per {BLOCK} values ({BLOCK // 2} bytes)"
        )
    values = _split(decode_e2m1(packed), BLOCK)
    return (values * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 codes [..., n/2] and E8M0 scales [..., n/32] of `x` [..., n].

    The scale is the largest power of two not above amax/4 (the OCP floor rule); values beyond 6
    saturate; ties go to the even code.
    """
    blocks = _blocks(x)
    scales = _scale_bytes(blocks, _E2M1_EXPONENT, round_up_above=None)
    scaled = torch.ldexp(blocks, 127 - scales.to(torch.int32).unsqueeze(-1)).flatten(-2)
    table = torch.tensor(E2M1_VALUES, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = scaled.abs().contiguous()
    # A tie lies on a middle; the even one of the two codes around it wins.
    below = torch.bucketize(magnitude, middles, right=False)
    above = torch.bucketize(magnitude, middles, right=True)
    code = torch.where(below % 2 == 0, below, above)
    code = _split((code + 8 * torch.signbit(scaled)).to(torch.uint8), 2)
    return code[..., 0] | (code[..., 1] << 4), scales


def quantize_mxfp8(x: Tensor, floor_rule: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 values [..., n] and E8M0 scales [..., n/32] of `x` [..., n].

    Round-up rule (default): exponent(amax) - 8, one more where the mantissa exceeds 1.75, so that
    no scaled magnitude exceeds 448. Floor rule: never one more; what exceeds 448 saturates. A block
    of zeros has scale byte 0. A NaN or an infinity in a block makes its scale NaN.
    """
    blocks = _blocks(x)
    scales = _scale_bytes(blocks, _E4M3_EXPONENT, round_up_above=None if floor_rule else 1.75)
    scaled = torch.ldexp(blocks, 127 - scales.to(torch.int32).unsqueeze(-1))
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scales


def dequantize_mxfp8(values: Tensor, scales: Tensor) -> Tensor:
    """FP32 [..., n] of E4M3 values [..., n] and E8M0 scales [..., n/32]."""
    blocks = _split(values.float(), BLOCK)
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def round_mxfp8(x: Tensor, floor_rule: bool = False) -> Tensor:
    """FP32 values of `x` [..., n] after a trip through MXFP8."""
    return dequantize_mxfp8(*quantize_mxfp8(x, floor_rule))


def _split(x: Tensor, n: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // n, n)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x has {x.shape[-1]} columns; a multiple of {BLOCK} is needed")
    return _split(x.float(), BLOCK)


def _scale_bytes(blocks: Tensor, exponent_of_max: int, round_up_above: float | None) -> Tensor:
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    power = exponent - 1 - exponent_of_max
    if round_up_above is not None:
        power = power + (mantissa * 2 > round_up_above)
    biased = (power + 127).clamp(0, _NAN_SCALE - 1)
    biased = torch.where(amax == 0, torch.zeros_like(biased), biased)
    biased = torch.where(amax.isfinite(), biased, torch.full_like(biased, _NAN_SCALE))
    return biased.to(torch.uint8)


def _require_bytes(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{name} is {tensor.dtype}; expected torch.uint8 (use view(torch.uint8))")

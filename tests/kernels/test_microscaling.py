"""MXFP4 and MXFP8: every code of every format, both scale rules, and the edges."""

from __future__ import annotations

import math

import pytest
import torch

from k3fuse.kernels.common.microscaling import (
    decode_e2m1,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    round_mxfp8,
)


def test_e2m1_value_table() -> None:
    """Sign, two exponent bits of bias 1, one mantissa bit: all 16 codes, from the bits."""
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        value = -value if code >> 3 else value
        low, high = decode_e2m1(torch.tensor([code], dtype=torch.uint8)).tolist()
        assert low == value
        assert math.copysign(1, low) == math.copysign(1, value)
        assert high == 0.0


def test_low_nibble_first() -> None:
    packed = torch.tensor([[0x72, 0x0F]], dtype=torch.uint8)
    assert decode_e2m1(packed).tolist() == [[1.0, 6.0, -6.0, 0.0]]


def test_e8m0_value_table() -> None:
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8)).tolist()
    assert values[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(values[255])


def test_e4m3_value_table() -> None:
    """Quantising every E4M3 value in a block with scale 1 gives it back, bit for bit."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values[~values.isnan()]
    assert len(finite) == 254  # 0x7F and 0xFF are NaN, there is no infinity
    assert finite.max() == 448
    for chunk in torch.split(finite, 31):
        row = torch.cat([chunk, torch.full((32 - len(chunk),), 448.0)])
        quantised, scale = quantize_mxfp8(row[None])
        assert scale.tolist() == [[127]]
        assert torch.equal(quantised.float(), row[None])
        assert torch.equal(dequantize_mxfp8(quantised, scale), row[None])


def test_e4m3_rounds_to_nearest_even() -> None:
    row = torch.full((1, 32), 448.0)
    row[0, :6] = torch.tensor([1.0625, 1.1875, 1.0624, 1.0626, 2.0**-10, 3 * 2.0**-10])
    values, _ = quantize_mxfp8(row)
    assert values.float()[0, :6].tolist() == [1.0, 1.25, 1.0, 1.125, 0.0, 2 * 2.0**-9]


@pytest.mark.parametrize("exponent", [-120, -9, 0, 3, 100])
@pytest.mark.parametrize(
    ("mantissa", "up"), [(1.0, 0), (1.5, 0), (1.75, 0), (1.7500001, 1), (1.99, 1)]
)
def test_scale_rules(exponent: int, mantissa: float, up: int) -> None:
    """exponent(amax) - 8, plus one above 1.75 with the round-up rule only."""
    row = torch.zeros(1, 32)
    row[0, 7] = -mantissa * 2.0**exponent
    biased = max(exponent - 8 + 127, 0)
    values, scale = quantize_mxfp8(row)
    assert int(scale) == max(exponent - 8 + up + 127, 0)
    assert float(values.float().abs().max()) <= 448
    values, scale = quantize_mxfp8(row, floor_rule=True)
    assert int(scale) == biased
    if up and biased:  # what the floor rule leaves above 448 saturates instead of becoming NaN
        assert float(values.float()[0, 7]) == -448


def test_floor_rule_saturates() -> None:
    row = torch.full((1, 32), 1.99)
    assert set(round_mxfp8(row, floor_rule=True)[0].tolist()) == {1.75}
    assert set(round_mxfp8(row)[0].tolist()) == {2.0}


def test_zero_nan_and_infinity() -> None:
    rows = torch.zeros(4, 32)
    rows[1, 3], rows[2, 3], rows[3, 3] = math.nan, math.inf, 2.0**-149
    values, scale = quantize_mxfp8(rows)
    assert scale[:, 0].tolist() == [0, 255, 255, 0]
    back = dequantize_mxfp8(values, scale)
    assert torch.equal(back[0], torch.zeros(32))
    assert back[1].isnan().all()
    assert back[2].isnan().all()
    assert back[3].isfinite().all()


def test_mxfp4_round_trip_of_every_value() -> None:
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8))[::2]
    row = torch.cat([values, values]) * 2.0**-5
    packed, scale = quantize_mxfp4(row[None])
    assert scale.tolist() == [[122]]
    assert torch.equal(dequantize_mxfp4(packed, scale), row[None])


def test_mxfp4_ties_go_to_the_even_code() -> None:
    row = torch.full((1, 32), 4.0)
    row[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25])
    packed, scale = quantize_mxfp4(row)
    assert dequantize_mxfp4(packed, scale)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, -0.0]


def test_mxfp4_saturates_at_six() -> None:
    packed, scale = quantize_mxfp4(torch.full((1, 32), 7.9))
    assert set(dequantize_mxfp4(packed, scale)[0].tolist()) == {6.0}


def test_refused_shapes() -> None:
    with pytest.raises(ValueError, match="x has 33 columns; a multiple of 32"):
        quantize_mxfp8(torch.zeros(1, 33))
    packed = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales has shape \(2, 2\)"):
        dequantize_mxfp4(packed, torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"scales is torch\.int8"):
        decode_e8m0(torch.zeros(2, dtype=torch.int8))
    assert dequantize_mxfp4(packed, torch.zeros(2, 1, dtype=torch.uint8)).shape == (2, 32)

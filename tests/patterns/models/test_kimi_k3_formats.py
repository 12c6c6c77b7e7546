"""MXFP4 and MXFP8 against value tables, SiTU, RMSNorm and routing against scalar loops."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tolerances import assert_close

from k3fuse.patterns.models.moe import select_experts
from k3fuse.patterns.models.mx import E2M1_VALUES, e2m1_decode, mxfp4_dequantise, mxfp8_round
from k3fuse.patterns.models.parallel import rms_norm, situ


def e4m3_value(code: int) -> float:
    """Value of an 8-bit E4M3 code: bias 7, no infinity; 0x7f is NaN and never asked for."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


E4M3 = sorted(e4m3_value(code) for code in range(127))


def round_to_e4m3(value: float) -> float:
    """Nearest of the table, ties to the even code."""
    size = abs(value)
    near = min(range(127), key=lambda i: (abs(E4M3[i] - size), i & 1))
    return math.copysign(E4M3[near], value)


def test_e2m1_table_by_bits() -> None:
    for code in range(16):
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert E2M1_VALUES[code] == (-size if code & 8 else size)
    decoded = e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.view(torch.int32).equal(torch.tensor(E2M1_VALUES).view(torch.int32))


def test_mxfp4_low_nibble_first_and_scale_by_group() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.tensor([[127, 126, 128, 120, 130, 3, 250, 127]] * 2, dtype=torch.uint8)
    values = mxfp4_dequantise(packed, scale)
    assert values.shape == (2, 256)
    assert values.dtype == torch.float32
    for row in range(2):
        for column in range(256):
            byte = int(packed[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            exponent = int(scale[row, column // 32]) - 127
            assert values[row, column].item() == E2M1_VALUES[code] * 2.0**exponent


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(448.0, 0), (449.0, 1), (256.0, 0), (1.75, -8), (1.7500001, -7), (1.0, -8), (0.0, -126)],
)
def test_mxfp8_scale_rounds_up_above_1_75(amax: float, exponent: int) -> None:
    # The smallest subnormal of E4M3 survives at the chosen scale, half of it goes to zero.
    step = 2.0 ** (exponent - 9)
    x = torch.zeros(32)
    x[0], x[1], x[2] = amax, min(step, amax), min(step / 2, amax)
    out = mxfp8_round(x)
    scale = 2.0**exponent
    assert out[0].item() == round_to_e4m3(float(x[0]) / scale) * scale
    assert out[1].item() == min(step, amax)
    assert out[2].item() == 0.0


def test_mxfp8_values_by_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator) * 10.0 ** torch.arange(-3, 3).view(3, 2).repeat(
        1, 32
    )
    x = x.to(torch.bfloat16)
    out = mxfp8_round(x)
    for row in range(3):
        for group in range(2):
            values = [float(v) for v in x[row, 32 * group : 32 * group + 32]]
            largest = max(abs(v) for v in values)
            exponent = math.floor(math.log2(largest)) - 8
            exponent += largest / 2.0 ** (exponent + 8) > 1.75
            for i, value in enumerate(values):
                expected = round_to_e4m3(value / 2.0**exponent) * 2.0**exponent
                assert out[row, 32 * group + i].item() == expected


def test_situ_by_loop() -> None:
    gate = torch.linspace(-30, 30, 61, dtype=torch.bfloat16)
    up = torch.linspace(90, -90, 61, dtype=torch.bfloat16)
    out = situ(gate, up, 4.0, 25.0)
    assert out.dtype == torch.float32
    expected = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        silu = 4 * math.tanh(g / 4) / (1 + math.exp(-g))
        expected.append(silu * 25 * math.tanh(u / 25))
    assert_close(out, torch.tensor(expected), k=8, roundings=4)
    assert float(out.abs().max()) > 90  # both saturations are in the table: 4 * 25


def test_rms_norm_rounds_once() -> None:
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight = torch.linspace(0.5, 1.5, 96).to(torch.bfloat16)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected.float().to(torch.bfloat16))
    twice = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(torch.bfloat16) * weight
    assert not torch.equal(twice, expected.float().to(torch.bfloat16))  # control


def route_by_loop(
    logits: list[float], bias: list[float], top_k: int, scale: float
) -> tuple[list[int], list[float]]:
    score = [1 / (1 + math.exp(-value)) for value in logits]
    order = sorted(range(len(score)), key=lambda e: (-(score[e] + bias[e]), e))[:top_k]
    total = sum(score[e] for e in order) + 1e-20
    return order, [score[e] * scale / total for e in order]


@pytest.mark.parametrize("selection", ["topk", "sort"])
def test_routing_by_loop(selection: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 64, generator=generator)
    bias = torch.randn(64, generator=generator)
    weights, ids = select_experts(logits, bias, 8, 2.5, selection)  # type: ignore[arg-type]
    assert weights.dtype == torch.bfloat16
    assert ids.dtype == torch.int64
    unbiased = 0
    for row in range(4):
        order, expected = route_by_loop(logits[row].tolist(), bias.tolist(), 8, 2.5)
        assert ids[row].tolist() == order
        assert_close(weights[row], torch.tensor(expected).to(torch.bfloat16), k=8)
        unbiased += order == route_by_loop(logits[row].tolist(), [0.0] * 64, 8, 2.5)[0]
    assert unbiased == 0  # control: the bias changes the choice


def test_ties_go_to_the_lower_id_under_sort() -> None:
    logits = torch.zeros(1, 96)
    logits[0, 90] = 1.0
    _, ids = select_experts(logits, torch.zeros(96), 4, 1.0, "sort")
    assert ids.tolist() == [[90, 0, 1, 2]]
    bias = torch.zeros(96)
    bias[7] = 0.25
    weights, ids = select_experts(logits, bias, 4, 1.0, "sort")
    assert ids.tolist() == [[7, 90, 0, 1]]
    # The weights ignore the bias: expert 7 weighs what the others with logit 0 weigh.
    assert weights[0, 0] == weights[0, 2]
    assert weights[0, 1] > weights[0, 0]


def test_ties_keep_the_values_under_topk() -> None:
    logits = torch.zeros(1, 96)
    logits[0, 90] = 1.0
    weights, ids = select_experts(logits, torch.zeros(96), 4, 1.0, "topk")
    sorted_weights, _ = select_experts(logits, torch.zeros(96), 4, 1.0, "sort")
    assert ids[0, 0] == 90
    assert len(set(ids[0].tolist())) == 4
    assert torch.equal(weights, sorted_weights)

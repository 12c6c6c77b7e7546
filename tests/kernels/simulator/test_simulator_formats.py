"""Number formats and float arithmetic against exact rational arithmetic and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from k3fuse.kernels.simulator import formats
from ptx_text import ints, lanewise

CASES = 20_000


def rounded(value: Fraction, bits: int, lowest: int) -> float:
    """The nearest number with `bits` significant bits, ties to even; quantum at least 2**lowest."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value)))
    while Fraction(2) ** exponent > abs(value):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    quantum = Fraction(2) ** max(exponent - bits + 1, lowest)
    result = round(value / quantum) * quantum
    return math.copysign(math.inf, result) if abs(result) >= Fraction(2) ** 128 else float(result)


def test_the_exact_rounding_itself() -> None:
    assert rounded(Fraction(1) + Fraction(1, 2**24), 24, -149) == 1.0
    assert rounded(Fraction(1) + Fraction(3, 2**24), 24, -149) == 1.0 + 2.0**-22
    assert rounded(Fraction(1, 2**150), 24, -149) == 0.0
    assert rounded(Fraction(3, 2**151), 24, -149) == 2.0**-149


def operands(count: int) -> list[np.ndarray]:
    """Random float32 triples: wide exponents, near cancellation, ties, subnormal results."""
    rng = np.random.default_rng(5)
    quarter = count // 4
    parts = []
    a, b = (rng.standard_normal(quarter) * 2.0 ** rng.integers(-20, 20, quarter) for _ in "ab")
    parts.append([a, b, rng.standard_normal(quarter) * 2.0 ** rng.integers(-40, 40, quarter)])
    a, b = (rng.standard_normal(quarter).astype(np.float32).astype(float) for _ in "ab")
    parts.append([a, b, -(a * b) * (1 + rng.integers(-3, 4, quarter) * 2.0**-23)])
    # A sum just beside a midpoint of float32, at a distance that float64 cannot hold.
    # (1 + k 2^-20)(1 - k 2^-20) = 1 - k^2 2^-40: half a unit of the last place of c, less a bit.
    k = rng.integers(1, 8, quarter) * 2.0**-20
    one = 1 + rng.integers(0, 2**23, quarter) * 2.0**-23
    parts.append([(1 + k) * 2.0**-12, (1 - k) * 2.0**-12, one])
    a = rng.standard_normal(quarter) * 2.0**-70
    parts.append(
        [a, rng.standard_normal(quarter) * 2.0**-70, rng.integers(-9, 9, quarter) * 2.0**-149]
    )
    return [np.concatenate(column).astype(np.float32) for column in zip(*parts, strict=True)]


def exact_fma(a: float, b: float, c: float) -> float:
    return rounded(Fraction(a) * Fraction(b) + Fraction(c), 24, -149)


def test_fma_is_correctly_rounded() -> None:
    a, b, c = operands(CASES)
    got = lanewise(
        "fma.rn.f32 %y, %x0, %x1, %x2;",
        [torch.from_numpy(x) for x in (a, b, c)],
        out=torch.float32,
    ).numpy()
    wanted = np.array([exact_fma(*map(float, row)) for row in zip(a, b, c, strict=True)])
    assert len(got) == CASES
    assert int((got != wanted.astype(np.float32)).sum()) == 0
    naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (naive != wanted.astype(np.float32)).sum() > 0, "no case needs the correction"


def test_fma_with_constants() -> None:
    c = torch.cat([torch.randn(500), torch.randn(500) * 2.0**-130, torch.zeros(5)])
    third = np.float32(1 / 3)
    bits = f"0f{third.view(np.uint32):08X}"
    got = lanewise(f"fma.rn.f32 %y, {bits}, {bits}, %x0;", [c], out=torch.float32)
    assert got.tolist() == [exact_fma(float(third), float(third), float(v)) for v in c]
    small = lanewise(f"fma.rn.f32 %y, {bits}, 0f00000001, %x0;", [c], out=torch.float32)
    assert small.tolist() == [exact_fma(float(third), 2.0**-149, float(v)) for v in c]


def test_fma_of_bf16_numbers_takes_the_short_way() -> None:
    rng = np.random.default_rng(6)
    a, b = (torch.from_numpy(rng.standard_normal(4096)).bfloat16().float() for _ in "ab")
    c = torch.from_numpy(rng.standard_normal(4096)).float()
    got = lanewise("fma.rn.f32 %y, %x0, %x1, %x2;", [a, b, c], out=torch.float32)
    wanted = [exact_fma(*map(float, row)) for row in zip(a, b, c, strict=True)]
    assert got.tolist() == wanted


def test_bf16_fma_rounds_once() -> None:
    rng = np.random.default_rng(7)
    a, b, c = (torch.from_numpy(rng.standard_normal(4096)).bfloat16() for _ in "abc")
    c[:1024] *= 2.0**12
    got = lanewise("fma.rn.bf16 %y, %x0, %x1, %x2;", [a, b, c], 16, torch.bfloat16)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert got.tolist() == [rounded(value, 8, -133) for value in exact]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("ue8m0", torch.float8_e8m0fnu)],
)
def test_every_code_of_the_8_bit_formats(name: str, dtype: torch.dtype) -> None:
    wanted = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    assert np.array_equal(formats.DECODE[name], wanted, equal_nan=True)


def test_every_code_of_e2m1() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert formats.E2M1.tolist() == [*values, *(-v for v in values)]


@pytest.mark.parametrize(("name", "count"), [("e4m3", 256), ("e5m2", 256), ("e2m1", 16)])
def test_every_code_survives_the_way_back(name: str, count: int) -> None:
    table = formats.DECODE[name]
    keep = np.isfinite(table)
    codes = np.arange(count, dtype=np.uint8)[keep]
    assert formats.encode_small(table[keep], name).tolist() == codes.tolist()


def test_every_code_of_ue8m0_survives_the_way_back() -> None:
    for rounding in ("rz", "rp"):
        assert formats.encode_ue8m0(formats.UE8M0, rounding).tolist() == list(range(256))


def wanted_codes(values: np.ndarray, name: str) -> list[int]:
    """The nearest code by exhaustive search in exact arithmetic, ties to the even code."""
    table = formats.DECODE[name]
    half = len(table) // 2
    grid = [Fraction(float(v)) for v in table[:half] if math.isfinite(v)]
    codes = []
    for value in values:
        size = abs(Fraction(float(value)))
        best = min(range(len(grid)), key=lambda code: (abs(grid[code] - size), code % 2))
        codes.append(best + (half if math.copysign(1, value) < 0 else 0))
    return codes


@pytest.mark.parametrize(("name", "size"), [("e4m3", 700.0), ("e5m2", 90000.0), ("e2m1", 8.0)])
def test_cvt_to_small_formats(name: str, size: float) -> None:
    rng = np.random.default_rng(8)
    table = formats.DECODE[name]
    grid = table[: len(table) // 2]
    grid = grid[np.isfinite(grid)]
    values = np.concatenate([
        (grid[1:] + grid[:-1]) / 2, grid, rng.uniform(-size, size, 400), rng.uniform(-1, 1, 400),
    ]).astype(np.float32)  # fmt: skip
    values = values[: len(values) // 2 * 2]
    low, high = torch.from_numpy(values[0::2].copy()), torch.from_numpy(values[1::2].copy())
    if name == "e2m1":
        line = "{ .reg .b8 q; cvt.rn.satfinite.e2m1x2.f32 q, %x1, %x0; cvt.u32.u8 %y, q; }"
        got = lanewise(line, [low, high])
        pairs = [(int(v) & 15, int(v) >> 4) for v in got]
    else:
        got = lanewise(f"cvt.rn.satfinite.{name}x2.f32 %y, %x1, %x0;", [low, high], 16)
        pairs = [(int(v) & 255, int(v) >> 8 & 255) for v in got]
    assert [code for pair in pairs for code in pair] == wanted_codes(values, name)


def nearest_codes(values: np.ndarray, name: str) -> np.ndarray:
    """The nearest code, ties to even: float64 holds all values and all midpoints exactly."""
    half = formats.DECODE[name][: len(formats.DECODE[name]) // 2].astype(np.float64)
    grid = half[np.isfinite(half)]
    middle, size = (grid[1:] + grid[:-1]) / 2, np.abs(values.astype(np.float64))
    code = np.searchsorted(middle, size)  # a tie goes to the lower code here
    tie = (code < len(middle)) & (size == middle[np.minimum(code, len(middle) - 1)])
    code += tie & (code % 2 == 1)
    return code + np.where(np.signbit(values), len(formats.DECODE[name]) // 2, 0)


@pytest.mark.parametrize(("name", "width"), [("e4m3", 8), ("e5m2", 8), ("e2m1", 4)])
def test_20000_cvt_to_small_formats(name: str, width: int) -> None:
    rng = np.random.default_rng(11)
    largest = float(np.nanmax(np.where(np.isfinite(formats.DECODE[name]), formats.DECODE[name], 0)))
    spread = rng.standard_normal(CASES) * 2.0 ** rng.integers(-22, 4, CASES) * largest / 8
    # A third of them within one unit of float32 of a midpoint or a code.
    grid = formats.DECODE[name][np.isfinite(formats.DECODE[name])].astype(np.float32)
    near = rng.choice(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]), CASES // 3)
    near = near * (1 + rng.integers(-1, 2, CASES // 3) * np.float32(2.0**-23))
    values = spread.astype(np.float32)
    values[: CASES // 3] = near
    pairs = torch.from_numpy(values).reshape(-1, 2)
    low, high = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    if name == "e2m1":
        line = "{ .reg .b8 q; cvt.rn.satfinite.e2m1x2.f32 q, %x1, %x0; cvt.u32.u8 %y, q; }"
        got = lanewise(line, [low, high]).numpy()
    else:
        got = lanewise(f"cvt.rn.satfinite.{name}x2.f32 %y, %x1, %x0;", [low, high], 16).numpy()
    got = got.astype(np.int64)
    codes = np.stack([got & (2**width - 1), got >> width & (2**width - 1)], axis=1).reshape(-1)
    assert len(codes) == CASES
    assert int((codes != nearest_codes(values, name)).sum()) == 0
    assert nearest_codes(values[:300], name).tolist() == wanted_codes(values[:300], name)
    assert len(np.unique(codes)) == len(grid), "every code occurs"


@pytest.mark.parametrize(("name", "bits", "lowest"), [("bf16", 8, -133), ("f16", 11, -24)])
def test_cvt_to_16_bits_is_correctly_rounded(name: str, bits: int, lowest: int) -> None:
    rng = np.random.default_rng(12)
    count = CASES // 4
    values = rng.standard_normal(count) * 2.0 ** rng.integers(lowest - 3, 14, count)
    # Half of them one unit of float32 beside a midpoint, or on it.
    middle = (rng.integers(2 ** (bits - 1), 2**bits, count // 2) + 0.5) * 2.0 ** (1 - bits)
    values[: count // 2] = middle * (1 + rng.integers(-1, 2, count // 2) * 2.0**-23)
    single = values.astype(np.float32)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    got = lanewise(f"cvt.rn.{name}.f32 %y, %x0;", [torch.from_numpy(single)], 16, dtype)
    wanted = [rounded(Fraction(float(v)), bits, lowest) for v in single]
    assert got.double().tolist() == wanted


def test_cvt_of_nan_and_infinity_to_e4m3() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    got = lanewise("cvt.rn.satfinite.e4m3x2.f32 %y, %x0, %x0;", [values], 16)
    assert [int(v) & 255 for v in got] == [0x7F, 0x7E, 0xFE, 0x80]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "ue8m0"])
def test_cvt_from_every_8_bit_code(name: str) -> None:
    codes = ints([code | (255 - code) << 8 for code in range(256)], torch.int16)
    target = "bf16" if name == "ue8m0" else "f16"
    rounding = "" if name == "ue8m0" else ".rn"
    got = lanewise(f"cvt{rounding}.{target}x2.{name}x2 %y, %x0;", [codes])
    halves = got.view(torch.bfloat16 if name == "ue8m0" else torch.float16).float().numpy()
    table = formats.DECODE[name]
    assert np.array_equal(halves[0::2], table, equal_nan=True)
    assert np.array_equal(halves[1::2], table[::-1], equal_nan=True)


def test_cvt_from_every_e2m1_pair() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    line = "{ .reg .b8 q; cvt.u8.u32 q, %x0; cvt.rn.f16x2.e2m1x2 %y, q; }"
    halves = lanewise(line, [codes]).view(torch.float16).float().tolist()
    assert halves[0::2] == [float(formats.E2M1[code & 15]) for code in range(256)]
    assert halves[1::2] == [float(formats.E2M1[code >> 4]) for code in range(256)]


@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_cvt_to_ue8m0(rounding: str) -> None:
    rng = np.random.default_rng(9)
    values = (rng.uniform(1, 2, 2000) * 2.0 ** rng.integers(-140, 127, 2000)).astype(np.float32)
    line = f"cvt.{rounding}.satfinite.ue8m0x2.f32 %y, %x0, %x0;"
    got = [int(v) & 255 for v in lanewise(line, [torch.from_numpy(values)], 16)]
    wanted = []
    for value in values.astype(float):
        power = math.floor(math.log2(value))
        up = rounding == "rp" and value != 2.0**power
        wanted.append(min(max(power + up, -127), 127) + 127)
    assert got == wanted


def test_cvt_to_bf16_and_f16() -> None:
    rng = np.random.default_rng(10)
    bits = rng.integers(0, 2**32, CASES, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32).copy())
    values = values[torch.isfinite(values)]
    got = lanewise("cvt.rn.bf16.f32 %y, %x0;", [values], 16, torch.bfloat16)
    assert torch.equal(got, values.bfloat16())
    halves = torch.from_numpy(rng.standard_normal(4096).astype(np.float32)) * 100
    assert torch.equal(
        lanewise("cvt.rn.f16.f32 %y, %x0;", [halves], 16, torch.float16), halves.half()
    )
    back = lanewise("cvt.f32.bf16 %y, %x0;", [got], 32, torch.float32)
    assert torch.equal(back, got.float())


FLOAT: list[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = [
    ("add.f32 %y, %x0, %x1;", torch.add),
    ("sub.rn.f32 %y, %x0, %x1;", torch.sub),
    ("mul.f32 %y, %x0, %x1;", torch.mul),
    ("div.rn.f32 %y, %x0, %x1;", torch.div),
    ("min.f32 %y, %x0, %x1;", torch.fmin),
    ("max.f32 %y, %x0, %x1;", torch.fmax),
    ("neg.f32 %y, %x0;", lambda a, b: -a),
    ("abs.f32 %y, %x0;", lambda a, b: a.abs()),
    ("copysign.f32 %y, %x0, %x1;", lambda a, b: torch.copysign(b, a)),
    ("sqrt.rn.f32 %y, %x0;", lambda a, b: a.double().sqrt().float()),
    ("rcp.rn.f32 %y, %x0;", lambda a, b: (1 / a.double()).float()),
    ("ex2.approx.ftz.f32 %y, %x0;", lambda a, b: torch.exp2(a.double()).float()),
    ("cvt.rni.f32.f32 %y, %x0;", lambda a, b: a.round()),
    ("fma.rn.ftz.f32 %y, %x0, %x1, 0f3F800000;", lambda a, b: (a.double() * b + 1).float()),
]


@pytest.mark.parametrize(("line", "function"), FLOAT, ids=lambda v: str(v).split(" ")[0])
def test_float_instructions(
    line: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(1000, generator=generator) for _ in "ab")
    got = lanewise(line, [a, b], out=torch.float32)
    assert torch.allclose(got, function(a, b), rtol=0, atol=0, equal_nan=True)


def test_packed_f32_and_bf16_pairs() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b, c = (torch.randn(512, generator=generator) for _ in "abc")
    pairs = [x.view(torch.int64) for x in (a, b, c)]
    got = lanewise("fma.rn.f32x2 %y, %x0, %x1, %x2;", pairs, 64).view(torch.float32)
    assert got.tolist() == [exact_fma(*map(float, row)) for row in zip(a, b, c, strict=True)]
    half = [x.bfloat16().view(torch.int32) for x in (a, b)]
    got = lanewise("mul.rn.bf16x2 %y, %x0, %x1;", half).view(torch.bfloat16)
    assert torch.equal(got, a.bfloat16() * b.bfloat16())

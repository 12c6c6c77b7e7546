"""Integer, bit and comparison instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ptx_text import ints, lanewise

MASK = 2**32 - 1


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def quotient(a: int, b: int) -> int:
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def funnel(a: int, b: int, count: int) -> int:
    return ((b << 32 | a) << min(count, 32)) >> 32


def permuted(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    total = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        total |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * place
    return total


Case = tuple[str, Callable[[int, int], int]]
CASES: list[Case] = [
    ("add.u32 %y, %x0, %x1;", lambda a, b: a + b),
    ("sub.s32 %y, %x0, %x1;", lambda a, b: a - b),
    ("mul.lo.s32 %y, %x0, %x1;", lambda a, b: a * b),
    ("mul.hi.u32 %y, %x0, %x1;", lambda a, b: a * b >> 32),
    ("mul.hi.s32 %y, %x0, %x1;", lambda a, b: signed(a) * signed(b) >> 32),
    ("mad.lo.u32 %y, %x0, %x1, 7;", lambda a, b: a * b + 7),
    ("div.u32 %y, %x0, %x1;", lambda a, b: a // b),
    ("div.s32 %y, %x0, %x1;", lambda a, b: quotient(signed(a), signed(b))),
    ("rem.s32 %y, %x0, %x1;", lambda a, b: signed(a) - quotient(signed(a), signed(b)) * signed(b)),
    ("min.s32 %y, %x0, %x1;", lambda a, b: min(signed(a), signed(b))),
    ("max.u32 %y, %x0, %x1;", max),
    ("and.b32 %y, %x0, %x1;", lambda a, b: a & b),
    ("or.b32 %y, %x0, %x1;", lambda a, b: a | b),
    ("xor.b32 %y, %x0, %x1;", lambda a, b: a ^ b),
    ("not.b32 %y, %x0;", lambda a, b: ~a),
    ("neg.s32 %y, %x0;", lambda a, b: -signed(a)),
    ("abs.s32 %y, %x0;", lambda a, b: abs(signed(a))),
    ("shl.b32 %y, %x0, 5;", lambda a, b: a << 5),
    ("shr.u32 %y, %x0, 5;", lambda a, b: a >> 5),
    ("shr.s32 %y, %x0, 40;", lambda a, b: signed(a) >> 40),
    ("and.b32 %y, %x1, 63; shl.b32 %y, %x0, %y;", lambda a, b: a << (b & 63)),
    ("and.b32 %y, %x1, 63; shr.s32 %y, %x0, %y;", lambda a, b: signed(a) >> (b & 63)),
    ("popc.b32 %y, %x0;", lambda a, b: a.bit_count()),
    ("clz.b32 %y, %x0;", lambda a, b: 32 - a.bit_length()),
    ("brev.b32 %y, %x0;", lambda a, b: int(f"{a:032b}"[::-1], 2)),
    ("bfe.u32 %y, %x0, 3, 9;", lambda a, b: a >> 3 & 511),
    ("prmt.b32 %y, %x0, %x1, 0x7c31;", lambda a, b: permuted(a, b, 0x7C31)),
    ("lop3.b32 %y, %x0, %x1, 15, 0x1e;", lambda a, b: a ^ (b | 15)),
    ("shf.l.wrap.b32 %y, %x0, %x1, 11;", lambda a, b: funnel(a, b, 11)),
    ("shf.r.clamp.b32 %y, %x0, %x1, 32;", lambda a, b: b),
    ("{ .reg .pred q; setp.lt.s32 q, %x0, %x1; selp.b32 %y, 3, 5, q; }",
     lambda a, b: 3 if signed(a) < signed(b) else 5),
    ("{ .reg .pred q, s; setp.hs.u32 q|s, %x0, %x1; selp.b32 %y, 3, 5, s; }",
     lambda a, b: 5 if a >= b else 3),
    ("{ .reg .pred q; setp.eq.u32 q, %x0, %x1; setp.ne.or.u32 q, %x0, 0, q; "
     "selp.b32 %y, 1, 0, q; }",
     lambda a, b: int(a != 0 or a == b)),
    ("{ .reg .pred q; setp.gt.u32 q, %x0, %x1; mov.b32 %y, 1; @!q mov.b32 %y, 2; }",
     lambda a, b: 1 if a > b else 2),
    ("{ .reg .b16 l, h; mov.b32 {l, h}, %x0; mov.b32 %y, {h, l}; }",
     lambda a, b: a >> 16 | a << 16),
    ("{ .reg .b64 w; mul.wide.u32 w, %x0, %x1; shr.u64 w, w, 20; cvt.u32.u64 %y, w; }",
     lambda a, b: a * b >> 20),
    ("{ .reg .b64 w; mad.wide.s32 w, %x0, %x1, 9; shr.u64 w, w, 20; cvt.u32.u64 %y, w; }",
     lambda a, b: signed(a) * signed(b) + 9 >> 20),
    ("cvt.s32.s8 %y, %x0;", lambda a, b: ((a & 255) ^ 128) - 128),
    ("cvt.sat.s8.s32 %y, %x0;", lambda a, b: max(-128, min(127, signed(a)))),
    ("{ .reg .b64 w, v; cvt.s64.s32 w, %x0; cvt.s64.s32 v, %x1; mul.hi.s64 w, w, v; "
     "cvt.u32.u64 %y, w; }", lambda a, b: signed(a) * signed(b) >> 64),
]  # fmt: skip


@pytest.mark.parametrize(("line", "function"), CASES, ids=[line for line, _ in CASES])
def test_integer_instruction(line: str, function: Callable[[int, int], int]) -> None:
    rng = np.random.default_rng(1)
    edge = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 31, 32, 33]
    first = [*edge, *(int(v) for v in rng.integers(0, 2**32, 500))]
    second = [int(v) for v in rng.integers(1, 2**32, len(first))]
    second[0:3] = [1, 2**32 - 1, 2**31]
    got = lanewise(line, [ints(first), ints(second)])
    wanted = [function(a, b) & MASK for a, b in zip(first, second, strict=True)]
    assert [int(v) & MASK for v in got] == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("cvt.rni.s32.f32 %y, %x0;", [2, -2, 0, 2**31 - 1, -(2**31), 0]),
        ("cvt.rzi.s32.f32 %y, %x0;", [2, -2, 0, 2**31 - 1, -(2**31), 0]),
        ("cvt.rpi.s32.f32 %y, %x0;", [3, -2, 1, 2**31 - 1, -(2**31), 0]),
        ("cvt.rmi.u32.f32 %y, %x0;", [2, 0, 0, 3_000_000_000 - 2**32, 0, 0]),
    ],
)
def test_float_to_integer(line: str, wanted: list[int]) -> None:
    values = torch.tensor([2.5, -2.5, 0.25, 3e9, -1e10, float("nan")])
    assert lanewise(line, [values]).tolist() == wanted


def test_integer_to_float() -> None:
    values = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 16777217], dtype=torch.int32)
    got = lanewise("cvt.rn.f32.s32 %y, %x0;", [values], out=torch.float32)
    assert torch.equal(got, values.float())

"""Arithmetic on a thread's columns, two at a time where the chip can: the same bits either way.

Lists of Float32 of even length. Packed instructions (f32x2, from sm_100a on) round each element as
the scalar ones do; sums and products are written so that both forms do the same operations.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from k3fuse.kernels.common.device import ptx

_PACKED = (
    "{{ .reg .b64 a, b, c; mov.b64 a, {{$2,$3}}; mov.b64 b, {{$4,$5}};{more} {op} a, {operands};"
    " mov.b64 {{$0,$1}}, a; }}"
)


def _each(op: str, packed: bool, *lists: list[Any]) -> list[Any]:
    """The instruction `op` (without its type) on each element, or each pair."""
    three = len(lists) == 3
    found: list[Any] = []
    if not packed:
        operands = ", ".join(f"${i + 1}" for i in range(len(lists)))
        for values in zip(*lists, strict=True):
            code = f"{op}.f32 $0, {operands};"
            found.append(ptx.asm(code, [Float32], *values, pure=True))
        return found
    more = " mov.b64 c, {$6,$7};" if three else ""
    code = _PACKED.format(more=more, op=f"{op}.f32x2", operands="a, b, c" if three else "a, b")
    for i in range(0, len(lists[0]), 2):
        pairs = [value for values in lists for value in values[i : i + 2]]
        found += ptx.asm(code, [Float32] * 2, *pairs, pure=True)
    return found


def add(a: list[Any], b: list[Any], packed: bool) -> list[Any]:
    """a + b."""
    return _each("add.rn", packed, a, b)


def mul(a: list[Any], b: list[Any], packed: bool) -> list[Any]:
    """The products of elements."""
    return _each("mul.rn", packed, a, b)


def fma(a: list[Any], b: list[Any], c: list[Any], packed: bool) -> list[Any]:
    """a b + c, rounded once."""
    return _each("fma.rn", packed, a, b, c)


def scaled(a: list[Any], factor: Any, packed: bool) -> list[Any]:
    """a times one number."""
    return mul(a, [factor] * len(a), packed)


def dot(a: list[Any], b: list[Any], packed: bool) -> Any:
    """The sum of products: even and odd elements apart, first to last, then both."""
    total = mul(a[:2], b[:2], packed)
    for i in range(2, len(a), 2):
        total = fma(a[i : i + 2], b[i : i + 2], total, packed)
    return total[0] + total[1]


def combine(a: Any, x: list[Any], b: Any, y: list[Any], packed: bool) -> list[Any]:
    """a x + b y; b y is not rounded before it is added."""
    return fma([b] * len(y), y, scaled(x, a, packed), packed)

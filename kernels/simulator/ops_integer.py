"""Integer, logic, comparison and data movement instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.ops_float import float_arithmetic, float_compare
from k3fuse.kernels.simulator.syntax import Constant, Vector
from k3fuse.kernels.simulator.translate import Reader, Site, operation
from k3fuse.kernels.simulator.types import (
    PRED,
    SIGNED,
    UNSIGNED,
    PtxType,
    Value,
    bits_type,
    is_scalar,
    parse_type,
)

Binary = Callable[[Value, Value], Value]
_ARITHMETIC: dict[str, Binary] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


@operation("mov")
def move(site: Site) -> Step:
    """`mov`, also packing `{a, b}` into a word and unpacking a word."""
    kind = site.take_type()
    site.done()
    if isinstance(site.operand(0), Vector):
        return _unpack(site, kind)
    if isinstance(site.operand(1), Vector):
        return _pack(site, kind)
    read, write = site.bits(1, kind.width), site.result(bits_type(kind))

    def run(frame: Frame) -> None:
        value = read(frame)
        write(frame, value if is_scalar(value) else value.copy())

    return run


def _unpack(site: Site, kind: PtxType) -> Step:
    items = site.items(0)
    width = kind.width // len(items)
    part = parse_type(f"b{width}")
    if part is None:
        raise site.unsupported("vector size")
    read = site.bits(1, kind.width)
    writes = [site.writer(item, part) for item in items]
    narrow, whole = UNSIGNED[width], UNSIGNED[kind.width]
    shifts = [whole(width * place) for place in range(len(items))]

    def run(frame: Frame) -> None:
        value = read(frame)
        if np.ndim(value) and value.flags.c_contiguous:
            # Views of the source; read-only, since registers are updated in place.
            parts = value.view(narrow)
            for place, write in enumerate(writes):
                part = parts[place :: len(writes)]
                part.flags.writeable = False
                write(frame, part)
            return
        for shift, write in zip(shifts, writes, strict=True):
            write(frame, (value >> shift).astype(narrow))

    return run


def _pack(site: Site, kind: PtxType) -> Step:
    count = len(site.items(1))
    width = kind.width // count
    reads, write = site.item_bits(1, width), site.result(bits_type(kind))
    whole = UNSIGNED[kind.width]

    def run(frame: Frame) -> None:
        total: Value = reads[0](frame).astype(whole)
        for place, read in enumerate(reads[1:], 1):
            total = total | (read(frame).astype(whole) << whole(width * place))
        write(frame, total)

    return run


@operation("cvta")
def convert_address(site: Site) -> Step:
    """`cvta`: generic and global addresses are equal; those of other spaces carry a tag."""
    to = site.take("to")
    space = site.take("global", "shared", "shared::cta", "shared::cluster", "local", "const",
                      "param")  # fmt: skip
    kind = site.take_type()
    site.done()
    read, write = site.bits(1, kind.width), site.result(kind)
    tag = np.uint64(GENERIC_TAGS.get((space or "").partition("::")[0], 0))
    if kind.width != 64:
        raise site.unsupported("32-bit generic addresses")
    if to:
        return lambda frame: write(frame, read(frame) & ~tag)
    return lambda frame: write(frame, read(frame) | tag)


GENERIC_TAGS = {"shared": 1 << 62, "local": 1 << 61, "param": 3 << 61}


@operation("add", "sub", "min", "max")
def arithmetic(site: Site) -> Step:
    """`add`, `sub`, `min`, `max` of integers; floats are handed on."""
    kind = site.take_type()
    if not kind.is_integer:
        return float_arithmetic(site, kind)
    site.done()
    name = site.instruction.parts[0]
    a, b, write = site.value(1, kind), site.value(2, kind), site.result(kind)
    apply = _ARITHMETIC[name]
    return lambda frame: write(frame, apply(a(frame), b(frame)))


@operation("and", "or", "xor")
def logic(site: Site) -> Step:
    """Bitwise logic on words and predicates."""
    kind = site.take_type()
    site.done()
    a, b, write = site.bits(1, kind.width), site.bits(2, kind.width), site.result(kind)
    apply = _ARITHMETIC[site.instruction.parts[0]]
    return lambda frame: write(frame, apply(a(frame), b(frame)))


@operation("not", "cnot")
def negation(site: Site) -> Step:
    """Bitwise not, and `cnot` (is zero)."""
    kind = site.take_type()
    site.done()
    read, write = site.bits(1, kind.width), site.result(kind)
    if site.instruction.parts[0] == "cnot":
        return lambda frame: write(frame, (read(frame) == 0).astype(kind.bits))
    return lambda frame: write(frame, ~read(frame))


@operation("shl", "shr")
def shift(site: Site) -> Step:
    """Shifts; amounts of the width or more give 0, or the sign for `shr.s`."""
    kind = site.take_type()
    site.done()
    read, amount, write = site.value(1, kind), site.bits(2, 32), site.result(kind)
    width, dtype = kind.width, kind.dtype
    left, signed = site.instruction.parts[0] == "shl", kind.kind == "s"

    def run(frame: Frame) -> None:
        value, count = read(frame), amount(frame)
        small = np.minimum(count, np.uint32(width - 1)).astype(dtype)
        result = value << small if left else value >> small
        if not signed and np.any(count >= width):
            result = np.where(count >= width, dtype(0), result)
        write(frame, result)

    operand = site.operand(2)
    if isinstance(operand, Constant) and 0 <= operand.value < width:
        fixed = dtype(operand.value)
        if left:
            return lambda frame: write(frame, read(frame) << fixed)
        return lambda frame: write(frame, read(frame) >> fixed)
    return run


@operation("mul", "mad")
def multiply(site: Site) -> Step:
    """Integer `mul` and `mad` (`.lo`, `.hi`, `.wide`); floats are handed on."""
    kind = site.take_type()
    if not kind.is_integer:
        return float_arithmetic(site, kind)
    mode = site.take("lo", "hi", "wide")
    site.done()
    a, b = site.value(1, kind), site.value(2, kind)
    adds = site.instruction.parts[0] == "mad"
    out = kind if mode != "wide" else parse_type(f"{kind.kind}{2 * kind.width}")
    if out is None or mode is None:
        raise site.unsupported("product width")
    write, product = site.result(out), _product(kind, mode)
    if not adds:
        return lambda frame: write(frame, product(a(frame), b(frame)))
    c = site.value(3, out)
    return lambda frame: write(frame, product(a(frame), b(frame)) + c(frame))


def _product(kind: PtxType, mode: str) -> Binary:
    if mode == "lo":
        return lambda a, b: a * b
    if mode == "wide":
        wide = (SIGNED if kind.kind == "s" else UNSIGNED)[2 * kind.width]
        return lambda a, b: a.astype(wide) * b.astype(wide)
    if kind.width == 64:
        return _high64_signed if kind.kind == "s" else _high64
    wide = (SIGNED if kind.kind == "s" else UNSIGNED)[64]
    dtype, shift = kind.dtype, wide(kind.width)
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> shift).astype(dtype)


def _high64(a: Value, b: Value) -> Value:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)


def _high64_signed(a: Value, b: Value) -> Value:
    high = _high64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


@operation("div", "rem")
def divide(site: Site) -> Step:
    """Integer division towards zero and its remainder; division by zero gives all ones."""
    kind = site.take_type()
    if not kind.is_integer:
        return float_arithmetic(site, kind)
    site.done()
    a, b, write = site.value(1, kind), site.value(2, kind), site.result(kind)
    quotient = site.instruction.parts[0] == "div"
    dtype = kind.dtype

    def run(frame: Frame) -> None:
        x, y = a(frame), b(frame)
        safe = np.where(y == 0, dtype(1), y).astype(dtype)
        rest = np.fmod(x, safe).astype(dtype)
        if quotient:
            result = np.where(y == 0, dtype(-1 if kind.kind == "s" else 2**kind.width - 1),
                              ((x - rest) // safe).astype(dtype))  # fmt: skip
        else:
            result = np.where(y == 0, x, rest)
        write(frame, result)

    return run


@operation("neg", "abs")
def sign(site: Site) -> Step:
    """Negation and absolute value; floats are handed on."""
    kind = site.take_type()
    if not kind.is_integer:
        return float_arithmetic(site, kind)
    site.done()
    read, write = site.value(1, kind), site.result(kind)
    if site.instruction.parts[0] == "neg":
        return lambda frame: write(frame, kind.dtype(0) - read(frame))
    return lambda frame: write(frame, np.abs(read(frame)))


_COMPARE: dict[str, Binary] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}


@operation("setp")
def compare(site: Site) -> Step:
    """`setp`, with its complement (`p|q`) and a combining predicate."""
    kind = site.take_type()
    name = site.left.pop(0) if site.left else ""
    combine = site.take("and", "or", "xor")
    a, b = site.value(1, kind), site.value(2, kind)
    if kind.is_integer and name in _COMPARE:
        test: Binary = _COMPARE[name]
    elif kind.kind in ("f", "bf"):
        test = float_compare(site, name)
    else:
        raise site.unsupported(f"comparison .{name}")
    site.done()
    first, second = (site.writer(item, PRED) for item in site.pair())
    third: Reader | None = site.bits(3, 1) if combine else None
    join: Any = _ARITHMETIC.get(combine or "")

    def run(frame: Frame) -> None:
        result = test(a(frame), b(frame))
        if third is None:
            first(frame, result)
            second(frame, ~result)
        else:
            other = third(frame)
            first(frame, join(result, other))
            second(frame, join(~result, other))

    return run


@operation("selp")
def select(site: Site) -> Step:
    """`selp`: one of two values by a predicate."""
    kind = site.take_type()
    site.done()
    a, b, flag = site.bits(1, kind.width), site.bits(2, kind.width), site.bits(3, 1)
    write = site.result(bits_type(kind))
    return lambda frame: write(frame, np.where(flag(frame), a(frame), b(frame)))

"""Floating point arithmetic: f16, f32, f64, bf16 and their packed pairs.

`fma` is correctly rounded. Transcendental `.approx` instructions are computed in float64 and
rounded, so they are closer to the true value than a GPU is; tests compare them with a tolerance.
NaN payloads are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.formats import bf16_to_f32, f32_to_bf16, fma_f32, fma_to_odd, pack2
from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.translate import Reader, Site, operation
from k3fuse.kernels.simulator.types import B16, F32, PtxType, Value, bits_type, is_scalar, spread

Function = Callable[..., Value]
_TINY = np.float32(2.0**-126)


def _nan_max(a: Value, b: Value) -> Value:
    return np.maximum(a, b)


def _nan_min(a: Value, b: Value) -> Value:
    return np.minimum(a, b)


def fma_any(a: Value, b: Value, c: Value) -> Value:
    """a*b + c of float32 or float16, rounded once."""
    return fma_f32(a, b, c) if a.dtype == np.float32 else _fma_f16(a, b, c)


def _fma_f16(a: Value, b: Value, c: Value) -> Value:
    """Half precision fma: the product is exact in float32 and the sum exact in float64."""
    total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return total.astype(np.float16)


_FUNCTIONS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": np.fmin,
    "max": np.fmax,
    "neg": lambda a: -a,
    "abs": np.abs,
    "fma": fma_any,
}
_OPERANDS = {"neg": 1, "abs": 1, "fma": 3}


def flush(value: Value) -> Value:
    """Subnormal float32 -> zero of the same sign (`.ftz`)."""
    return np.where(np.abs(value) < _TINY, np.copysign(np.float32(0), value), value)


def _saturate(value: Value) -> Value:
    """Clamp to [0, 1]; NaN becomes 0 (`.sat`)."""
    return np.clip(np.nan_to_num(value, nan=0.0), value.dtype.type(0), value.dtype.type(1))


def _rounding(site: Site, name: str, kind: PtxType) -> None:
    """Take the rounding modifiers; only round to nearest even is modelled."""
    if site.take("rz", "rm", "rp"):
        raise site.unsupported("rounding modes other than .rn")
    site.take("rn")
    if name == "div":
        site.take("approx", "full")
    if kind.kind not in ("f", "bf", "f16x2", "bf16x2", "f32x2"):
        raise site.unsupported(f"arithmetic on .{kind.name}")


@operation("fma")
def fused(site: Site) -> Step:
    """`fma.rn`."""
    return float_arithmetic(site, site.take_type())


def float_arithmetic(site: Site, kind: PtxType) -> Step:
    """Arithmetic on a float type, including `f32 x bf16` mixed forms and packed pairs."""
    name = site.instruction.parts[0]
    if name not in _FUNCTIONS:
        raise site.unsupported("float operation")
    function, count = _FUNCTIONS[name], _OPERANDS.get(name, 2)
    if name in ("min", "max") and site.take("NaN"):
        function = _nan_max if name == "max" else _nan_min
    if name == "fma" and kind.kind in ("bf", "bf16x2"):
        function = fma_to_odd
    if name == "fma" and kind.name == "f64":
        raise site.unsupported("fma in double precision")
    _rounding(site, name, kind)
    mixed = bool(site.take("f32")) if kind.name in ("bf16", "f16") else False
    ftz, sat = bool(site.take("ftz")), bool(site.take("sat"))
    site.done()
    if mixed:
        return _mixed(site, name, kind)
    if kind.kind in ("f16x2", "bf16x2", "f32x2"):
        if ftz or sat:
            raise site.unsupported(".ftz or .sat on packed types")
        return _packed(site, kind, function, count)
    reads = [site.value(place + 1, kind) for place in range(count)]
    write = site.result(kind)
    if kind.kind == "bf" and name in ("neg", "abs"):
        return _bf16_sign(site, name)
    if not ftz and not sat:
        if count == 2:
            first, second = reads
            return lambda frame: write(frame, function(first(frame), second(frame)))
        return lambda frame: write(frame, function(*(read(frame) for read in reads)))
    if ftz and kind.name != "f32":
        raise site.unsupported(".ftz on this type")

    def run(frame: Frame) -> None:
        values = [read(frame) for read in reads]
        if ftz:
            values = [flush(value) for value in values]
        result = function(*values)
        result = flush(result) if ftz else result
        write(frame, _saturate(result) if sat else result)

    return run


def _bf16_sign(site: Site, name: str) -> Step:
    """Sign changes of bf16 touch no other bit."""
    raw, write = site.bits(1, 16), site.result(B16)
    mask = np.uint16(0x8000)
    if name == "neg":
        return lambda frame: write(frame, raw(frame) ^ mask)
    return lambda frame: write(frame, raw(frame) & ~mask)


def _mixed(site: Site, name: str, kind: PtxType) -> Step:
    """`add|sub.f32.bf16 d, a, c` and `fma.rn.f32.bf16 d, a, b, c`: the last operand is f32."""
    if name not in ("add", "sub", "fma"):
        raise site.unsupported("mixed precision operation")
    narrow = [site.value(1, kind)] + ([site.value(2, kind)] if name == "fma" else [])
    last, write = site.value(len(narrow) + 1, F32), site.result(F32)

    def run(frame: Frame) -> None:
        first = narrow[0](frame).astype(np.float32)
        if name == "fma":
            # The product of two 8- or 11-bit significands is exact in float32, except for
            # exponents out of its range, which the general fma handles.
            write(frame, fma_f32(first, narrow[1](frame).astype(np.float32), last(frame)))
        else:
            write(frame, first + last(frame) if name == "add" else first - last(frame))

    return run


def _packed(site: Site, kind: PtxType, function: Function, count: int) -> Step:
    reads = [site.bits(place + 1, kind.width) for place in range(count)]
    write = site.result(bits_type(kind))

    def run(frame: Frame) -> None:
        values = [unpack(read(frame), kind) for read in reads]
        low = function(*(pair[0] for pair in values))
        high = function(*(pair[1] for pair in values))
        write(frame, repack(low, high, kind))

    return run


def unpack(value: Value, kind: PtxType) -> tuple[Value, Value]:
    """The two halves of a packed pair as numbers (bf16 as float32)."""
    if kind.kind == "f32x2":
        low, high = value.astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)
        return low.view(np.float32), high.view(np.float32)
    low, high = value.astype(np.uint16), (value >> np.uint32(16)).astype(np.uint16)
    if kind.kind == "bf16x2":
        return bf16_to_f32(low), bf16_to_f32(high)
    return low.view(np.float16), high.view(np.float16)


def repack(low: Value, high: Value, kind: PtxType) -> Value:
    """The inverse of `unpack`; bf16 halves are rounded."""
    if kind.kind == "f32x2":
        return pack2(low.view(np.uint32), high.view(np.uint32), np.uint32, np.uint64)
    if kind.kind == "bf16x2":
        return pack2(f32_to_bf16(low), f32_to_bf16(high), np.uint16, np.uint32)
    return pack2(low.view(np.uint16), high.view(np.uint16), np.uint16, np.uint32)


_UNARY: dict[str, Function] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@operation(*_UNARY)
def transcendental(site: Site) -> Step:
    """Reciprocal, roots, exponentials and the like, through float64."""
    kind = site.take_type()
    if kind.name not in ("f32", "f64"):
        raise site.unsupported(f"on .{kind.name}")
    site.take("approx", "rn")
    ftz = bool(site.take("ftz"))
    site.done()
    function = _UNARY[site.instruction.parts[0]]
    read, write, dtype = site.value(1, kind), site.result(kind), kind.dtype

    def run(frame: Frame) -> None:
        value = flush(read(frame)) if ftz else read(frame)
        result = function(value.astype(np.float64)).astype(dtype)
        write(frame, flush(result).astype(dtype) if ftz else result)

    return run


@operation("copysign")
def copy_sign(site: Site) -> Step:
    """`copysign d, a, b`: the magnitude of b with the sign of a."""
    kind = site.take_type()
    site.done()
    a, b, write = site.value(1, kind), site.value(2, kind), site.result(kind)
    return lambda frame: write(frame, np.copysign(b(frame), a(frame)))


def float_compare(site: Site, name: str) -> Callable[[Value, Value], Value]:
    """The comparison `name` on floats: ordered, or unordered when it ends in `u`."""
    site.take("ftz")
    if name in ("num", "nan"):
        wanted = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    ordered: dict[str, Function] = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: (a < b) | (a > b),
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    test = ordered.get(name) or ordered.get(name.removesuffix("u"))
    if test is None:
        raise site.unsupported(f"comparison .{name}")
    if name in ordered:
        return test
    return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)


def lanes_of(frame: Frame, read: Reader) -> Value:
    """The value of a reader with one element a lane."""
    value = read(frame)
    return spread(value, frame.count) if is_scalar(value) else value

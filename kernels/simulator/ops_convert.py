"""`cvt`: between integers, floats, bf16, and the packed 8, 6 and 4-bit formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from k3fuse.kernels.simulator.formats import (
    DECODE,
    encode_small,
    encode_ue8m0,
    f32_to_bf16,
    pack2,
)
from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.ops_float import flush
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import B16, B32, PtxType, Value, bits_type

Function = Callable[[Value], Value]
_TO_INTEGER: dict[str, Function] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2")


@operation("cvt")
def convert(site: Site) -> Step:
    """Any modelled conversion; the types decide which."""
    source = site.take_type()
    target = site.take_type()
    if site.take("pack"):
        raise site.unsupported("cvt.pack")
    if target.kind.endswith("x2"):
        return _to_pair(site, source, target)
    if source.kind.endswith("x2"):
        raise site.unsupported("unpacking to one value")
    if source.is_integer:
        return _from_integer(site, source, target)
    if target.is_integer:
        return _float_to_integer(site, source, target)
    return _float_to_float(site, source, target)


def _from_integer(site: Site, source: PtxType, target: PtxType) -> Step:
    saturate = site.take("sat")
    if not target.is_integer:
        site.take("rn")
    site.done()
    read, write = site.value(1, source), site.result(target)
    dtype: Any = np.float32 if target.kind == "bf" else target.dtype
    if target.kind == "bf" and source.width > 16:
        raise site.unsupported("conversion rounds twice here")
    if not saturate:
        return lambda frame: write(frame, read(frame).astype(dtype))
    if not target.is_integer:
        raise site.unsupported(".sat to a float")
    limits = np.iinfo(dtype)
    own = np.iinfo(source.dtype)
    low = source.dtype(max(limits.min, own.min))
    high = source.dtype(min(limits.max, own.max))
    return lambda frame: write(frame, np.clip(read(frame), low, high).astype(dtype))


def _float_to_integer(site: Site, source: PtxType, target: PtxType) -> Step:
    mode = site.take(*_TO_INTEGER)
    ftz = bool(site.take("ftz"))
    site.take("sat")
    site.done()
    if mode is None:
        raise site.unsupported("no integer rounding mode")
    rounder, read, write = _TO_INTEGER[mode], site.value(1, source), site.result(target)
    limits = np.iinfo(target.dtype)

    def run(frame: Frame) -> None:
        value = flush(read(frame)) if ftz else read(frame)
        whole = rounder(np.asarray(value, np.float64))
        inside = np.where(np.isnan(whole), 0.0, whole)
        big, small = inside >= float(limits.max), inside <= float(limits.min)
        kept = np.where(big | small, 0.0, inside).astype(target.dtype)
        result = np.where(big, limits.max, np.where(small, limits.min, kept))
        write(frame, result.astype(target.dtype))

    return run


def _float_to_float(site: Site, source: PtxType, target: PtxType) -> Step:
    mode = site.take("rn", "rz", *_TO_INTEGER)
    ftz = bool(site.take("ftz"))
    saturate = site.take("sat")
    relu = site.take("relu")
    site.done()
    if mode == "rz" and target.kind != "bf":
        raise site.unsupported("rounding towards zero to this type")
    if source.kind == "f" and source.width == 64 and target.width < 32:
        raise site.unsupported("conversion rounds twice here")
    read = site.value(1, source)
    if target.kind == "bf":
        if saturate:
            raise site.unsupported(".sat to bf16")
        write = site.result(B16)

        def to_bf16(frame: Frame) -> None:
            value = read(frame).astype(np.float32)
            value = np.where(value > 0, value, np.float32(0)) if relu else value
            write(frame, f32_to_bf16(value, mode or "rn"))

        return to_bf16
    if relu:
        raise site.unsupported(".relu")
    write = site.result(target)
    rounder: Function | None = _TO_INTEGER.get(mode or "")

    def run(frame: Frame) -> None:
        value = read(frame)
        value = flush(value) if ftz and value.dtype == np.float32 else value
        value = rounder(value) if rounder else value
        result = value.astype(target.dtype)
        if saturate:
            result = np.clip(np.nan_to_num(result, nan=0.0), target.dtype(0), target.dtype(1))
        write(frame, result)

    return run


def _to_pair(site: Site, source: PtxType, target: PtxType) -> Step:
    if source.name in _SMALL or source.name == "ue8m0x2":
        return _decode_pair(site, source, target)
    relu = bool(site.take("relu"))
    saturate = bool(site.take("satfinite"))
    mode = site.take("rn", "rz", "rp")
    site.done()
    bits = bits_type(target)
    if source.name != "f32" or mode is None:
        raise site.unsupported("packed conversion")
    high, low, write = site.value(1, source), site.value(2, source), site.result(bits)
    encode = _encoder(site, target, mode, saturate)

    def run(frame: Frame) -> None:
        pair = [low(frame), high(frame)]
        if relu:
            pair = [np.where(value > 0, value, np.float32(0)) for value in pair]
        first, second = (encode(value) for value in pair)
        if target.name == "e2m1x2":
            write(frame, first | (second << np.uint8(4)))
        else:
            half, whole = first.dtype.type, bits.bits
            write(frame, pack2(first, second, half, whole))

    return run


def _encoder(site: Site, target: PtxType, mode: str, saturate: bool) -> Function:
    name = target.name.removesuffix("x2")
    if name in ("e4m3", "e5m2", "e2m1"):
        if mode != "rn" or not saturate:
            raise site.unsupported("only .rn.satfinite is modelled for this type")
        return lambda value: encode_small(value, name)
    if name == "ue8m0":
        if not saturate or mode == "rn":
            raise site.unsupported("only .rz and .rp with .satfinite are modelled for ue8m0")
        return lambda value: encode_ue8m0(value, mode)
    if saturate or mode == "rp":
        raise site.unsupported("modifier")
    if name == "bf16":
        return lambda value: f32_to_bf16(value, mode)
    if name == "f16" and mode == "rn":
        return lambda value: value.astype(np.float16).view(np.uint16)
    raise site.unsupported("packed conversion")


def _decode_pair(site: Site, source: PtxType, target: PtxType) -> Step:
    site.take("rn")
    site.done()
    name = source.name.removesuffix("x2")
    fits = target.name == "f16x2" if name != "ue8m0" else target.name == "bf16x2"
    if not fits:
        raise site.unsupported("packed conversion")
    read, write = site.bits(1, source.width), site.result(B32)
    half = 4 if name == "e2m1" else 8
    table = DECODE[name]
    codes = f32_to_bf16(table) if target.name == "bf16x2" else table.astype(np.float16)
    codes = codes.view(np.uint16)

    def run(frame: Frame) -> None:
        word = read(frame)
        shift, mask = word.dtype.type(half), word.dtype.type((1 << half) - 1)
        write(frame, pack2(codes[word & mask], codes[word >> shift], np.uint16, np.uint32))

    return run

"""PTX scalar and packed types: kind, width in bits, and the numpy type of one element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# A register value: an array over the active lanes, or one numpy scalar that all of them share.
Value = Any

UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}

_PACKED = {
    "f16x2": 32,
    "bf16x2": 32,
    "f32x2": 64,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "ue8m0x2": 16,
    "e2m1x2": 8,
}


@dataclass(frozen=True)
class PtxType:
    """One PTX type.

    `kind` is "b", "u", "s", "f", "bf", "pred", or the name of a packed type; `width` is in bits.
    """

    name: str
    kind: str
    width: int

    @property
    def bits(self) -> Any:
        """The numpy type of the raw bits (bool for a predicate)."""
        return np.bool_ if self.kind == "pred" else UNSIGNED[self.width]

    @property
    def dtype(self) -> Any:
        """The numpy type that arithmetic on this type uses; raw bits where there is none."""
        if self.kind == "s":
            return SIGNED[self.width]
        if self.kind == "f":
            return FLOAT[self.width]
        return self.bits

    @property
    def is_integer(self) -> bool:
        """Whether the type is one of .bN, .uN, .sN."""
        return self.kind in ("b", "u", "s")


@cache
def parse_type(name: str) -> PtxType | None:
    """The type called `name` (without the dot), or None when it is not a modelled type."""
    if name == "pred":
        return PtxType(name, "pred", 1)
    if name in _PACKED:
        return PtxType(name, name, _PACKED[name])
    if name == "bf16":
        return PtxType(name, "bf", 16)
    kind, digits = name[:1], name[1:]
    if kind in "bus" and digits in ("8", "16", "32", "64"):
        return PtxType(name, kind, int(digits))
    if kind == "f" and digits in ("16", "32", "64"):
        return PtxType(name, kind, int(digits))
    return None


PRED = PtxType("pred", "pred", 1)
B16, B32, B64 = (PtxType(f"b{width}", "b", width) for width in (16, 32, 64))
U32 = PtxType("u32", "u", 32)
F32 = PtxType("f32", "f", 32)


def bits_type(kind: PtxType, *, signed: bool = False) -> PtxType:
    """The untyped form of a type; with `signed`, a signed integer stays one and is extended so."""
    if kind.kind == "pred":
        return kind
    letter = "s" if signed and kind.kind == "s" else "b"
    return PtxType(f"{letter}{kind.width}", letter, kind.width)


def is_scalar(value: Value) -> bool:
    """Whether all lanes share this value."""
    return np.ndim(value) == 0


def spread(value: Value, count: int) -> Array:
    """The value as an array of `count` lanes (read-only when it was a scalar)."""
    return np.broadcast_to(value, (count,)) if np.ndim(value) == 0 else value

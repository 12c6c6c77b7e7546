"""Descriptors of the tensor core: matrices in shared memory, instructions, and swizzled addresses.

Sources: PTX ISA, tcgen05, "Matrix descriptor", "Canonical layouts", "Instruction descriptor"; the
names of the strides follow it. A 16-byte piece is the unit of everything here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from k3fuse.kernels.simulator.types import Array

PIECE = 16
_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}  # code of the swizzle in a matrix descriptor -> bytes
K_BYTES = 32  # one instruction multiplies 32 bytes of K


def swizzled(address: Array, span: int) -> Array:
    """Where the byte at a linear address lies when 16-byte pieces are permuted within `span` bytes.

    The number of the 128-byte row, modulo span / 16, is XORed into the number of the piece. Both
    are bits of the address in shared memory, so a pattern repeats every 8 rows of `span` bytes.
    """
    if not span:
        return address
    moved: Array = address ^ ((address >> 7 & span // PIECE - 1) << 4)
    return moved


@dataclass(frozen=True)
class Matrix:
    """One operand in shared memory: byte address, the two strides in bytes, span of the swizzle."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def decode(cls, word: int) -> Matrix:
        """Read a 64-bit matrix descriptor. Raises ValueError for a field that is not modelled."""
        if word >> 46 & 7 != 1:
            raise ValueError("bits 46 to 48 of the matrix descriptor are not 0b001")
        if word >> 49 & 7 or word >> 52 & 1:
            raise ValueError("a base offset or an absolute leading stride is not modelled")
        code = word >> 61
        if code not in _SPANS:
            raise ValueError(f"swizzle code {code} of the matrix descriptor is not modelled")
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, leading, stride, _SPANS[code])

    def places(self, rows: int, item: int, *, k_major: bool, columns: int = K_BYTES) -> Array:
        """Shared addresses [rows, columns / item] of the elements (first byte) of a tile.

        rows: M or N; item: bytes an element takes in shared memory; columns: bytes of K.
        """
        if k_major:
            return _k_major(self, rows, columns)[:, ::item]
        return _mn_major(self, rows, item, columns // item)


@lru_cache(maxsize=512)
def _k_major(matrix: Matrix, rows: int, columns: int) -> Array:
    """Rows of 8 take `span` bytes each (16 without a swizzle), groups of 8 rows lie a stride apart.

    Without a swizzle the 16-byte pieces of a row lie the leading stride apart.
    """
    row, byte = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if matrix.span:
        linear = row % 8 * matrix.span + byte
    else:
        linear = row % 8 * PIECE + byte // PIECE * matrix.leading + byte % PIECE
    result = swizzled(matrix.start + row // 8 * matrix.stride + linear, matrix.span)
    result.flags.writeable = False
    return result


@lru_cache(maxsize=512)
def _mn_major(matrix: Matrix, rows: int, item: int, depth: int) -> Array:
    """8 values of K, `span` bytes of M or N each, form an atom; atoms repeat along both."""
    byte, k = np.arange(rows)[:, None] * item, np.arange(depth)[None, :]
    if matrix.span:
        along = byte % matrix.span + byte // matrix.span * matrix.leading
        down = k % 8 * matrix.span + k // 8 * matrix.stride
    else:
        along = byte % PIECE + byte // PIECE * matrix.stride
        down = k % 8 * PIECE + k // 8 * matrix.leading
    result = swizzled(matrix.start + along + down, matrix.span)
    result.flags.writeable = False
    return result


_F16 = {0: "f16", 1: "bf16"}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 5: "e2m1"}


@dataclass(frozen=True)
class Instruction:
    """What a 32-bit instruction descriptor says: element types, signs, orientation, M and N.

    a_scale, b_scale: which byte of the scale words a block-scaled instruction uses.
    """

    a: str
    b: str
    m: int
    n: int
    a_sign: int
    b_sign: int
    a_k_major: bool
    b_k_major: bool
    a_scale: int = 0
    b_scale: int = 0

    @classmethod
    def decode(cls, word: int, kind: str) -> Instruction:
        """Read a descriptor for kind "f16" or "mxf8f6f4". Raises ValueError where not modelled."""
        scaled = kind == "mxf8f6f4"
        names = _F8F6F4 if scaled else _F16
        a, b = names.get(word >> 7 & 7), names.get(word >> 10 & 7)
        m, n = (word >> 24 & 31) * 16, (word >> 17 & 63) * 8
        if a is None or b is None:
            raise ValueError(f"element types {word >> 7 & 7} and {word >> 10 & 7} of .kind::{kind}")
        if word & 7 or (not scaled and (a != b or word >> 4 & 3 != 1 or word >> 30)):
            raise ValueError("sparsity, shifts, mixed types, or a result other than float32")
        if scaled and (word >> 3 & 1 or not word >> 23 & 1 or word >> 31):
            raise ValueError("scales other than ue8m0, or a K other than 32")
        if m not in ((128,) if scaled else (64, 128)) or not 8 <= n <= 256:
            raise ValueError(f"shape {m} x {n} of .kind::{kind}, cta_group::1")
        signs = [-1 if word >> bit & 1 else 1 for bit in (13, 14)]
        majors = [not word >> bit & 1 for bit in (15, 16)]
        if (a == "e2m1" and not majors[0]) or (b == "e2m1" and not majors[1]):
            raise ValueError("4-bit elements in other than K-major order")
        scales = [word >> 29 & 3, word >> 4 & 3] if scaled else [0, 0]
        return cls(
            a, b, m, n, signs[0], signs[1], majors[0], majors[1], scales[0], scales[1]
        )  # fmt: skip

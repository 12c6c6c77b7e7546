"""PTX primitives of selection: integer maxima, reductions of a warp, atomics, narrow formats.

As `ptx.py`: Int64 for global addresses, Int32 for shared ones; everything exists from sm_90a on.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device.ptx import asm


def most_of(a: Any, b: Any) -> Any:
    """max of two Int32."""
    return asm("max.s32 $0, $1, $2;", [Int32], a, b, pure=True)


def most_of_warp(value: Any) -> Any:
    """The greatest Int32 of the warp, in every lane."""
    return asm("redux.sync.max.s32 $0, $1, -1;", [Int32], value)


def least_of_warp(value: Any) -> Any:
    """The least Int32 of the warp, in every lane."""
    return asm("redux.sync.min.s32 $0, $1, -1;", [Int32], value)


def sync_warp() -> None:
    """Wait for all lanes of the warp; their earlier writes are visible."""
    asm("bar.warp.sync -1;", [])


def shuffle_word_up(value: Any, distance: int) -> Any:
    """The word of the lane `distance` below; 0 where there is none."""
    code = (
        f"{{ .reg .pred there; .reg .b32 got; shfl.sync.up.b32 got|there, $1, {distance}, 0, -1;"
        " selp.b32 $0, got, 0, there; }"
    )
    return asm(code, [Int32], value)


def shuffle_word_xor(value: Any, mask: int, lanes: Any) -> Any:
    """The word of lane (own xor mask). lanes: those that take part with this one, as bits."""
    return asm(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, $2;", [Int32], value, lanes)


def ones(word: Any) -> Any:
    """Number of bits set."""
    return asm("popc.b32 $0, $1;", [Int32], word, pure=True)


def join(low: Any, high: Any) -> Any:
    """Int64 of two words."""
    return asm("mov.b64 $0, {$1,$2};", [Int64], low, high, pure=True)


# Shared memory. -----------------------------------------------------------------------------------


def shared_store16(address: Any, words: Any, offset: int = 0) -> None:
    """Four words."""
    asm(f"st.shared.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};", [], address, *words)


def shared_load8(address: Any) -> Any:
    """Eight bytes as Int64."""
    return asm("ld.shared.b64 $0, [$1];", [Int64], address)


def shared_or4(address: Any, word: Any) -> None:
    """Set bits of a word, atomically."""
    asm("red.shared.or.b32 [$0], $1;", [], address, word)


# Global memory. -----------------------------------------------------------------------------------


def load4_constant(address: Any, offset: int = 0) -> Any:
    """One word that nobody writes while the grid runs."""
    return asm(f"ld.global.nc.b32 $0, [$1+{offset}];", [Int32], address)


def store1(address: Any, word: Any) -> None:
    """The lowest byte of a word."""
    code = "{ .reg .b16 half; cvt.u16.u32 half, $1; st.global.b8 [$0], half; }"
    asm(code, [], address, word)


def count_arrival(address: Any, last: Any) -> Any:
    """Arrivals before this one, 0 to `last`; the counter is 0 again behind the last.

    What this thread has written or seen is visible to whoever arrives later.
    """
    return asm("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", [Int32], address, last)


# Narrow formats. ----------------------------------------------------------------------------------


def pack_e4m3(values: Any, factor: Any) -> Any:
    """Four Float32 times a factor as E4M3 in a word, first in the lowest byte; all given as bits.

    Beyond 448 it is 448.
    """
    code = (
        "{ .reg .b16 low, high; .reg .b32 a, b; mul.rn.f32 a, $1, $5; mul.rn.f32 b, $2, $5;"
        " cvt.rn.satfinite.e4m3x2.f32 low, b, a; mul.rn.f32 a, $3, $5; mul.rn.f32 b, $4, $5;"
        " cvt.rn.satfinite.e4m3x2.f32 high, b, a; mov.b32 $0, {low, high}; }"
    )
    return asm(code, [Int32], *values, factor, pure=True)


def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded."""
    return asm("div.rn.f32 $0, $1, $2;", [Float32], a, b, pure=True)

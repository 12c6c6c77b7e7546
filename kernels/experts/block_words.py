"""Instructions of the block-scaled experts kernel: tiles, scales, products. Imports the DSL.

A tile of W has 128 values of E2M1 a row, 16 of them in the first 8 of 16 bytes; a tile of x has
E4M3; both are K-major in the 128-byte swizzle. Scales lie in shared memory in pieces of 32 lines of
16 bytes: line l has the scales of rows l, l + 32, l + 64 and l + 96, a word of four blocks each.
Sources: PTX ISA, tcgen05, "Instruction descriptor", "Scale factor layouts", "tcgen05.cp".
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts.block_config import MMA_ROWS, STEP

# Lines of 16 bytes without a swizzle, 128 bytes from 8 lines to the next, version 1.
_PIECE = 1 << 46 | 128 >> 4 << 32
# A is E2M1, B is E4M3, scales are UE8M0, 128 rows.
_KIND = 5 << 7 | 1 << 23 | MMA_ROWS >> 4 << 24
_PRODUCT = (
    "@p tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X"
    " [$0], a, b, k, [$3], [$4], {add};"
)
# By one lane of the warp, always the same one.
_ELECTED = "{{ .reg .pred p; elect.sync _|p, -1; {} }}"
_TILE = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes{hint}"
    " [$0], [$1, {{$2,$3}}], [$4]{policy};"
)


def load_tile(target: Any, at: Any, column: Any, row: Any, barrier: Any) -> None:
    """The tile at (column, row) of the map at `at`; its bytes are counted at `barrier`."""
    ptx.asm(_TILE.format(hint="", policy=""), [], target, at, column, row, barrier)


def load_tile_once(target: Any, at: Any, column: Any, row: Any, barrier: Any, policy: Any) -> None:
    """As `load_tile`, with an L2 policy."""
    code = _TILE.format(hint=".L2::cache_hint", policy=", $5")
    ptx.asm(code, [], target, at, column, row, barrier, policy)


def piece_descriptor(address: Any) -> Any:
    """What a copy is told about a piece of scales; the next piece is 32 more."""
    return (address >> Int32(4)).to(Int64) | Int64(_PIECE)


def copy_scales(target: Any, piece: Any) -> None:
    """A piece of scales to four columns of tensor memory, for all quarters of its lanes."""
    code = "@p tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;"
    ptx.asm(_ELECTED.format(code), [], target, piece)


def instruction(tokens: int, a_scale: int, b_scale: int) -> int:
    """The instruction descriptor; a_scale, b_scale: bytes of the scale words."""
    return _KIND | tokens >> 3 << 17 | a_scale << 29 | b_scale << 4


def multiply(
    sums: Any,
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    tokens: int,
    steps: list[tuple[int, int, int, int]],
    keep: Any,
) -> None:
    """Add products of 32 columns each to `sums`; by the whole warp.

    steps: of each product the number of 32 columns of a, of b, and the bytes of their scales. keep:
    an Int32, 0 where the first product starts the sums.
    """
    lines = [".reg .pred add, all; .reg .b64 a, b; .reg .b32 k; setp.ne.b32 all, 1, 0;"]
    lines.append("setp.ne.b32 add, $5, 0;")
    for i, (of_a, of_b, a_byte, b_byte) in enumerate(steps):
        kind = instruction(tokens, a_byte, b_byte)
        lines.append(f"add.s64 a, $1, {of_a * STEP >> 4}; add.s64 b, $2, {of_b * STEP >> 4};")
        lines.append(f"mov.b32 k, {kind};")
        lines.append(_PRODUCT.format(add="all" if i else "add"))
    ptx.asm(_ELECTED.format(" ".join(lines)), [], sums, a, b, a_scales, b_scales, keep)


def commit(barrier: Any) -> None:
    """Arrive at an mbarrier when all that this thread has issued of tcgen05 is done."""
    code = "@p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    ptx.asm(_ELECTED.format(code), [], barrier)


def fence_async_global() -> None:
    """Writes to global memory before come before what asynchronous copies do after."""
    ptx.asm("fence.proxy.async.global;", [])


def pack_fp8(values: list[Any], down: Any) -> Any:
    """Four Float32 times `down` as E4M3, saturating, in a word."""
    code = (
        "{ .reg .b16 l, h; .reg .f32 a, b, c, d; mul.rn.f32 a, $1, $5; mul.rn.f32 b, $2, $5;"
        " mul.rn.f32 c, $3, $5; mul.rn.f32 d, $4, $5; cvt.rn.satfinite.e4m3x2.f32 l, b, a;"
        " cvt.rn.satfinite.e4m3x2.f32 h, d, c; mov.b32 $0, {l, h}; }"
    )
    return ptx.asm(code, [Int32], *values, down, pure=True)


def scale_byte(magnitude: Any, floor: bool) -> Any:
    """The E8M0 byte of a block with this greatest magnitude (bits of FP32); 255 for no number."""
    up = "" if floor else "add.u32 a, a, 0x1FFFFF;"
    code = (
        f"{{ .reg .b32 a; .reg .pred p; mov.b32 a, $1; {up} shr.u32 a, a, 23; sub.s32 a, a, 8;"
        " max.s32 a, a, 0; setp.ge.u32 p, $1, 0x7F800000; selp.b32 $0, 255, a, p; }"
    )
    return ptx.asm(code, [Int32], magnitude, pure=True)


def down_of(byte: Any) -> Any:
    """2**(127 - s) as the bits of FP32 for the E8M0 byte s, NaN for 255."""
    code = (
        "{ .reg .b32 a; .reg .pred p; sub.s32 a, 254, $1; shl.b32 a, a, 23;"
        " setp.eq.s32 p, $1, 255; selp.b32 $0, 0x7FC00000, a, p; }"
    )
    return ptx.as_f32(ptx.asm(code, [Int32], byte, pure=True))


def store1(address: Any, word: Any) -> None:
    """The lowest byte of a word."""
    ptx.asm("st.global.b8 [$0], $1;", [], address, word)


def shared_store1(address: Any, word: Any) -> None:
    """The lowest byte of a word."""
    ptx.asm("st.shared.b8 [$0], $1;", [], address, word)


def load16_once_if(address: Any, policy: Any, valid: Any) -> Any:
    """16 bytes that are read once as four words where `valid` is not 0, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $6, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
        " mov.b32 $3, 0; @p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32"
        " {$0,$1,$2,$3}, [$4], $5; }"
    )
    return ptx.asm(code, [Int32] * 4, address, policy, valid)


def load4_once_if(address: Any, offset: int, policy: Any, valid: Any) -> Any:
    """A word whose neighbours are read as well where `valid` is not 0, else 0."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0;"
        f" @p ld.global.nc.L2::cache_hint.b32 $0, [$1+{offset}], $2; }}"
    )
    return ptx.asm(code, [Int32], address, policy, valid)


def copy8_once(
    target: Any, target_offset: int, source: Any, source_offset: int, policy: Any
) -> None:
    """8 bytes of global memory to shared memory; who waits for `arrive_after_copies` has them."""
    code = (
        "cp.async.ca.shared.global.L2::cache_hint"
        f" [$0+{target_offset}], [$1+{source_offset}], 8, $2;"
    )
    ptx.asm(code, [], target, source, policy)


def arrive_after_copies(barrier: Any) -> None:
    """Arrive at an mbarrier when all that this lane has copied by `copy8_once` is there."""
    ptx.asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], barrier)


def count_bits(word: Any) -> Any:
    """Bits of a word that are set."""
    return ptx.asm("popc.b32 $0, $1;", [Int32], word, pure=True)


def shared_store_words(address: Any, words: list[Any], offset: int = 0) -> None:
    """Four words."""
    code = f"st.shared.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};"
    ptx.asm(code, [], address, *words)

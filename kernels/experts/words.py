"""Instructions of the experts kernel: FP4 and FP8 in BF16, scales, ids, arrivals. Imports the DSL.

All of it exists from sm_90a on.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts.config import NONE

NAN = 0x7FC00000

# E2M1 is sign, two bits of exponent, one of mantissa. Put at bits 15 and 8..6 of a BF16, the last
# three are 2**-126 times the value, 0.5 included, which is subnormal in both formats.
_MAGNITUDE, _SIGN, _POWER = "0x01C001C0", "0x80008000", "0x7E807E80"


def _pair(place: int) -> str:
    """Code of values `place` and `place + 4` of eight as a pair of BF16."""
    shift, to_sign = 6 - 4 * place, 12 - 4 * place
    move = f"shl.b32 a, $4, {shift};" if shift > 0 else f"shr.u32 a, $4, {-shift};"
    sign = f"shl.b32 b, $4, {to_sign};" if to_sign else "mov.b32 b, $4;"
    return (
        f" {move} and.b32 a, a, {_MAGNITUDE}; {sign} lop3.b32 a, b, {_SIGN}, a, 0xEA;"
        f" mul.rn.bf16x2 ${place}, a, p;"
    )


_DECODE = "{ .reg .b32 a, b, p; mov.b32 p, " + _POWER + ";" + "".join(map(_pair, range(4))) + " }"


def decode_fp4(word: Any) -> Any:
    """Eight E2M1 values, low nibble first, as four pairs of BF16: 0 and 4, 1 and 5, 2 and 6, ..."""
    return ptx.asm(_DECODE, [Int32] * 4, word, pure=True)


def scale(word: Any, place: int) -> Any:
    """FP32 of the E8M0 byte `place` of a word. 255 gives infinity: see `has_nan`."""
    code = (
        f"{{ .reg .b32 a; prmt.b32 a, $1, 0, {(place << 12) | 0x444}; shr.u32 a, a, 1;"
        " mov.b32 $0, a; max.f32 $0, $0, 0f00400000; }"
    )
    return ptx.asm(code, [Float32], word, pure=True)


def has_nan(words: Any) -> Any:
    """Not 0 where one of the bytes is 255, the E8M0 code of NaN."""
    lines = []
    for i in range(len(words)):
        # (v - 1 in each byte) and not v, at the bytes' top bits, for v = not the word.
        lines.append(
            f"not.b32 a, ${i + 1}; sub.u32 a, a, 0x01010101;"
            f" lop3.b32 {'b' if i else '$0'}, a, ${i + 1}, 0x80808080, 0x80;"
        )
        if i:
            lines.append("or.b32 $0, $0, b;")
    return ptx.asm("{ .reg .b32 a, b; " + " ".join(lines) + " }", [Int32], *words, pure=True)


def magnitude_of(words: Any) -> Any:
    """The greatest magnitude of pairs of BF16, as the bits of FP32; NaN is above everything."""
    code = ["{ .reg .b32 a, b, h, l; mov.b32 h, 0; mov.b32 l, 0;"]
    for i in range(len(words)):
        code.append(
            f"and.b32 a, ${i + 1}, 0x7FFF7FFF; max.u32 h, h, a; shl.b32 b, a, 16; max.u32 l, l, b;"
        )
    code.append("and.b32 h, h, 0xFFFF0000; max.u32 $0, h, l; }")
    return ptx.asm(" ".join(code), [Int32], *words, pure=True)


def most(a: Any, b: Any) -> Any:
    """The greater of two unsigned words."""
    return ptx.asm("max.u32 $0, $1, $2;", [Int32], a, b, pure=True)


def shuffle_word_xor(value: Any, mask: int) -> Any:
    """The word of lane (own xor mask)."""
    return ptx.asm(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", [Int32], value)


def warp_most(value: Any) -> Any:
    """The greatest unsigned word of the warp."""
    return ptx.asm("redux.sync.max.u32 $0, $1, -1;", [Int32], value)


def power_of(magnitude: Any, floor: bool) -> Any:
    """(2**(127-s), 2**(s-127)) for the E8M0 byte s of a block with this greatest magnitude.

    s is the exponent less 8, one more where the mantissa exceeds 1.75 (`floor`: never); at least 0.
    The first is NaN where the magnitude is no number.
    """
    up = "" if floor else " add.u32 a, $2, 0x1FFFFF;"
    first = "$2" if floor else "a"
    code = (
        "{ .reg .b32 a, b; .reg .pred p, q;" + up + f" shr.u32 a, {first}, 23;"
        " sub.s32 a, a, 8; max.s32 a, a, 0; sub.s32 b, 254, a; shl.b32 b, b, 23;"
        f" setp.ge.u32 p, $2, 0x7F800000; selp.b32 b, {NAN}, b, p; mov.b32 $0, b;"
        " setp.eq.s32 q, a, 0; shl.b32 a, a, 23; selp.b32 a, 0x00400000, a, q; mov.b32 $1, a; }"
    )
    return ptx.asm(code, [Float32, Float32], magnitude, pure=True)


def through_fp8(low: Any, high: Any, down: Any, up_low: Any, down_high: Any, up_high: Any) -> Any:
    """Two FP32 through E4M3 as a pair of BF16: times down, rounded (saturating), times up."""
    code = (
        "{ .reg .b16 e, l, h; .reg .b32 p; .reg .f32 x, y; mul.rn.f32 x, $1, $3;"
        " mul.rn.f32 y, $2, $5; cvt.rn.satfinite.e4m3x2.f32 e, y, x; cvt.rn.f16x2.e4m3x2 p, e;"
        " mov.b32 {l, h}, p; cvt.f32.f16 x, l; cvt.f32.f16 y, h;"
        " mul.rn.f32 x, x, $4; mul.rn.f32 y, y, $6; cvt.rn.bf16x2.f32 $0, y, x; }"
    )
    return ptx.asm(code, [Int32], low, high, down, up_low, down_high, up_high, pure=True)


# A byte of E4M3 at the top of half a word: its sign is BF16's, its other seven bits go to 10..4,
# where they are 2**-120 times the value, subnormal where it is.
_E4M3_BITS, _E4M3_POWER = "0x07F007F0", "0x7B807B80"


def decode_fp8(low: Any, high: Any, up: Any) -> Any:
    """Eight E4M3 values as four pairs of BF16, 0 and 4, 1 and 5, ...: times `up`, a pair of BF16.

    low, high: words of values 0..3 and 4..7. Exact; NaN where `up` is.
    """
    lines = []
    for place in range(4):
        # Bytes 1 and 3 are what is wanted; the others are masked.
        choice = (4 + place) << 12 | place << 4
        lines.append(
            f"prmt.b32 a, $4, $5, {choice}; shr.u32 b, a, 4; and.b32 b, b, {_E4M3_BITS};"
            f" lop3.b32 a, a, {_SIGN}, b, 0xEA; mul.rn.bf16x2 a, a, p;"
            f" mul.rn.bf16x2 ${place}, a, $6;"
        )
    code = f"{{ .reg .b32 a, b, p; mov.b32 p, {_E4M3_POWER}; " + " ".join(lines) + " }"
    return ptx.asm(code, [Int32] * 4, low, high, up, pure=True)


def scale_pair(word: Any, place: int) -> Any:
    """2**(s-127) twice, as a pair of BF16, for the E8M0 byte `place` of a word; NaN for 255."""
    code = (
        f"{{ .reg .b32 a, b; .reg .pred p, q; bfe.u32 a, $1, {8 * place}, 8; shl.b32 b, a, 7;"
        " setp.eq.u32 p, a, 0; selp.b32 b, 0x40, b, p;"
        " setp.eq.u32 q, a, 255; selp.b32 b, 0x7FFF, b, q; prmt.b32 $0, b, 0, 0x1010; }"
    )
    return ptx.asm(code, [Int32], word, pure=True)


def load8_if(address: Any, offset: int, valid: Any) -> Any:
    """8 bytes as two words where `valid` is not 0, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
        f" @p ld.global.v2.b32 {{$0,$1}}, [$2+{offset}]; }}"
    )
    return ptx.asm(code, [Int32] * 2, address, valid)


def load16_if(address: Any, offset: int, valid: Any) -> Any:
    """16 bytes as four words where `valid` is not 0, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
        f" mov.b32 $3, 0; @p ld.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}]; }}"
    )
    return ptx.asm(code, [Int32] * 4, address, valid)


def load_id(address: Any, wide: bool, index: Any, pairs: Any, experts: Any) -> Any:
    """The expert at `address`; NONE where it is none of the experts, -1 from pair `pairs` on."""
    load = "ld.global.v2.b32 {l, h}, [$1];" if wide else "ld.global.b32 l, [$1];"
    code = (
        "{ .reg .pred p, q, r; .reg .b32 l, h; setp.lt.s32 p, $2, $3; mov.b32 l, 0; mov.b32 h, 0;"
        f" @p {load} setp.eq.s32 q, h, 0; selp.b32 l, l, -1, q; setp.lt.u32 r, l, $4;"
        f" selp.b32 l, l, {NONE}, r; selp.b32 $0, l, -1, p; }}"
    )
    return ptx.asm(code, [Int32], address, index, pairs, experts)


def shared_count(address: Any, valid: Any) -> Any:
    """Add 1 to a word of shared memory where `valid` is not negative; its value before."""
    code = (
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; mov.b32 $0, 0; @p atom.shared.add.u32 $0, [$1], 1; }"
    )
    return ptx.asm(code, [Int32], address, valid)


def shared_store4_if(address: Any, word: Any, valid: Any) -> None:
    """One word where `valid` is not negative."""
    code = "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
    ptx.asm(code, [], address, word, valid)


def scan(value: Any, lane: Any) -> Any:
    """The sum of the words of the lanes up to this one."""
    for step in (1, 2, 4, 8, 16):
        below = ptx.asm(f"shfl.sync.up.b32 $0, $1, {step}, 0, -1;", [Int32], value)
        value = value + ptx.select(lane >= Int32(step), below, Int32(0))
    return value


def arrive(address: Any, valid: Any) -> Any:
    """Add 1 to a word where `valid` is not 0, ordered both ways at the GPU; its value before.

    -1 where nothing is added.
    """
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, -1;"
        " @p atom.acq_rel.gpu.global.add.u32 $0, [$1], 1; }"
    )
    return ptx.asm(code, [Int32], address, valid)


def sync_warp() -> None:
    """Wait for the warp; what its lanes have written is visible to it."""
    ptx.asm("bar.warp.sync -1;", [])


def votes(flag: Any) -> Any:
    """The lanes where `flag` is not 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return ptx.asm(code, [Int32], flag)


def store2_if(address: Any, word: Any, upper: bool, valid: Any) -> None:
    """The lower or upper half of a word where `valid` is not 0."""
    take = "{h, l}" if upper else "{l, h}"
    code = (
        f"{{ .reg .pred p; .reg .b16 l, h; setp.ne.s32 p, $2, 0; mov.b32 {take}, $1;"
        " @p st.global.b16 [$0], l; }"
    )
    ptx.asm(code, [], address, word, valid)


def store4_if(address: Any, word: Any, valid: Any) -> None:
    """One word where `valid` is not 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }"
    ptx.asm(code, [], address, word, valid)


def load4_if(address: Any, offset: int, valid: Any) -> Any:
    """One word where `valid` is not 0, else 0."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0;"
        f" @p ld.global.b32 $0, [$1+{offset}]; }}"
    )
    return ptx.asm(code, [Int32], address, valid)


def load2_if(address: Any, valid: Any) -> Any:
    """Two bytes, zero-extended, where `valid` is not 0, else 0."""
    code = (
        "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0;"
        " @p ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    )
    return ptx.asm(code, [Int32], address, valid)


def shared_load2(address: Any, offset: int = 0) -> Any:
    """Two bytes of shared memory, zero-extended."""
    code = f"{{ .reg .b16 h; ld.shared.b16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return ptx.asm(code, [Int32], address)


def shared_store2(address: Any, word: Any, upper: bool, offset: int = 0) -> None:
    """The lower or upper half of a word."""
    take = "{h, l}" if upper else "{l, h}"
    code = f"{{ .reg .b16 l, h; mov.b32 {take}, $1; st.shared.b16 [$0+{offset}], l; }}"
    ptx.asm(code, [], address, word)


def shared_load16_f32_if(address: Any, offset: int, valid: Any) -> Any:
    """Four Float32 of shared memory where `valid` is not 0, else zeros."""
    zeros = " ".join(f"mov.f32 ${i}, 0f00000000;" for i in range(4))
    code = (
        f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {zeros}"
        f" @p ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}]; }}"
    )
    return ptx.asm(code, [Float32] * 4, address, valid)


def send16(address: Any, values: Any, barrier: Any, cta: int) -> None:
    """Four Float32 to the same place in CTA `cta` of the cluster, counted at its `barrier`."""
    code = (
        f"{{ .reg .b32 place, there; mapa.shared::cluster.u32 place, $0, {cta};"
        f" mapa.shared::cluster.u32 there, $1, {cta};"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [place], {$2,$3,$4,$5}, [there]; }"
    )
    ptx.asm(code, [], address, barrier, *values)


def arrive_at(barrier: Any, cta: Any) -> None:
    """Arrive at the mbarrier in CTA `cta` of the cluster: what came before is done."""
    code = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
    )
    ptx.asm(code, [], barrier, cta)


def store4_at(address: Any, offset: int, word: Any) -> None:
    """One word."""
    ptx.asm(f"st.global.b32 [$0+{offset}], $1;", [], address, word)


def store2_at(address: Any, offset: int, word: Any) -> None:
    """The lower half of a word."""
    code = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; st.global.b16 [$0+{offset}], l; }}"
    ptx.asm(code, [], address, word)


def store2_at_if(address: Any, offset: int, word: Any, valid: Any) -> None:
    """The lower half of a word where `valid` is not 0."""
    code = (
        "{ .reg .pred p; .reg .b16 l, h; setp.ne.s32 p, $2, 0; mov.b32 {l, h}, $1;"
        f" @p st.global.b16 [$0+{offset}], l; }}"
    )
    ptx.asm(code, [], address, word, valid)

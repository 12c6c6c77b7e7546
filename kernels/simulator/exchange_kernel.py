"""PTX of a projection with an all-reduce across ranks: the simulator's own many-rank case.

y[8, n] = sum over ranks of x[8, k] w[n, k]^T, BF16 in and out. A CTA of 256 threads owns 64 rows of
w; its 8 warps split k and use mma.sync. The partial sums go to all ranks as FP32 fragments of 16
bytes (`multimem.st`) that are their own flags: a word is there when it is not EMPTY. Nothing
dispatches to it; it needs no compiler, so that the benchmark runs wherever the simulator does.
"""

from __future__ import annotations

TOKENS = 8
ROWS = 64
THREADS = 256
WARPS = THREADS // 32
EMPTY = -1  # as int32; a NaN as float32
PARAMETERS = ("x", "w", "every", "own", "y", "rank")


def exchange_grid(n: int) -> tuple[int, int, int]:
    """CTAs for n rows of w."""
    return n // ROWS, 1, 1


def exchange_ptx(n: int, k: int, ranks: int) -> str:
    """The kernel; parameters x, w, the mailbox of all ranks (multicast) and the own one, [ranks, 8,
    n] FP32, y, and the rank. Raises ValueError for sizes it does not cover."""
    for name, value, unit in (("n", n, ROWS), ("k", k, 16 * WARPS), ("ranks", ranks, 2)):
        if value < unit or value % unit:
            raise ValueError(f"{name} is {value}; use a positive multiple of {unit}")
    return f""".version 8.8
.target sm_103a
.address_size 64
.visible .entry exchange(.param .u64 x, .param .u64 w, .param .u64 every, .param .u64 own,
  .param .u64 y, .param .u32 rank) .reqntid {THREADS}, 1, 1
{{
  .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b32 %a<4>; .reg .b32 %b<2>;
  .reg .b32 %c<16>; .reg .b32 %f<4>; .reg .b32 %s<4>; .reg .b64 %d<20>;
  .shared .align 16 .b8 part[{WARPS * TOKENS * ROWS * 4}];
  ld.param.u64 %d0, [x]; ld.param.u64 %d1, [w]; ld.param.u64 %d2, [every];
  ld.param.u64 %d3, [own]; ld.param.u64 %d4, [y]; ld.param.u32 %r0, [rank];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  and.b32 %r3, %r1, 31; shr.u32 %r4, %r1, 5;
  shr.u32 %r5, %r3, 2; and.b32 %r6, %r3, 3;
  shl.b32 %r7, %r2, 6;
{_products(k)}
{_partial_sums()}
  bar.sync 0;
{_publish(n)}
{_collect(n, ranks)}
  ret;
}}
"""


def _products(k: int) -> str:
    """%c: products of the warp's part of k, 4 tiles of 16 rows; %r5 is lane / 4, %r6 the rest."""
    lines = [
        f"mul.lo.u32 %r8, %r4, {k // WARPS}; mad.lo.u32 %r8, %r6, 2, %r8;",
        f"mad.lo.u32 %r9, %r5, {k}, %r8; mad.wide.u32 %d5, %r9, 2, %d0;",
        f"add.u32 %r10, %r7, %r5; mad.lo.u32 %r10, %r10, {k}, %r8; mad.wide.u32 %d6, %r10, 2, %d1;",
        *(f"mov.b32 %c{i}, 0;" for i in range(16)),
    ]
    for step in range(k // WARPS // 16):
        at = 32 * step
        lines.append(f"ld.global.nc.b32 %b0, [%d5+{at}]; ld.global.nc.b32 %b1, [%d5+{at + 16}];")
        for tile in range(4):
            first = at + 32 * k * tile
            places = (first, first + 16 * k, first + 16, first + 16 * k + 16)
            lines += [f"ld.global.nc.b32 %a{i}, [%d6+{place}];" for i, place in enumerate(places)]
            sums = ", ".join(f"%c{4 * tile + i}" for i in range(4))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, "
                f"{{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{sums}}};"
            )
    return "\n".join("  " + line for line in lines)


def _partial_sums() -> str:
    """part[warp][token][row] = %c."""
    lines = [
        f"mov.u32 %r11, part; mad.lo.u32 %r12, %r4, {TOKENS * ROWS * 4}, %r11;",
        f"mad.lo.u32 %r12, %r6, {2 * ROWS * 4}, %r12; mad.lo.u32 %r12, %r5, 4, %r12;",
    ]
    for tile in range(4):
        for i, place in enumerate((0, ROWS * 4, 32, ROWS * 4 + 32)):
            lines.append(f"st.shared.b32 [%r12+{64 * tile + place}], %c{4 * tile + i};")
    return "\n".join("  " + line for line in lines)


def _publish(n: int) -> str:
    """Threads 0 to 127 add up the warps' parts of one fragment each and send it to all ranks."""
    lines = [
        "and.b32 %r13, %r1, 127; shr.u32 %r14, %r13, 4; and.b32 %r15, %r13, 15;",
        f"mad.lo.u32 %r16, %r14, {ROWS * 4}, %r11; mad.lo.u32 %r16, %r15, 16, %r16;",
        f"mul.lo.u32 %r17, %r14, {n}; add.u32 %r17, %r17, %r7; mad.lo.u32 %r17, %r15, 4, %r17;",
        "setp.ge.u32 %p0, %r1, 128;",
        "@%p0 bra COLLECT;",
        "ld.shared.v4.b32 {%f0, %f1, %f2, %f3}, [%r16];",
    ]
    for warp in range(1, WARPS):
        at = warp * TOKENS * ROWS * 4
        lines.append(f"ld.shared.v4.b32 {{%s0, %s1, %s2, %s3}}, [%r16+{at}];")
        lines += [f"add.f32 %f{i}, %f{i}, %s{i};" for i in range(4)]
    lines += [
        f"mad.lo.u32 %r18, %r0, {TOKENS * n}, %r17; mad.wide.u32 %d7, %r18, 4, %d2;",
        "multimem.st.relaxed.sys.global.v4.f32 [%d7], {%f0, %f1, %f2, %f3};",
        "COLLECT:",
    ]
    return "\n".join("  " + line for line in lines)


def _collect(n: int, ranks: int) -> str:
    """Both halves of the CTA add up half of the ranks' fragments; the first stores the total."""
    size = TOKENS * n
    lines = [
        f"shr.u32 %r19, %r1, 7; mad.lo.u32 %r20, %r19, {ranks // 2 * size}, %r17;",
        "mad.wide.u32 %d8, %r20, 4, %d3;",
        *(f"mov.b32 %f{i}, 0;" for i in range(4)),
    ]
    for rank in range(ranks // 2):
        lines += [
            f"POLL{rank}:",
            f"ld.relaxed.sys.global.v4.b32 {{%s0, %s1, %s2, %s3}}, [%d8+{4 * size * rank}];",
            f"setp.eq.s32 %p1, %s0, {EMPTY};",
            *(f"setp.eq.or.s32 %p1, %s{i}, {EMPTY}, %p1;" for i in (1, 2, 3)),
            f"@%p1 bra POLL{rank};",
            *(f"add.f32 %f{i}, %f{i}, %s{i};" for i in range(4)),
        ]
    lines += [
        "bar.sync 0;",
        "setp.eq.u32 %p2, %r19, 0;",
        "@!%p2 st.shared.v4.b32 [%r16], {%f0, %f1, %f2, %f3};",
        "bar.sync 0;",
        "@!%p2 bra DONE;",
        "ld.shared.v4.b32 {%s0, %s1, %s2, %s3}, [%r16];",
        *(f"add.f32 %f{i}, %f{i}, %s{i};" for i in range(4)),
        *(f"cvt.rn.bf16.f32 %h{i}, %f{i};" for i in range(4)),
        "mad.wide.u32 %d9, %r17, 2, %d4;",
        "st.global.v4.b16 [%d9], {%h0, %h1, %h2, %h3};",
        "DONE:",
    ]
    return "\n".join("  " + line for line in lines)

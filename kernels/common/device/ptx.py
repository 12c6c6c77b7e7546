"""PTX primitives: loads, stores, barriers and conversions that the DSL spells differently or not.

Addresses are plain integers: Int64 for global memory, Int32 for shared memory. Everything is
traced, so a Python loop around these is unrolled. All of it exists from sm_90a on.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_CONSTRAINTS: dict[Any, str] = {Int32: "r", Int64: "l", Float32: "f"}


@dsl_user_op
def asm(
    code: str,
    results: Any,
    *operands: Any,
    pure: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """One inline PTX text. `results` lists Int32, Int64, Float32; operands are values of those.

    $0, $1, ... are the results, then the operands. `pure` lets the compiler move or drop it;
    otherwise it stays in order with all other impure texts. Returns None, a value, or a tuple.
    """
    kinds = [_CONSTRAINTS[kind] for kind in results]
    values = []
    inputs = []
    for operand in operands:
        kind = type(operand)
        if kind not in _CONSTRAINTS:
            raise TypeError(f"asm operand {operand!r} is {kind}; use Int32, Int64 or Float32")
        inputs.append(_CONSTRAINTS[kind])
        values.append(operand.ir_value(loc=loc, ip=ip))
    constraints = ",".join([f"={kind}" for kind in kinds] + inputs)
    types = [kind.mlir_type for kind in results]
    if not types:
        whole = None
    elif len(types) == 1:
        whole = types[0]
    else:
        whole = llvm.StructType.get_literal(types)
    if not pure:
        constraints += ("," if constraints else "") + "~{memory}"
    made = llvm.inline_asm(
        whole, values, code, constraints, has_side_effects=not pure, loc=loc, ip=ip
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](made)
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, made, [place], loc=loc, ip=ip))
        for place, kind in enumerate(results)
    )


@dsl_user_op
def as_f32(word: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The same 32 bits as Float32."""
    return Float32(llvm.bitcast(T.f32(), Int32(word).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def as_i32(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The same 32 bits as Int32."""
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


# Global memory. -----------------------------------------------------------------------------------


def evict_first() -> Any:
    """An L2 policy for bytes that are read once: they leave first."""
    return asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", [Int64])


def load16(address: Any, offset: int = 0) -> Any:
    """16 bytes as four words."""
    return asm(f"ld.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];", [Int32] * 4, address)


def load16_constant(address: Any, offset: int = 0) -> Any:
    """16 bytes that nobody writes while the grid runs."""
    return asm(f"ld.global.nc.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];", [Int32] * 4, address)


def load16_once(address: Any, offset: int, policy: Any) -> Any:
    """16 bytes that nobody writes while the grid runs and that are read once."""
    code = f"ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}], $5;"
    return asm(code, [Int32] * 4, address, policy)


def load4(address: Any) -> Any:
    """One word."""
    return asm("ld.global.b32 $0, [$1];", [Int32], address)


def load16_relaxed_sys(address: Any, offset: int = 0) -> Any:
    """16 bytes that another GPU may be writing: four words, each new or old by itself."""
    code = f"ld.relaxed.sys.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return asm(code, [Int32] * 4, address)


def store16(address: Any, words: Any) -> None:
    """Four words."""
    asm("st.global.v4.b32 [$0], {$1,$2,$3,$4};", [], address, *words)


def store8(address: Any, words: Any) -> None:
    """Two words."""
    asm("st.global.v2.b32 [$0], {$1,$2};", [], address, *words)


def store2(address: Any, word: Any) -> None:
    """The lower half of a word."""
    code = "{ .reg .b16 half; cvt.u16.u32 half, $1; st.global.b16 [$0], half; }"
    asm(code, [], address, word)


def store4(address: Any, word: Any) -> None:
    """One word."""
    asm("st.global.b32 [$0], $1;", [], address, word)


def store16_relaxed_sys(address: Any, words: Any, offset: int = 0) -> None:
    """Four words to memory that another GPU reads or writes."""
    code = f"st.relaxed.sys.global.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};"
    asm(code, [], address, *words)


def store8_relaxed_sys(address: Any, words: Any) -> None:
    """Two words to memory that another GPU reads or writes."""
    asm("st.relaxed.sys.global.v2.b32 [$0], {$1,$2};", [], address, *words)


def store4_relaxed_sys(address: Any, word: Any) -> None:
    """One word to memory that the host or another GPU reads."""
    asm("st.relaxed.sys.global.b32 [$0], $1;", [], address, word)


def multicast16(address: Any, words: Any) -> None:
    """Four words to every GPU of a multicast address.

    PTX types the vector form by its elements: v4.f32 moves any 16 bytes.
    """
    values = [as_f32(word) for word in words]
    asm("multimem.st.relaxed.sys.global.v4.f32 [$0], {$1,$2,$3,$4};", [], address, *values)


def multicast8(address: Any, words: Any) -> None:
    """Two words to every GPU of a multicast address."""
    values = [as_f32(word) for word in words]
    asm("multimem.st.relaxed.sys.global.v2.f32 [$0], {$1,$2};", [], address, *values)


def multicast4(address: Any, word: Any) -> None:
    """One word to every GPU of a multicast address."""
    asm("multimem.st.relaxed.sys.global.f32 [$0], $1;", [], address, as_f32(word))


# Shared memory. -----------------------------------------------------------------------------------


def shared_load16(address: Any, offset: int = 0) -> Any:
    """16 bytes as four words."""
    return asm(f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];", [Int32] * 4, address)


def shared_load16_f32(address: Any, offset: int = 0) -> Any:
    """Four Float32."""
    return asm(f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}];", [Float32] * 4, address)


def shared_store4(address: Any, word: Any, offset: int = 0) -> None:
    """One word."""
    asm(f"st.shared.b32 [$0+{offset}], $1;", [], address, word)


def shared_load_f32(address: Any, offset: int = 0) -> Any:
    """One Float32."""
    return asm(f"ld.shared.f32 $0, [$1+{offset}];", [Float32], address)


def shared_store_f32(address: Any, value: Any) -> None:
    """One Float32."""
    asm("st.shared.f32 [$0], $1;", [], address, value)


def shared_load4(address: Any, offset: int = 0) -> Any:
    """One word."""
    return asm(f"ld.shared.b32 $0, [$1+{offset}];", [Int32], address)


def store_async(address: Any, values: Any, barrier: Any, cta: Any, lane: Any, limit: int) -> None:
    """One or four Float32 to the same place in CTA `cta` of the cluster, by lanes below `limit`.

    Their bytes are counted at the mbarrier that is at `barrier` there.
    """
    kind, content = ("v4.f32", "{$4,$5,$6,$7}") if len(values) == 4 else ("f32", "$4")
    last = 4 + len(values)
    code = (
        f"{{ .reg .pred p; .reg .b32 place, there; setp.lt.s32 p, $3, ${last};"
        " @p mapa.shared::cluster.u32 place, $0, $2; @p mapa.shared::cluster.u32 there, $1, $2;"
        f" @p st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        f" [place], {content}, [there]; }}"
    )
    asm(code, [], address, barrier, cta, lane, *values, Int32(limit))


def map_shared(address: Any, cta: Any) -> Any:
    """The same place in the shared memory of CTA `cta` of the cluster."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], address, cta, pure=True)


def store_async_mapped(
    place: Any, offset: int, values: Any, barrier: Any, lane: Any, limit: int
) -> None:
    """Four Float32 to `place` + offset, by lanes below `limit`; both addresses are mapped ones."""
    code = (
        f"{{ .reg .pred p; setp.lt.s32 p, $2, {limit};"
        " @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        f" [$0+{offset}], {{$3,$4,$5,$6}}, [$1]; }}"
    )
    asm(code, [], place, barrier, lane, *values)


def bulk_load(target: Any, source: Any, size: Any, barrier: Any) -> None:
    """`size` bytes (a multiple of 16) from global memory; they are counted at `barrier`."""
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(code, [], target, source, Int32(size), barrier)


def bulk_load_once(target: Any, source: Any, size: Any, barrier: Any, policy: Any) -> None:
    """As `bulk_load`, with an L2 policy."""
    code = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $4;"
    )
    asm(code, [], target, source, Int32(size), barrier, policy)


def bulk_multicast(target: Any, source: Any, size: Any, barrier: Any, mask: Any) -> None:
    """As `bulk_load`, to the same place in every CTA of `mask`; each counts at its own barrier."""
    code = (
        "{ .reg .b16 ctas; cvt.u16.u32 ctas, $4;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [$0], [$1], $2, [$3], ctas; }"
    )
    asm(code, [], target, source, Int32(size), barrier, Int32(mask))


def prefetch(address: Any, size: Any) -> None:
    """Ask for `size` bytes (a multiple of 16) of global memory to come to L2."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], address, Int32(size))


# Barriers. ----------------------------------------------------------------------------------------


def barrier_init(address: Any, count: int) -> None:
    """An mbarrier for `count` arrivals a phase."""
    asm("mbarrier.init.shared.b64 [$0], $1;", [], address, Int32(count))


def barrier_init_fence() -> None:
    """Make initialised mbarriers visible to the cluster and to asynchronous copies."""
    asm("fence.mbarrier_init.release.cluster;", [])


def barrier_expect(address: Any, size: Any) -> None:
    """Arrive, and expect `size` more bytes in this phase."""
    asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", [], address, Int32(size))


def barrier_arrive(address: Any) -> None:
    """Arrive; earlier writes of this thread are visible to whoever waits."""
    asm("mbarrier.arrive.shared.b64 _, [$0];", [], address)


def barrier_wait(address: Any, parity: Any, scope: str = "cta") -> None:
    """Wait for the end of the phase of `parity`; `scope` is where the awaited writes come from."""
    code = (
        "{ .reg .pred done; WAIT_${:uid}: mbarrier.try_wait.parity.acquire."
        + scope
        + ".shared::cta.b64 done, [$0], $1; @done bra DONE_${:uid}; bra WAIT_${:uid};"
        " DONE_${:uid}: }"
    )
    asm(code, [], address, Int32(parity))


def named_barrier(number: int, threads: int) -> None:
    """Wait for `threads` threads of the CTA."""
    asm(f"bar.sync {number}, {threads};", [])


def named_barrier_arrive(number: int, threads: int) -> None:
    """Count as one of `threads` threads of the CTA without waiting."""
    asm(f"bar.arrive {number}, {threads};", [])


def cluster_arrive() -> None:
    """Arrive at the cluster's barrier: earlier writes are visible after the wait."""
    asm("barrier.cluster.arrive.release.aligned;", [])


def cluster_wait() -> None:
    """Wait for all threads of the cluster."""
    asm("barrier.cluster.wait.acquire.aligned;", [])


def wait_for_predecessor() -> None:
    """Wait until the grid before this one has ended and its writes are visible."""
    asm("griddepcontrol.wait;", [])


def allow_successor() -> None:
    """Let the grid after this one start its prologue."""
    asm("griddepcontrol.launch_dependents;", [])


# Arithmetic. --------------------------------------------------------------------------------------


def low_f32(word: Any) -> Any:
    """The first of a pair of BF16."""
    return as_f32(word << Int32(16))


def high_f32(word: Any) -> Any:
    """The second of a pair of BF16."""
    return as_f32(word & Int32(-65536))


def unpack(words: Any) -> list[Any]:
    """Pairs of BF16 as Float32, in memory order."""
    values = []
    for word in words:
        values += [low_f32(word), high_f32(word)]
    return values


def pack(values: Any) -> list[Any]:
    """Float32 rounded to pairs of BF16."""
    code = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return [
        asm(code, [Int32], values[i], values[i + 1], pure=True) for i in range(0, len(values), 2)
    ]


def mma_bf16(sums: Any, a: Any, b: Any) -> Any:
    """sums[4] + A[16 x 16] B[16 x 8] in FP32; fragments as PTX lays out m16n8k16."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return list(asm(code, [Float32] * 4, *a, *b, *sums, pure=True))


def shuffle_xor(value: Any, mask: int) -> Any:
    """The value of lane (own xor mask)."""
    code = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
    return asm(code, [Float32], value)


def shuffle_down(value: Any, distance: int) -> Any:
    """The Float32 of lane (own + distance); the own one where that is beyond the warp."""
    return asm(f"shfl.sync.down.b32 $0, $1, {distance}, 31, -1;", [Float32], value)


def shuffle_from(value: Any, lane: Any) -> Any:
    """The Float32 of lane `lane`."""
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", [Float32], value, Int32(lane))


def shuffle_word_from(value: Any, lane: Any) -> Any:
    """The word of lane `lane`."""
    return asm("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", [Int32], value, Int32(lane))


def rsqrt(value: Any) -> Any:
    """1 / sqrt(value) within 2 units in the last place."""
    return asm("rsqrt.approx.f32 $0, $1;", [Float32], value, pure=True)


def exp(value: Any) -> Any:
    """e^value through ex2.approx (2 ulp); 0 for -inf."""
    code = "ex2.approx.f32 $0, $1;"
    return asm(code, [Float32], value * Float32(1.4426950408889634), pure=True)


@dsl_user_op
def select(condition: Any, yes: Any, no: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """`yes` where `condition` (a Boolean) holds, else `no`, per lane; both of one type."""
    values = [v.ir_value(loc=loc, ip=ip) for v in (condition, yes, no)]
    return type(yes)(arith.select(*values, loc=loc, ip=ip))


def least(value: Any, limit: int) -> Any:
    """min(value, limit) of Int32."""
    return asm("min.s32 $0, $1, $2;", [Int32], value, Int32(limit), pure=True)


def most_f32(a: Any, b: Any) -> Any:
    """The greater one; NaN only if both are."""
    return asm("max.f32 $0, $1, $2;", [Float32], a, b, pure=True)


def shared_store16(address: Any, values: Any, offset: int = 0) -> None:
    """Four Float32."""
    asm(f"st.shared.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};", [], address, *values)


def least_of(a: Any, b: Any) -> Any:
    """min of two Int32."""
    return asm("min.s32 $0, $1, $2;", [Int32], a, b, pure=True)


def reciprocal(value: Any) -> Any:
    """1 / value within 1 unit in the last place."""
    return asm("rcp.approx.f32 $0, $1;", [Float32], value, pure=True)

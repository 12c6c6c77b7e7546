"""Tensor memory, its products, and tiles by tensor map: PTX of sm_100a and sm_103a.

Operands of a product are K-major tiles of BF16 with 64 columns, 128 bytes a row, in the 128-byte
swizzle; rows of 8 lie 1024 bytes apart. Sources: PTX ISA, tcgen05, "Matrix descriptor" and
"Instruction descriptor". Addresses are Int32 for shared and tensor memory, Int64 for the rest.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cutlass_dsl import dsl_user_op

from k3fuse.kernels.common.device import ptx

# Swizzle of 128 bytes, version 1, 1024 bytes from 8 rows to the next; the other stride has no use.
_TILE = 2 << 61 | 1 << 46 | 1024 >> 4 << 32 | 1 << 16
# FP32 sums of BF16 products, both operands K-major.
_BF16 = 1 << 4 | 1 << 7 | 1 << 10
STEPS = 4  # products of a block: 16 columns each


@dsl_user_op
def map_address(atom: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The generic address of the tensor map of a copy atom, a parameter of the kernel."""
    kind = ir.Type.parse("!cute.ptr<i8, generic, align<64>>")
    copy = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    return cute_nvgpu.get_tma_desc_addr(kind, copy, loc=loc, ip=ip).toint()


def prefetch_map(address: Any) -> None:
    """Fetch a tensor map before its first use."""
    ptx.asm("prefetch.tensormap [$0];", [], address)


def load_tile(base: Any, target: int, at: Any, column: Any, row: Any, barrier: int) -> None:
    """The tile at (column, row) of the tensor of the map at `at` to shared memory.

    target, barrier: offsets from `base`; the bytes of the whole tile are counted there.
    """
    code = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        f" [$0+{target}], [$1, {{$2,$3}}], [$0+{barrier}];"
    )
    ptx.asm(code, [], base, at, column, row)


def load_tile_once(
    base: Any, target: int, at: Any, column: Any, row: Any, barrier: int, policy: Any
) -> None:
    """As `load_tile`, with an L2 policy."""
    code = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        f".L2::cache_hint [$0+{target}], [$1, {{$2,$3}}], [$0+{barrier}], $4;"
    )
    ptx.asm(code, [], base, at, column, row, policy)


def allocate(held: Any, columns: int) -> None:
    """Columns of tensor memory for the CTA, by one whole warp; their address goes to `held`."""
    code = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], $1;"
    ptx.asm(code, [], held, Int32(columns))
    ptx.asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", [])


def free(address: Any, columns: int) -> None:
    """Give columns back, by the warp that has allocated them."""
    code = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;"
    ptx.asm(code, [], address, Int32(columns))


def tile_descriptor(address: Any) -> Any:
    """What a product is told about a tile in shared memory; 16 more bytes add 1."""
    return (address >> Int32(4)).to(Int64) | Int64(_TILE)


def instruction(rows: int, tokens: int) -> int:
    """What a product is told about its shape."""
    return _BF16 | tokens >> 3 << 17 | rows >> 4 << 24


def multiply_block(sums: Any, a: Any, b: Any, kind: int, *, fresh: bool) -> None:
    """Add the products of 64 columns to `sums`, or start with them where `fresh`; one thread."""
    lines = ["{ .reg .pred add, all; .reg .b64 a, b; setp.ne.b32 all, 1, 0;"]
    if fresh:
        lines.append("setp.ne.b32 add, 0, 0;")
    product = "tcgen05.mma.cta_group::1.kind::f16 [$0], {}, {}, $3, {};"
    lines.append(product.format("$1", "$2", "add" if fresh else "all"))
    for step in range(1, STEPS):
        lines.append(f"add.s64 a, $1, {2 * step}; add.s64 b, $2, {2 * step};")
        lines.append(product.format("a", "b", "all"))
    ptx.asm(" ".join([*lines, "}"]), [], sums, a, b, Int32(kind))


def commit(base: Any, barrier: int) -> None:
    """Arrive at an mbarrier when all products that this thread has issued are done."""
    ptx.asm(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
        f" [$0+{barrier}];", [], base,
    )  # fmt: skip


def commit_to_cluster(base: Any, barrier: int, ctas: int) -> None:
    """As `commit`, at the mbarriers of the first `ctas` CTAs of the cluster."""
    code = (
        "{ .reg .b16 ctas; cvt.u16.u32 ctas, $1; tcgen05.commit.cta_group::1"
        ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        f" [$0+{barrier}], ctas; }}"
    )
    ptx.asm(code, [], base, Int32((1 << ctas) - 1))


def after_wait() -> None:
    """What follows of tcgen05 comes after the barrier that was just passed."""
    ptx.asm("tcgen05.fence::after_thread_sync;", [])


def before_arrival() -> None:
    """What tcgen05 did before comes before the barrier that is arrived at next."""
    ptx.asm("tcgen05.fence::before_thread_sync;", [])


def load_columns(address: Any, count: int) -> list[Any]:
    """A lane's row of `count` columns of tensor memory as Float32; the warp's own 32 lanes."""
    results = ",".join(f"${i}" for i in range(count))
    code = (
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{results}}}, [${count}];"
        " tcgen05.wait::ld.sync.aligned;"
    )
    return list(ptx.asm(code, [Float32] * count, address))


# Sums in pairs of Float32: 64 bits, one packed instruction. -----------------------------------


def load_pairs(address: Any, offset: int) -> list[Any]:
    """Four Float32 of shared memory as two pairs."""
    return list(ptx.asm(f"ld.shared.v2.b64 {{$0,$1}}, [$2+{offset}];", [Int64] * 2, address))


def add_pairs(a: list[Any], b: list[Any]) -> list[Any]:
    """a + b, each element rounded as by the scalar instruction."""
    code = "add.rn.f32x2 $0, $1, $2;"
    return [ptx.asm(code, [Int64], x, y, pure=True) for x, y in zip(a, b, strict=True)]


def pack_rows(pairs: list[Any]) -> list[Any]:
    """Two rows of four values, in pairs, row by row: BF16 of both rows, a word a value."""
    code = (
        "{ .reg .f32 a, b, c, d; mov.b64 {a, b}, $2; mov.b64 {c, d}, $3;"
        " cvt.rn.bf16x2.f32 $0, c, a; cvt.rn.bf16x2.f32 $1, d, b; }"
    )
    half = len(pairs) // 2
    found: list[Any] = []
    for first, second in zip(pairs[:half], pairs[half:], strict=True):
        found += ptx.asm(code, [Int32] * 2, first, second, pure=True)
    return found

"""tcgen05 from inline PTX that CuTe DSL compiles: columns, moves, copies, products, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import (
    DeadlockError,
    MemoryAccessError,
    SimReport,
    TensorMemoryError,
    UnsupportedPtxError,
)

pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

from dsl_inline import INIT, inline, wait

SEEDS = range(20)
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s+16], {columns};"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {place}, {columns};"
# r100: start of the columns; r101: the part of the warp.
BEGIN = f"""
{INIT}
shr.u32 r102, tid, 5;
setp.eq.u32 p, r102, 0;
@!p bra GO;
{ALLOC.format(columns=64)}
GO:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 r100, [s+16];
shl.b32 r101, r102, 21;
add.u32 r101, r101, r100;
"""
END = f"""
bar.sync 0;
setp.eq.u32 p, r102, 0;
@!p bra STAY;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
{FREE.format(place="r100", columns=64)}
STAY:
"""
WAIT_ST, WAIT_LD = (f"tcgen05.wait::{name}.sync.aligned;" for name in ("st", "ld"))


def registers(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"r{first + place}" for place in range(count)) + "}"


def read_rows(count: int) -> str:
    """Every thread reads `count` words into r0... (in, [thread, count])."""
    loads = [f"ld.global.b32 r{place}, [d0+{4 * place}];" for place in range(count)]
    return f"mul.wide.u32 d0, tid, {4 * count};\nadd.u64 d0, in, d0;\n" + "\n".join(loads)


def write_rows(count: int) -> str:
    stores = [f"st.global.b32 [d1+{4 * place}], r{place};" for place in range(count)]
    return f"mul.wide.u32 d1, tid, {4 * count};\nadd.u64 d1, out, d1;\n" + "\n".join(stores)


def execute(body: str, tensors: list[Any], *, shared: int = 1024, **options: Any) -> SimReport:
    return inline(body, len(tensors), shared, 128).run(tensors, **options)


def words(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns) * 7 + 11


def store_and_load(store: str, load: str, width: int, got: int, **options: Any) -> torch.Tensor:
    """Store [128, width] words of tensor memory in one way, load `got` registers in another."""
    body = "\n".join(
        [BEGIN, read_rows(width), store.format(regs=registers(width)), WAIT_ST,
         load.format(regs=registers(got)), WAIT_LD, write_rows(got), END]
    )  # fmt: skip
    out = torch.zeros(128, got, dtype=torch.int32)
    execute(body, [words(128, width), out], **options)
    return out


STORE = "tcgen05.st.sync.aligned.32x32b.x8.b32 [r101], {regs};"


@pytest.mark.parametrize(
    ("load", "place"),
    [
        ("32x32b.x8.b32 {regs}, [r101]", lambda t, r: (t, r)),
        ("16x64b.x4.b32 {regs}, [r101]", lambda t, r: (t % 2 * 8 + t // 4, 2 * r + t // 2 % 2)),
        ("16x128b.x2.b32 {regs}, [r101]", lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + r // 2 * 4)),
        ("16x256b.x1.b32 {regs}, [r101]", lambda t, r: (t // 4 + r // 2 * 8, t % 4 * 2 + r % 2)),
        ("16x32bx2.x4.b32 {regs}, [r101], 4", lambda t, r: (t % 16, r + t // 16 * 4)),
        ("32x32b.x2.b32 {regs}, [r101+3]", lambda t, r: (t, r + 3)),
    ],
)
def test_load_shapes(load: str, place: Any) -> None:
    """The figures of the PTX ISA; `dsl_tensor.Gemm` compares the same shapes with the DSL."""
    count = {"x8": 8, "x4": 4, "x2": 4, "x1": 4}[load.split(".")[1]]
    count = 2 if load.startswith("32x32b.x2") else count
    source = words(128, 8)
    for seed in (None, 1):
        got = store_and_load(STORE, f"tcgen05.ld.sync.aligned.{load};", 8, count, seed=seed)
        for warp in range(4):
            for thread in range(32):
                at = [place(thread, register) for register in range(count)]
                wanted = [int(source[32 * warp + lane, column]) for lane, column in at]
                assert got[32 * warp + thread].tolist() == wanted


@pytest.mark.parametrize("shape", ["16x64b.x8", "16x128b.x4", "16x256b.x2"])
def test_stores_undo_loads(shape: str) -> None:
    """Half a quarter of the lanes is stored in a shape and loaded in the same."""
    store = f"tcgen05.st.sync.aligned.{shape}.b32 [r101], {{regs}};"
    load = f"tcgen05.ld.sync.aligned.{shape}.b32 {{regs}}, [r101];"
    assert torch.equal(store_and_load(store, load, 8, 8), words(128, 8))


def test_packing_two_columns_in_a_register() -> None:
    source = words(128, 8)
    halves = source & 0xFFFF
    load = "tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {regs}, [r101];"
    packed = store_and_load(STORE, load, 8, 4)
    assert torch.equal(packed, halves[:, 0::2] | halves[:, 1::2] << 16)
    store = "tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 [r101], {regs};"
    load = "tcgen05.ld.sync.aligned.32x32b.x8.b32 {regs}, [r101];"
    apart = store_and_load(store, load, 4, 8)
    source = words(128, 4)
    assert torch.equal(apart[:, 0::2], source & 0xFFFF)
    assert torch.equal(apart[:, 1::2], source >> 16 & 0xFFFF)


def test_a_missing_wait_for_stores_is_found() -> None:
    body = "\n".join(
        [BEGIN, read_rows(8), STORE.format(regs=registers(8)),
         "tcgen05.ld.sync.aligned.32x32b.x8.b32 " + registers(8) + ", [r101];", WAIT_LD,
         write_rows(8), END]
    )  # fmt: skip
    found = 0
    for seed in SEEDS:
        try:
            execute(body, [words(128, 8), words(128, 8)], seed=seed)
        except TensorMemoryError as error:
            found += "before anyone wrote it" in str(error)
    assert found >= 18
    for seed in range(5):
        load = "tcgen05.ld.sync.aligned.32x32b.x8.b32 {regs}, [r101];"
        assert torch.equal(store_and_load(STORE, load, 8, 8, seed=seed), words(128, 8))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BEGIN, "64 columns of tensor memory at 0x0 were never given back with tcgen05.dealloc"),
        (
            "mov.u32 r99, 48;\n" + BEGIN.replace("[s+16], 64;", "[s+16], r99;") + END,
            "tcgen05.alloc of 48 columns; use a power of two",
        ),
        (
            BEGIN + "@p bra NO;\n" + ALLOC.format(columns=512) + "\nNO:\n" + END,
            "tcgen05.alloc of 512 columns, 64 of 512 are taken by this CTA",
        ),
        (BEGIN + END.replace("r100, 64", "r100, 32"), "dealloc of 32 columns at 0x0, which"),
        (
            BEGIN + END + "bar.sync 0;\nsetp.eq.u32 p, r102, 1;\n@!p bra NO;\n"
            + ALLOC.format(columns=32) + "\nNO:\n",
            "tcgen05.alloc after tcgen05.relinquish_alloc_permit",
        ),
        (
            BEGIN + "tcgen05.ld.sync.aligned.32x32b.x8.b32 " + registers(8) + ", [r101+60];" + END,
            "read of tensor memory at lane 0, column 64, which the CTA has not allocated",
        ),
        (
            BEGIN + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r0}, [r101];" + END,
            "read of tensor memory at lane 0, column 0, before anyone wrote it",
        ),
        (
            BEGIN + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r0}, [r100];" + END,
            r"warp 1 \(modulo 4\) reaches lanes 32 to 63 of tensor memory, not 0 to 31",
        ),
        (
            "shr.u32 r0, tid, 5;\nshl.b32 r0, r0, 21;\n"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r1}, [r0];",
            "tensor memory is used before tcgen05.alloc",
        ),
    ],
)  # fmt: skip
def test_misuse_is_named(body: str, message: str) -> None:
    nothing = torch.zeros(16)
    execute(BEGIN + END, [nothing])
    with pytest.raises(TensorMemoryError, match=message):
        execute(body, [nothing])


def test_columns_start_anywhere_with_a_seed() -> None:
    body = BEGIN + "mov.u32 r0, r100;\n" + write_rows(1) + END
    starts = set()
    for seed in (None, *range(8)):
        out = torch.zeros(128, dtype=torch.int32)
        execute(body, [torch.zeros(1), out], seed=seed)
        starts.add(int(out[0]))
        assert int(out[0]) % 64 == 0
        assert seed is not None or int(out[0]) == 0
    assert len(starts) > 2


COPY = f"""
{BEGIN}
{read_rows(8)}
shl.b32 r110, tid, 5;
add.u32 r110, r110, s;
add.u32 r110, r110, 1024;
st.shared.v4.b32 [r110], {{r0, r1, r2, r3}};
st.shared.v4.b32 [r110+16], {{r4, r5, r6, r7}};
fence.proxy.async.shared::cta;
bar.sync 0;
add.u32 r111, s, 1024;
shr.u32 r111, r111, 4;
cvt.u64.u32 d2, r111;
or.b64 d2, d2, DESCRIPTOR;
@first tcgen05.cp.cta_group::1.SHAPE [r100], d2;
@first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [s];
{wait()}
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.xCOUNT.b32 REGISTERS, [r101];
{WAIT_LD}
"""


def descriptor(leading: int, stride: int, code: int = 0) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


@pytest.mark.parametrize(
    ("shape", "count", "rows"),
    [
        ("128x256b", 8, list(range(128))),
        ("128x128b", 4, list(range(128))),
        ("64x128b.warpx2::02_13", 4, list(range(64)) * 2),
        ("64x128b.warpx2::01_23", 4, [*range(32), *range(32), *range(32, 64), *range(32, 64)]),
        ("32x128b.warpx4", 4, list(range(32)) * 4),
    ],
)
def test_copies_from_shared_memory(shape: str, count: int, rows: list[int]) -> None:
    """Rows of 32 bytes lie in shared memory in 8 x 32-byte blocks: pieces 2048 bytes apart."""
    source = words(128, 8)
    # Piece p of row r at p * 2048 + r * 16: the canonical layout without a swizzle.
    pieces = source.reshape(128, 2, 4).transpose(0, 1).contiguous().reshape(128, 8)
    body = COPY.replace("SHAPE", shape).replace("COUNT", str(count))
    body = body.replace("REGISTERS", registers(count))
    body = body.replace("DESCRIPTOR", str(descriptor(2048, 128))) + write_rows(count) + END
    for seed in (None, 1, 2):
        out = torch.zeros(128, count, dtype=torch.int32)
        execute(body, [pieces, out], shared=8192, seed=seed)
        assert torch.equal(out, source[rows, :count])
    found = 0
    for seed in SEEDS:
        try:
            execute(body.replace(wait(), ""), [pieces, out], shared=8192, seed=seed)
        except TensorMemoryError:
            found += 1
    assert found >= 8, "a read before the commit"


def test_bad_descriptors() -> None:
    body = COPY.replace("SHAPE", "32x128b.warpx4").replace("COUNT", "4")
    body = body.replace("REGISTERS", registers(4)) + write_rows(4) + END
    good = descriptor(2048, 128)
    tensors = [words(128, 8), words(128, 4)]
    execute(body.replace("DESCRIPTOR", str(good)), tensors, shared=8192)
    for bad, message in (
        (good ^ 1 << 46, "bits 46 to 48 of the matrix descriptor are not 0b001"),
        (good | 1 << 61, "swizzle code 1"),
        (good | 1 << 50, "a base offset"),
    ):
        with pytest.raises(TensorMemoryError, match=message):
            execute(body.replace("DESCRIPTOR", str(bad)), tensors, shared=8192)
    far = descriptor(2048, 4096)
    with pytest.raises(MemoryAccessError, match="that nobody wrote"):
        execute(body.replace("DESCRIPTOR", str(far)), tensors, shared=32768)
    with pytest.raises(MemoryAccessError, match="the matrix takes bytes 1024 to"):
        execute(body.replace("DESCRIPTOR", str(far)), tensors, shared=8192)


# A from tensor memory, [M, 16] packed in 8 columns; B [8, 16] in shared memory without a swizzle.
TS = f"""
{BEGIN}
{read_rows(8)}
add.u32 r120, r101, 32;
tcgen05.st.sync.aligned.32x32b.x8.b32 [r120], {registers(8)};
{WAIT_ST}
setp.lt.u32 p, tid, 16;
shl.b32 r110, tid, 4;
cvt.u64.u32 d3, r110;
add.u64 d3, more, d3;
add.u32 r110, r110, s;
@p ld.global.v4.b32 {{r0, r1, r2, r3}}, [d3];
@p st.shared.v4.b32 [r110+1024], {{r0, r1, r2, r3}};
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
bar.sync 0;
add.u32 r111, s, 1024;
shr.u32 r111, r111, 4;
cvt.u64.u32 d2, r111;
or.b64 d2, d2, {descriptor(128, 256)};
mov.u32 r112, IDESC;
mov.u32 r113, 0;
mov.u32 r114, LANES;
setp.ne.u32 q, r113, 0;
add.u32 r121, r100, 32;
@first tcgen05.mma.cta_group::1.kind::f16 [r100], [r121], d2, r112, {{r113, r114, r113, r113}}, q;
setp.eq.u32 q, r113, 0;
@first tcgen05.mma.cta_group::1.kind::f16 [r100], [r121], d2, r112, q;
@first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [s];
{wait()}
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [r101];
{WAIT_LD}
{write_rows(8)}
{END}
"""


def idesc(m: int, n: int, kind: int = 1, extra: int = 0) -> int:
    return 1 << 4 | kind << 7 | kind << 10 | n // 8 << 17 | m // 16 << 24 | extra


def multiply_ts(dtype: torch.dtype, word: int, lanes: int = 0, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(-4, 5, (128, 16), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (8, 16), generator=generator).to(dtype)
    # Piece p of row r at p * 128 + r * 16.
    pieces = b.reshape(8, 2, 8).transpose(0, 1).contiguous()
    body = TS.replace("IDESC", str(word)).replace("LANES", str(lanes))
    out = torch.zeros(128, 8)
    execute(body, [a.view(torch.int32), out, pieces.view(torch.int32)], shared=2048, **options)
    return out, 2 * (a.double() @ b.double().T).float()


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_mma_with_a_in_tensor_memory(dtype: torch.dtype, kind: int) -> None:
    for seed in (None, 1, 2, 3):
        got, wanted = multiply_ts(dtype, idesc(128, 8, kind), seed=seed)
        assert torch.equal(got, wanted)
    got, wanted = multiply_ts(dtype, idesc(128, 8, kind, 1 << 13))
    assert torch.equal(got, -wanted), "negated A"
    got, wanted = multiply_ts(dtype, idesc(128, 8, kind, 3 << 13))
    assert torch.equal(got, wanted), "negated A and B"


def test_disabled_lanes_keep_what_they_had() -> None:
    """Lane 33 is left out of the first, overwriting, multiplication: the second adds to nothing."""
    got, wanted = multiply_ts(torch.bfloat16, idesc(128, 8))
    assert torch.equal(got, wanted)
    with pytest.raises(TensorMemoryError, match="lane 33, column 0, before anyone wrote it"):
        multiply_ts(torch.bfloat16, idesc(128, 8), lanes=2)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (idesc(128, 8) | 4, "sparsity"),
        (idesc(128, 8) ^ 1 << 4, "a result other than float32"),
        (idesc(128, 8) ^ 1 << 7, "mixed types"),
        (idesc(256, 8), "shape 256 x 8"),
        (idesc(128, 8) | 1 << 15, "M-major A in tensor memory"),
        (idesc(128, 8, 2), "element types 2 and 2"),
    ],
)
def test_bad_instruction_descriptors(word: int, message: str) -> None:
    with pytest.raises(TensorMemoryError, match=message):
        multiply_ts(torch.bfloat16, word)


def test_a_commit_that_nobody_sends_is_a_deadlock() -> None:
    body = TS.replace("IDESC", str(idesc(128, 8))).replace("LANES", "0")
    tensors = [words(128, 8), torch.zeros(128, 8), words(8, 8)]
    without = "\n".join(line for line in body.split("\n") if "commit.cta" not in line)
    with pytest.raises(DeadlockError, match="waits for the mbarrier at byte 0"):
        execute(without, tensors, shared=2048)


def test_pairs_of_ctas_are_refused_by_name() -> None:
    body = BEGIN.replace("cta_group::1", "cta_group::2") + END.replace(
        "cta_group::1", "cta_group::2"
    )
    kernel = inline(body, 1, 1024, 128, 2, 2)
    with pytest.raises(UnsupportedPtxError, match="cta_group::2: two CTAs"):
        kernel.run([torch.zeros(1)])


def test_what_is_counted() -> None:
    body = TS.replace("IDESC", str(idesc(128, 8))).replace("LANES", "0")
    tensors = [words(128, 8), torch.zeros(128, 8), words(8, 8)]
    opcodes = execute(body, tensors, shared=2048).opcodes
    counts = {name: count for name, count in opcodes.items() if name.startswith("tcgen05")}
    assert counts["tcgen05.ld.sync.aligned.32x32b.x8.b32"] == 4
    assert counts["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"] == 1
    assert counts["tcgen05.mma.cta_group::1.kind::f16"] == 8, "guarded, but issued by each warp"

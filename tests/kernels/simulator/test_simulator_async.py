"""Asynchronous copies and matrix instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3fuse.kernels.simulator import (
    BarrierError,
    DeadlockError,
    MemoryAccessError,
    UnsupportedPtxError,
)
from ptx_text import kernel, run

SEEDS = range(20)
ELEMENT = """
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 4;
  add.u32 %r8, %r6, %r7;
  mul.wide.u32 %d11, %r0, 16;
  add.s64 %d12, %d0, %d11;
  cp.async.cg.shared.global{hint} [%r8], [%d12], 16{size};
  cp.async.commit_group;
  add.u32 %r9, %r8, 512;
  cp.async.ca.shared.global [%r9], [%d12], 8;
  cp.async.commit_group;
  {wait}
  ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r8];
  {second}
  add.s64 %d12, %d1, %d11;
  st.global.v4.u32 [%d12], {{%r10, %r11, %r12, %r13}};
"""


def element(
    wait: str, second: str = "", size: str = "", hint: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.arange(128, dtype=torch.int32) + 7
    target = torch.zeros(128, dtype=torch.int32)
    text = ELEMENT.format(wait=wait, second=second, size=size, hint=hint)
    run(kernel(text, shared=1024), [source, target])
    return source, target


@pytest.mark.parametrize(
    ("wait", "second"),
    [
        ("cp.async.wait_group 1;", ""),
        ("cp.async.wait_group 0;", "ld.shared.u32 %r13, [%r9+4];"),
        ("cp.async.wait_all;", "ld.shared.u32 %r13, [%r9+4];"),
    ],
)
def test_cp_async(wait: str, second: str) -> None:
    source, target = element(wait, second)
    wanted = source.clone()
    if second:
        wanted[3::4] = wanted[1::4]
    assert torch.equal(target, wanted)


def test_cp_async_with_too_weak_a_wait_is_found() -> None:
    with pytest.raises(MemoryAccessError, match="before anyone wrote it"):
        element("cp.async.wait_group 2;")
    with pytest.raises(MemoryAccessError, match="before anyone wrote it"):
        element("cp.async.wait_group 1;", "ld.shared.u32 %r13, [%r9+4];")


def test_cp_async_of_no_bytes_writes_zeros() -> None:
    _, target = element("cp.async.wait_group 0;", size=", 0")
    assert not target.any()


def test_a_cache_policy_is_no_number_of_bytes() -> None:
    wait, hint = "cp.async.wait_group 0;", ".L2::cache_hint"
    source, target = element(wait, size=", %d0", hint=hint)
    assert torch.equal(target, source)
    _, target = element(wait, size=", 0, %d0", hint=hint)
    assert not target.any()


BULK = """
  mov.u32 %r6, buffer;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  {init}
  fence.mbarrier_init.release.cluster;
READY:
  bar.sync 0;
  @%p1 bra WAIT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], {expect};
  add.u32 %r7, %r6, 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%d0], 256, [%r6];
WAIT:
  {wait}
  shl.b32 %r8, %r0, 3;
  add.u32 %r8, %r6, %r8;
  ld.shared.b64 %d3, [%r8+128];
  mul.wide.u32 %d11, %r0, 8;
  add.s64 %d12, %d1, %d11;
  st.global.b64 [%d12], %d3;
"""
BULK_INIT = "mbarrier.init.shared::cta.b64 [%r6], 1;"
BULK_WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;\n@!%p2 bra WAIT;"


def bulk(seed: int | None, init: str = BULK_INIT, expect: int = 256, wait: str = BULK_WAIT) -> bool:
    source, target = torch.randn(64), torch.zeros(64)
    text = kernel(BULK.format(init=init, expect=expect, wait=wait), shared=512)
    run(text, [source, target], seed=seed)
    return torch.equal(source, target)


def test_bulk_copy_and_mbarrier() -> None:
    for seed in (None, *SEEDS):
        assert bulk(seed)


def test_bulk_copy_without_a_wait_is_found() -> None:
    assert bulk(None, wait=""), "at once without a seed"
    found = 0
    for seed in SEEDS:
        try:
            bulk(seed, wait="")
        except MemoryAccessError:
            found += 1
    assert found >= 18


def test_bulk_copy_that_expects_too_much_is_explained() -> None:
    with pytest.raises(DeadlockError, match="0 of 1 arrivals and 16 bytes missing"):
        bulk(None, expect=272)


def test_bulk_copy_that_expects_too_little_is_found() -> None:
    found = 0
    for seed in SEEDS:
        try:
            bulk(seed, expect=64)
        except (MemoryAccessError, BarrierError):
            found += 1
    assert found >= 15


def test_bulk_copy_without_mbarrier_init_is_found() -> None:
    for seed in SEEDS:
        with pytest.raises(BarrierError, match=r"before mbarrier.init"):
            bulk(seed, init="")


def test_bulk_copy_out_of_bounds_is_found() -> None:
    source, target = torch.randn(63), torch.zeros(64)
    text = kernel(BULK.format(init=BULK_INIT, expect=256, wait=BULK_WAIT), shared=512)
    with pytest.raises(MemoryAccessError, match="out-of-bounds read of 16 bytes at byte 240"):
        run(text, [source, target])


OUT = """
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 2;
  add.u32 %r7, %r6, %r7;
  st.shared.u32 [%r7], %r0;
  bar.sync 0;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r6], 128;
  cp.async.bulk.commit_group;
  {wait}
  st.shared.u32 [%r6+16], 99;
  cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group.read 0;", ""])
def test_bulk_copy_to_global(wait: str) -> None:
    target = torch.zeros(32, dtype=torch.int32)
    run(kernel(OUT.format(wait=wait), params=1, shared=128), [target])
    wanted = list(range(32))
    if not wait:
        wanted[4] = 99  # the source was overwritten before the copy had read it
    assert target.tolist() == wanted


SEND = """
  .reg .b32 %c<8>;
  mov.u32 %r6, buffer;
  mov.u32 %c0, %cluster_ctarank;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r6], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], {expect};
  fence.mbarrier_init.release.cluster;
READY:
  barrier.cluster.arrive.release.aligned;
  barrier.cluster.wait.acquire.aligned;
  xor.b32 %c1, %c0, 1;
  shl.b32 %r7, %r0, 2;
  add.u32 %r7, %r6, %r7;
  add.u32 %r7, %r7, 16;
  mapa.shared::cluster.u32 %c2, %r7, %c1;
  mapa.shared::cluster.u32 %c3, %r6, %c1;
  mad.lo.u32 %c4, %r1, 32, %r0;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%c2], %c4, [%c3];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;
  @!%p2 bra WAIT;
  ld.shared.u32 %r8, [%r7];
  mul.wide.u32 %d11, %c4, 4;
  add.s64 %d11, %d0, %d11;
  st.global.u32 [%d11], %r8;
"""


def test_st_async() -> None:
    text = kernel(SEND.format(expect=128), params=1, shared=256)
    for seed in (None, *SEEDS):
        out = torch.zeros(128, dtype=torch.int32)
        run(text, [out], grid=(4, 1, 1), cluster=(2, 1, 1), seed=seed)
        assert out.tolist() == [(cta ^ 1) * 32 + lane for cta in range(4) for lane in range(32)]
    with pytest.raises(DeadlockError, match="4 bytes missing"):
        run(kernel(SEND.format(expect=132), params=1, shared=256), [out], grid=(4, 1, 1),
            cluster=(2, 1, 1))  # fmt: skip


def test_st_async_to_a_cta_that_has_exited() -> None:
    """CTA 0 does not wait for what its peer sends."""
    body = SEND.format(expect=128)
    gone = body.replace("  xor.b32 %c1", "  setp.eq.u32 %p3, %c0, 0;\n  @%p3 ret;\n  xor.b32 %c1")
    out = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(MemoryAccessError, match="that CTA has exited"):
        run(kernel(gone, params=1, shared=256), [out], grid=(2, 1, 1), cluster=(2, 1, 1))


MMA = """
  shr.u32 %r2, %r0, 2;
  and.b32 %r3, %r0, 3;
  mad.lo.u32 %r4, %r2, 32, 0;
  mad.lo.u32 %r4, %r3, 4, %r4;
  cvt.u64.u32 %d4, %r4;
  add.s64 %d5, %d0, %d4;
  ld.global.b32 %r10, [%d5];
  ld.global.b32 %r11, [%d5+256];
  ld.global.b32 %r12, [%d5+16];
  ld.global.b32 %r13, [%d5+272];
  add.s64 %d5, %d1, %d4;
  ld.global.b32 %r14, [%d5];
  ld.global.b32 %r15, [%d5+16];
  mov.b32 %r16, 0f3F000000;
  {mma} {{%r20,%r21,%r22,%r23}}, {{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, {{%r16,%r16,%r16,%r16}};
  mad.lo.u32 %r4, %r2, 32, 0;
  mad.lo.u32 %r4, %r3, 8, %r4;
  cvt.u64.u32 %d4, %r4;
  add.s64 %d5, %d2, %d4;
  st.global.v2.b32 [%d5], {{%r20,%r21}};
  st.global.v2.b32 [%d5+256], {{%r22,%r23}};
"""


@pytest.mark.parametrize(
    ("opcode", "k", "dtype"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, torch.bfloat16),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 16, torch.float16),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 32, torch.float8_e4m3fn),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e5m2.e4m3.f32", 32, torch.float8_e5m2),
    ],
)
def test_mma(opcode: str, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    second = torch.float8_e4m3fn if k == 32 else dtype
    a = torch.randn(16, k, generator=generator).to(dtype)
    b = torch.randn(8, k, generator=generator).to(second)
    d = torch.zeros(16, 8)
    run(kernel(MMA.format(mma=opcode), params=3), [a, b, d])
    wanted = (a.double() @ b.double().T + 0.5).float()
    assert torch.equal(d, wanted)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(count: int, trans: str) -> None:
    names = ["%r10", "%r11", "%r12", "%r13"][:count]
    stores = "\n".join(
        f"st.global.u32 [%d12+{128 * place}], {name};" for place, name in enumerate(names)
    )
    body = f"""
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 4;
  add.u32 %r7, %r6, %r7;
  mul.wide.u32 %d11, %r0, 16;
  add.s64 %d11, %d0, %d11;
  ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%d11];
  st.shared.v4.u32 [%r7], {{%r8, %r9, %r10, %r11}};
  bar.sync 0;
  ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{", ".join(names)}}}, [%r7];
  add.s64 %d12, %d1, %d10;
  {stores}
"""
    rows = np.arange(256, dtype=np.int16)
    out = torch.zeros(32 * count, dtype=torch.int32)
    run(kernel(body, shared=512), [torch.from_numpy(rows), out])
    tiles = rows.reshape(4, 8, 8)[:count]
    wanted = tiles.transpose(0, 2, 1) if trans else tiles
    assert out.numpy().view(np.int16).tolist() == wanted.reshape(-1).tolist()


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;",
        "tcgen05.shift.cta_group::1.down [%r1];",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d0, %d0, %r2, %p0;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %d0, %d0, %r2, %p0;",
        "tcgen05.cp.cta_group::1.4x256b [%r1], %d0;",
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%d0, {%r2, %r3, %r2, %r3}], [%r4], {%h0, %h1};",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r1], [%d0, {%r2}], [%r4];",
        "add.rz.f32 %r5, %r0, %r0;",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
        "{%r1,%r2}, {%r1,%r2,%r3,%r4};",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.e4m3x4 {%r5, %r6, %r7, %r8}, [%d0];",
        "mov.u32 %r5, %smid;",
        "ld.global.b128 %d1, [%d0];",
        "frobnicate.u32 %r5, %r6;",
        "fence.frobnicate;",
    ],
)
def test_unsupported_ptx_is_an_error_with_its_line(line: str) -> None:
    text = kernel(line, params=1)
    with pytest.raises(UnsupportedPtxError) as caught:
        run(text, [torch.zeros(1)])
    number = 1 + next(at for at, item in enumerate(text.split("\n")) if item.startswith(line))
    assert caught.value.line == number
    assert str(caught.value).startswith(f"line {number}: unsupported PTX `{line[:12]}")


# Lanes 0 to 3 copy 16 x (lane + 1) bytes each, all counted by one mbarrier.
RUNS = """
  mov.u32 %r6, buffer;
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r6], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 160;
  fence.mbarrier_init.release.cluster;
READY:
  bar.sync 0;
  setp.gt.u32 %p1, %r0, 3;
  @%p1 bra WAIT;
  add.u32 %r7, %r0, 1;
  shl.b32 %r7, %r7, 4;
  shl.b32 %r8, %r0, 6;
  add.u32 %r8, %r6, %r8;
  add.u32 %r8, %r8, 128;
  mul.wide.u32 %d11, %r0, 64;
  add.s64 %d12, %d0, %d11;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%d12], %r7, [%r6];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;
  @!%p2 bra WAIT;
  setp.gt.u32 %p1, %r0, 3;
  @%p1 bra DONE;
  shl.b32 %r8, %r0, 6;
  add.u32 %r8, %r6, %r8;
  ld.shared.b64 %d3, [%r8+128];
  add.s64 %d12, %d1, %d11;
  st.global.b64 [%d12], %d3;
DONE:
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_copies_of_several_lanes_and_sizes_share_an_mbarrier(seed: int | None) -> None:
    source, target = torch.arange(64.0), torch.zeros(64)
    report = run(kernel(RUNS, shared=512), [source, target], seed=seed)
    starts = torch.arange(4) * 16
    for start in starts.tolist():
        assert torch.equal(target[start : start + 2], source[start : start + 2])
    assert int((target != 0).sum()) == 7  # the first element is 0
    assert report.bytes("read").requested == 160
    assert report.shared_written == 160

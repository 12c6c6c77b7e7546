"""Bulk reductions, copies between CTAs, red.async and multimem, from PTX that CuTe DSL compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import (
    BarrierError,
    DeadlockError,
    MemoryAccessError,
    Multicast,
    simulate,
)
from ptx_text import kernel as by_hand

pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

from dsl_inline import inline, wait

SEEDS = range(10)
FILL = """
shl.b32 r1, tid, 4;
add.u32 r2, s, r1;
cvt.u64.u32 d1, r1;
add.u64 d1, in, d1;
ld.global.v4.b32 {r4, r5, r6, r7}, [d1];
st.shared.v4.b32 [r2+1024], {r4, r5, r6, r7};
fence.proxy.async.shared::cta;
bar.sync 0;
add.u32 r3, s, 1024;
"""
REDUCE = (
    FILL
    + """
@first cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [out], [r3], 512;
@first cp.async.bulk.commit_group;
@first cp.async.bulk.wait_group 0;
"""
)


@pytest.mark.parametrize(
    ("op", "dtype", "combine"),
    [
        ("add.f32", torch.float32, torch.add),
        ("add.noftz.bf16", torch.bfloat16, torch.add),
        ("add.u32", torch.int32, torch.add),
        ("max.s32", torch.int32, torch.maximum),
        ("min.s32", torch.int32, torch.minimum),
    ],
)
def test_reduction_into_global_memory(op: str, dtype: torch.dtype, combine: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    count = 512 // torch.empty(0, dtype=dtype).element_size()
    a, b = (torch.randint(-99, 99, (count,), generator=generator).to(dtype) for _ in range(2))
    wanted = combine(a, b)
    text = REDUCE.replace("{op}", op)
    report = inline(text, 2, 2048).run([a, b], names=["a", "b"])
    assert torch.equal(b, wanted)
    assert report.traffic[0, "b", 0, "write"].distinct == 512


def test_reduction_reads_its_source_when_it_is_waited_for() -> None:
    a, b = torch.ones(128), torch.ones(128)
    text = REDUCE.replace("{op}", "add.f32")
    late = text.replace("@first cp.async.bulk.wait_group 0;", "st.shared.b32 [r3], 0;")
    inline(late, 2, 2048).run([a, b])
    assert b.tolist() == [1.0] + [2.0] * 127


def test_reduction_beyond_the_buffer_is_found() -> None:
    with pytest.raises(MemoryAccessError, match="out-of-bounds update"):
        inline(REDUCE.replace("{op}", "add.f32"), 2, 2048).run([torch.ones(128), torch.ones(127)])


# Each CTA of a pair prepares an mbarrier at s that expects 512 bytes from the other one.
PAIR = (
    """
@first mbarrier.init.shared::cta.b64 [s], 1;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [s], EXPECT;
@first fence.mbarrier_init.release.cluster;
mul.wide.u32 d0, cta, 512;
add.u64 in, in, d0;
add.u64 out, out, d0;
"""
    + FILL
    + """
add.u32 r8, r2, 2048;
mov.u32 r9, 1;
st.shared.v4.b32 [r8], {r9, r9, r9, r9};
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
xor.b32 r10, cta, 1;
add.u32 r11, s, 2048;
mapa.shared::cluster.u32 r12, r11, r10;
mapa.shared::cluster.u32 r13, s, r10;
SEND
"""
    + wait()
    + """
add.u32 r14, s, r1;
ld.shared.v4.b32 {r4, r5, r6, r7}, [r14+2048];
cvt.u64.u32 d1, r1;
add.u64 d1, out, d1;
st.global.v4.b32 [d1], {r4, r5, r6, r7};
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""
)
COPY = (
    "@first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    " [r12], [r3], 512, [r13];"
)
ADD = COPY.replace("cp.async", "cp.reduce.async").replace("bytes [", "bytes.add.u32 [")
_ADD_ONE = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
ELEMENT = "add.u32 r20, r12, r1;\n" + "\n".join(
    f"{_ADD_ONE} [r20+{4 * place}], r{4 + place}, [r13];" for place in range(4)
)


@pytest.mark.parametrize(("send", "plus"), [(COPY, None), (ADD, 1), (ELEMENT, 1)])
def test_between_ctas(send: str, plus: int | None) -> None:
    """A copy overwrites the ones at the target, reductions add to them."""
    source = torch.arange(256, dtype=torch.int32)
    wanted = source.reshape(2, 128).flip(0).reshape(-1) + (plus or 0)
    text = PAIR.replace("SEND", send)
    good = inline(text.replace("EXPECT", "512"), 2, 4096, grid=2, cluster=2)
    for seed in (None, *SEEDS):
        out = torch.zeros(256, dtype=torch.int32)
        good.run([source, out], seed=seed)
        assert torch.equal(out, wanted)
    bad = inline(text.replace("EXPECT", "528"), 2, 4096, grid=2, cluster=2)
    with pytest.raises(DeadlockError, match="16 bytes missing"):
        bad.run([source, out])
    found = 0
    early = inline(text.replace("EXPECT", "16"), 2, 4096, grid=2, cluster=2)
    for seed in SEEDS:
        try:
            early.run([source, out], seed=seed)
            found += not torch.equal(out, wanted)
        except (MemoryAccessError, BarrierError, DeadlockError):
            found += 1
    assert found >= 7


# --- multimem ---------------------------------------------------------------------------------


def over_ranks(
    body: str, tensors: list[torch.Tensor], out: torch.dtype, words: int
) -> torch.Tensor:
    """Run a body on each rank: `in` is a multicast address, `out` takes `words` of each thread."""
    made = inline(body, 2)
    results = [torch.zeros(32 * words, dtype=torch.int32) for _ in tensors]
    simulate(
        made.ptx, grid=made.grid, block=made.block, dynamic_smem=made.smem, ranks=len(tensors),
        params=[[Multicast(tuple(tensors)), result] for result in results],
    )  # fmt: skip
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0].view(out)


@pytest.mark.parametrize(
    ("form", "dtype", "words", "wide"),
    [
        ("add.f32", torch.float32, 1, True),
        ("add.v4.f32", torch.float32, 4, True),
        ("add.acc::f32.v4.bf16x2", torch.bfloat16, 4, True),
        ("add.bf16x2", torch.bfloat16, 1, False),
        ("add.acc::f32.v2.f16x2", torch.float16, 2, True),
        ("max.v4.bf16x2", torch.bfloat16, 4, True),
        ("add.u32", torch.int32, 1, True),
        ("min.s32", torch.int32, 1, True),
    ],
)
def test_multimem_ld_reduce(form: str, dtype: torch.dtype, words: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    count = 32 * words * 4 // torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.int32:
        parts = [torch.randint(-99, 99, (count,), generator=generator).int() for _ in range(4)]
    else:
        parts = [torch.randn(count, generator=generator).to(dtype) for _ in range(4)]
    regs = [f"r{place}" for place in range(words)]
    inside = regs[0] if words == 1 else "{" + ", ".join(regs) + "}"
    vector = "" if words == 1 else f".v{words}"
    body = f"""
mul.wide.u32 d0, tid, {4 * words};
add.u64 d1, in, d0;
add.u64 d2, out, d0;
multimem.ld_reduce.relaxed.sys.global.{form} {inside}, [d1];
st.global{vector}.b32 [d2], {inside};
"""
    got = over_ranks(body, parts, dtype, words)
    if form.startswith("add") and wide:
        wanted = sum(part.double() for part in parts).to(dtype)  # type: ignore[union-attr]
    elif form.startswith("add"):
        wanted = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    else:
        wanted = torch.stack(parts).amax(0) if "max" in form else torch.stack(parts).amin(0)
    assert torch.equal(got, wanted)


def test_multimem_red_in_vectors() -> None:
    body = """
mul.wide.u32 d0, tid, 16;
add.u64 d1, in, d0;
mov.b32 r0, 0f3F800000;
mov.b32 r1, 0f40000000;
multimem.red.relaxed.sys.global.add.v4.f32 [d1], {r0, r1, r0, r1};
"""
    made = inline(body, 1)
    tensors = [torch.full((128,), float(rank)) for rank in range(3)]
    simulate(
        made.ptx, grid=made.grid, block=made.block, dynamic_smem=made.smem, ranks=3,
        params=[[Multicast(tuple(tensors))] for _ in tensors],
    )  # fmt: skip
    for rank, tensor in enumerate(tensors):
        assert tensor.tolist() == [rank + 3.0, rank + 6.0] * 64


def test_ld_reduce_needs_a_multicast_address() -> None:
    body = "multimem.ld_reduce.relaxed.sys.global.add.f32 %r5, [%d0];"
    text = by_hand(body, params=1)
    with pytest.raises(MemoryAccessError, match="not a multicast address"):
        simulate(text, grid=(1, 1, 1), block=(32, 1, 1), params=[[torch.zeros(4)]])
    tensor = torch.zeros(4)
    simulate(text, grid=(1, 1, 1), block=(32, 1, 1), params=[[Multicast((tensor,))]])

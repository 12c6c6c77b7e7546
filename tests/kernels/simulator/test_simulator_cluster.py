"""Clusters: memory of another CTA, the barrier before it, and its end; shapes and ranks."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.simulator import MemoryAccessError
from ptx_text import kernel, run

SEEDS = range(20)
CLUSTER = """
  .reg .b32 %c<8>;
  mov.u32 %c0, %cluster_ctarank;
  mov.u32 %c1, buffer;
  shl.b32 %c2, %r0, 2;
  add.u32 %c2, %c1, %c2;
  mul.lo.u32 %c3, %r1, 100;
  add.u32 %c3, %c3, %r0;
  st.shared.u32 [%c2], %c3;
  {barrier}
  xor.b32 %c4, %c0, 1;
  mapa.shared::cluster.u32 %c5, %c2, %c4;
  ld.shared::cluster.u32 %c6, [%c5];
  barrier.cluster.arrive.relaxed.aligned;
  barrier.cluster.wait.aligned;
  mad.lo.u32 %c7, %r1, 32, %r0;
  mul.wide.u32 %d11, %c7, 4;
  add.s64 %d11, %d0, %d11;
  st.global.u32 [%d11], %c6;
"""
ARRIVE = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"


def exchange(barrier: str, seed: int | None) -> list[int]:
    out = torch.zeros(128, dtype=torch.int32)
    text = kernel(CLUSTER.format(barrier=barrier), params=1, shared=128)
    report = run(text, [out], grid=(4, 1, 1), cluster=(2, 1, 1), seed=seed)
    assert report.remote_shared == 4 * 128
    return out.tolist()


def test_distributed_shared_memory() -> None:
    wanted = [100 * (cta ^ 1) + lane for cta in range(4) for lane in range(32)]
    for seed in (None, *SEEDS):
        assert exchange(ARRIVE, seed) == wanted


def test_a_missing_cluster_barrier_is_found() -> None:
    found = 0
    for seed in SEEDS:
        try:
            exchange("bra NEXT;\nNEXT:", seed)
        except MemoryAccessError as error:
            found += "ld.shared::cluster.u32" in str(error)
    assert found >= 10


# CTA 1 of each cluster is held up before it reads.
HELD = """
  setp.eq.u32 %p4, %c0, 0;
  mov.u32 %r9, 0;
  @%p4 bra GO;
HOLD:
  add.u32 %r9, %r9, 1;
  setp.lt.u32 %p5, %r9, 40;
  @%p5 bra HOLD;
GO:
"""
LAST = "  barrier.cluster.arrive.relaxed.aligned;\n  barrier.cluster.wait.aligned;\n"


def test_memory_of_a_cta_that_has_exited_is_not_read() -> None:
    body = CLUSTER.format(barrier=ARRIVE)
    assert body.count(LAST) == 1
    held = body.replace("  ld.shared::cluster", HELD + "  ld.shared::cluster")
    out = torch.zeros(128, dtype=torch.int32)
    where = {"grid": (4, 1, 1), "cluster": (2, 1, 1)}
    run(kernel(held, params=1, shared=128), [out], **where)  # the control
    with pytest.raises(MemoryAccessError, match="that CTA has exited"):
        run(kernel(held.replace(LAST, ""), params=1, shared=128), [out], **where)


def test_cluster_shapes_and_ranks() -> None:
    body = """
  mov.u32 %r5, %cluster_ctarank;
  mov.u32 %r6, %clusterid.y;
  mad.lo.u32 %r5, %r6, 100, %r5;
  mov.u32 %r7, %ctaid.y;
  mov.u32 %r8, %nctaid.x;
  mad.lo.u32 %r7, %r7, %r8, %r1;
  mul.wide.u32 %d11, %r7, 4;
  add.s64 %d11, %d0, %d11;
  st.global.u32 [%d11], %r5;
"""
    out = torch.zeros(8, dtype=torch.int32)
    run(kernel(body, params=1), [out], grid=(2, 4, 1), cluster=(2, 2, 1))
    assert out.tolist() == [0, 1, 2, 3, 100, 101, 102, 103]

"""Kernels compiled from CuTe DSL for sm_103a, run in the simulator and compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import BarrierError, Fresh, MemoryAccessError, simulate
from tolerances import assert_close

cutlass: Any = pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

import dsl_kernels as dsl  # noqa: E402  (needs the DSL)

SEEDS = range(20)


@pytest.mark.parametrize("m", [1, 8])
def test_gemv_at_a_k3_shape(m: int) -> None:
    n, k = 7168, 768
    bf16 = cutlass.BFloat16
    shapes = [dsl.fake(bf16, *shape) for shape in ((m, k), (n, k), (m, n))]
    text = dsl.ptx_of(dsl.Gemv(n, k, m), *shapes)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).bfloat16()
    w = torch.randn(n, k, generator=generator).bfloat16()
    y = torch.zeros(m, n).bfloat16()
    report = simulate(
        text, grid=(n // 4, 1, 1), block=(128, 1, 1), dynamic_smem=64 * m,
        params=[[x, w, Fresh(y)]], names=["x", "w", "y"],
    )  # fmt: skip
    assert_close(y, (x.double() @ w.double().T).bfloat16(), k=k)
    assert report.traffic[0, "w", 0, "read"].distinct == 2 * n * k
    assert report.traffic[0, "w", 0, "read"].requested == 2 * n * k
    assert report.traffic[0, "y", 0, "write"].distinct == 2 * n * m


def cluster_sum(barrier: bool, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    f32 = cutlass.Float32
    text = dsl.ptx_of(dsl.ClusterSum(4, barrier), dsl.fake(f32, 256), dsl.fake(f32, 256))
    x, y = torch.arange(256, dtype=torch.float32), torch.zeros(256)
    simulate(
        text, grid=(8, 1, 1), block=(32, 1, 1), cluster=(4, 1, 1), dynamic_smem=128,
        params=[[x, y]], seed=seed,
    )  # fmt: skip
    return y, x.reshape(2, 4, 32).sum(1, keepdim=True).expand(2, 4, 32).reshape(-1)


def test_cluster_reduction() -> None:
    for seed in (None, 1, 2, 3):
        got, wanted = cluster_sum(True, seed)
        assert torch.equal(got, wanted)


def test_cluster_reduction_without_its_barrier_is_found() -> None:
    for seed in (1, 2, 3):
        with pytest.raises(MemoryAccessError, match="before anyone wrote it"):
            cluster_sum(False, seed)


BF16_K = 4096


def bulk_text(wait_for_empty: bool) -> str:
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    return dsl.ptx_of(
        dsl.BulkDot(BF16_K, wait_for_empty), dsl.fake(bf16, BF16_K), dsl.fake(bf16, 16, BF16_K),
        dsl.fake(f32, 16),
    )  # fmt: skip


def bulk_dot(text: str, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BF16_K, generator=generator).bfloat16()
    w = torch.randn(16, BF16_K, generator=generator).bfloat16()
    y = torch.zeros(16)
    simulate(
        text, grid=(16, 1, 1), block=(160, 1, 1), dynamic_smem=4096, params=[[x, w, y]], seed=seed
    )
    return y, (w.double() @ x.double()).float()


def test_bulk_pipeline() -> None:
    text = bulk_text(True)
    for seed in (None, *range(5)):
        got, wanted = bulk_dot(text, seed)
        assert_close(got, wanted, k=BF16_K)


def test_bulk_pipeline_that_overwrites_full_slots_is_found() -> None:
    text = bulk_text(False)
    found = 0
    for seed in range(5):
        try:
            got, wanted = bulk_dot(text, seed)
            found += not torch.allclose(got, wanted, rtol=1e-3, atol=1e-3)
        except BarrierError:
            found += 1
    assert found == 5

"""The front kernel at the real sizes: values on all ranks, and what it costs."""

from __future__ import annotations

import pytest
import torch
from front_runs import (
    HIDDEN,
    SHARED,
    core,
    full,
    requested,
    run_one,
    weights,
    words,
    wrong,
)

from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.router.front_builder import config_of
from k3fuse.kernels.router.front_problem import make
from stored import store

pytest.importorskip("cutlass")

# vLLM's kernels for the same rows, without moves: front, shared gate/up and SiTU, counted by the
# same rules; at M = 1 its kernel for few tokens, which holds the routing too. Source:
# docs/kernels/router.md.
BASELINE = {
    (8, 1): 2_238_030, (8, 2): 273_565, (8, 4): 281_000, (8, 8): 333_060, (8, 16): 836_650,
    (8, 32): 1_127_561, (8, 64): 1_330_184,
    (16, 1): 2_260_368, (16, 8): 234_684, (16, 16): 432_738, (16, 32): 580_230, (16, 64): 725_146,
}  # fmt: skip
MOST = {1: 1.05, 2: 1.05, 3: 1.05, 4: 1.05, 5: 1.15, 8: 1.15, 9: 1.3, 16: 1.3, 32: 1.3, 33: 1.4}
TOKENS = (1, 2, 3, 5, 8, 9, 16, 33, 64)


def most_tokens(m: int) -> int:
    """Of the kernel that the policy takes."""
    return next(size for size in (8, 16, 32, 64) if size >= m)


def check(tp: int, m: int, shared: bool, **tuning: int) -> None:
    variant = full(tp, most_tokens(m), shared, **tuning)
    problem = make(config_of(variant), m, seed=m, weights=weights(tp, shared))
    report = run_one(variant, problem)
    assert wrong(problem) == ""
    if shared and not tuning.get("replicated"):
        assert requested(report) <= MOST.get(m, 1.4)
        if (tp, m) in BASELINE:
            assert core(report) <= BASELINE[tp, m]
    # Gate and latent weights are one memory for all ranks, which the report calls rank 0's.
    last = tp - 1
    rows = {("gate_weight", 0): 896 // (1 if tuning.get("replicated") else tp)}
    rows["latent_weight", 0] = 3584 // tp
    if shared:
        rows["shared_gate", last] = 2 * SHARED[tp]
    for (name, owner), count in rows.items():
        read = report.traffic[last, name, owner, "read"]
        assert read.distinct == count * HIDDEN * 2
        # Lanes beyond the last row of a tile repeat an address of the same instruction.
        assert read.requested == -(-count // 32) * 32 * HIDDEN * 2


def test_all_ranks_at_the_real_sizes() -> None:
    check(16, 8, True)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("m", TOKENS)
def test_every_count(tp: int, m: int, shared: bool) -> None:
    check(tp, m, shared)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 9, 64])
def test_peer_stores_at_the_real_sizes(tp: int, m: int) -> None:
    check(tp, m, False, multicast=0)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
def test_replicated_logits_have_the_same_bits(tp: int) -> None:
    found = []
    for replicated in (0, 1):
        variant = full(tp, 8, replicated=replicated)
        problem = make(config_of(variant), 1, seed=3, weights=weights(tp, True))
        run_one(variant, problem)
        assert wrong(problem) == ""
        found.append(words(problem))
    assert torch.equal(*found)


@pytest.mark.nightly
@pytest.mark.parametrize(("tp", "m"), sorted(BASELINE))
def test_figures(tp: int, m: int) -> None:
    """One rank is enough to count: all do the same."""
    variant = full(tp, most_tokens(m))
    problem = make(config_of(variant), m, seed=m, weights=weights(tp, True), ranks=(3,))
    report = run_one(variant, problem)
    assert requested(report) <= MOST.get(m, 1.4)
    assert core(report) <= BASELINE[tp, m]
    assert store().get(variant).resources.spill_bytes == 0


def test_the_tolerance_of_logits_refuses_other_formats() -> None:
    """Logits that went through BF16 or TF32 are no FP32 logits."""
    problem = make(config_of(full(8, 8, False)), 2, seed=1, weights=weights(8, False))
    logits, _ = problem.expected()
    band = tolerance(torch.float32, HIDDEN)
    exact = (problem.x.double() @ problem.gate.double().t()).float()
    assert compare(exact, logits, band).ok  # the control
    tf32 = (logits.view(torch.int32) & -0x2000).view(torch.float32)  # 10 bits of fraction
    for rounded in (logits.bfloat16().float(), tf32, exact * 1.00002):
        assert not compare(rounded, logits, band).ok

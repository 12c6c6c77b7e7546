"""The experts of a rank on one device: order, bookkeeping and comparisons, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from experts_device import Functional

from k3fuse.kernels.check.gpu import run_case
from k3fuse.kernels.experts import launch
from k3fuse.kernels.experts.bench import GPU_CASES, Rank
from k3fuse.kernels.experts.policy import EXPERTS

SHAPE = {"latent": 896, "inter": 64, "shared": 192, "top_k": 4}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Functional, Rank]]:
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)
    # The stand-in's kernels are the reference; so is its simulator here.
    monkeypatch.setattr(
        "k3fuse.kernels.experts.bench.simulated", lambda variant, made: made.expected()
    )
    device = Functional()
    made = Rank(device, 8, tokens=(1, 9), timed=(1, 3), experts=6, shape=SHAPE, k=1024)
    yield device, made
    launch.arrivals(torch.device("cpu")).zero_()


def test_a_rank_on_one_device(case: tuple[Functional, Rank]) -> None:
    device, rank = case
    done = run_case(rank, device, replays=6)
    assert done.passed, done.faults
    assert done.replays == 6
    assert list(done.compared.values()) == [0]
    assert all(v.arch == "sm_90a" for v in device.launched)
    ops = [v.op for v in device.launched]
    assert ops[::2] == ["shared_gate_up"] * (len(ops) // 2)
    assert ops[1::2] == ["experts"] * (len(ops) // 2)
    # A launch is a second on this device; the stock composition launches none of our kernels.
    for times in done.microseconds.values():
        assert times == {EXPERTS: pytest.approx(2e6), "BF16, cuBLAS": 0}


def test_the_stock_composition_computes_the_same(case: tuple[Functional, Rank]) -> None:
    """But for x and the hidden row, which it rounds to BF16 alone."""
    device, rank = case
    given = rank._operands(9)
    results: list[torch.Tensor] = []
    call = rank._batched(given, rank.inputs["ids"][:9])
    call(results.append)
    routed, shared = results
    wanted = rank.expected
    for got, name in ((routed, "routed"), (shared, "shared")):
        far = (got.float() - wanted[name][:9].float()).abs().mean()
        assert far < 0.06 * wanted[name][:9].float().abs().mean(), name
    assert not device.launched


@pytest.mark.parametrize(
    ("broken", "fault"),
    [("next expert", "routed is outside the tolerance"), ("leave", "a count is 1")],
)
def test_a_wrong_kernel_is_a_fault(
    broken: str, fault: str, case: tuple[Functional, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, rank = case
    device.broken = broken
    if broken == "leave":  # it says so at once, where a next launch follows
        rank.tokens = (1,)
    done = run_case(rank, device, replays=0)
    assert fault in "; ".join(done.faults)


def test_the_group_sizes() -> None:
    assert list(GPU_CASES) == ["tp8", "tp16"]

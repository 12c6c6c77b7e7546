"""All ranks of the router on one device: order, bookkeeping and comparisons, without a GPU."""

from __future__ import annotations

import pytest
from router_device import Functional

from k3fuse.kernels.check.gpu import run_case
from k3fuse.kernels.router.bench import GPU_CASES, Emulated
from k3fuse.kernels.router.policy import SHARDED


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> tuple[Functional, Emulated]:
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)
    device = Functional()
    made = Emulated(device, 8, tokens=(1, 9), timed=(3,), k=1024, experts=96, latent=256)
    return device, made


def test_a_group_on_one_device(case: tuple[Functional, Emulated]) -> None:
    device, emulated = case
    assert emulated.ways(1) == ["sharded", "replicated"]
    assert emulated.ways(9) == ["sharded"]
    done = run_case(emulated, device, replays=6)
    assert done.passed, done.faults
    assert done.replays == 6
    assert all(v.arch == "sm_90a" for v in device.launched)
    fronts = [v for v in device.launched if v.op == "router_front"]
    assert len(fronts) * 2 == len(device.launched)
    assert {v.tuning("multicast") for v in fronts} == {0}
    assert {v.tuning("replicated") for v in fronts} == {0, 1}
    # A launch is a second on this device; the stock composition launches none of our kernels.
    (times,) = done.microseconds.values()
    assert times == {SHARDED: pytest.approx(2e6), "whole weights in PyTorch": 0}


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("rounded", "elements of logits of rank 0 are not the exact ones"),
        ("unarmed", "mailbox is not armed"),
    ],
)
def test_a_wrong_kernel_is_a_fault(
    broken: str, fault: str, case: tuple[Functional, Emulated]
) -> None:
    device, emulated = case
    device.broken = broken
    done = run_case(emulated, device, replays=1)
    assert fault in "; ".join(done.faults)


def test_the_group_sizes() -> None:
    assert list(GPU_CASES) == ["tp8", "tp16"]

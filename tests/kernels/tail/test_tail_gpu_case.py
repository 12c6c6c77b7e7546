"""All ranks of the tail on one device: order, bookkeeping and comparisons, without a GPU."""

from __future__ import annotations

import pytest
from tail_device import Functional, Simulated

from k3fuse.kernels.check.gpu import run_case
from k3fuse.kernels.tail import bench
from k3fuse.kernels.tail.bench import GPU_CASES, Emulated
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.policy import ONE_SHOT


@pytest.fixture(scope="module")
def group() -> tuple[Functional, Emulated]:
    device = Functional()
    return device, Emulated(device, 8, tokens=(1, 10), timed=(2,))


@pytest.fixture
def case(
    group: tuple[Functional, Emulated], monkeypatch: pytest.MonkeyPatch
) -> tuple[Functional, Emulated]:
    device, made = group
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)
    monkeypatch.setattr(
        bench, "simulated", lambda problem: problem.expected()[:, : problem.config.rows]
    )
    made.reset()
    made.boxes.missed.zero_()
    device.launched.clear()
    return device, made


def test_a_group_on_one_device(case: tuple[Functional, Emulated]) -> None:
    device, emulated = case
    assert emulated.ways(10) == ["one-shot", "two-shot"]
    done = run_case(emulated, device, replays=4)
    assert done.passed, done.faults
    assert done.replays == 4
    assert sum(done.compared.values()) <= 8  # FP32 sums of the reference in another order
    assert all(v.arch == "sm_90a" and not config_of(v).multicast for v in device.launched)
    # A launch is a second on this device; the stock composition launches none of our kernels.
    (times,) = done.microseconds.values()
    assert times == {ONE_SHOT: pytest.approx(1e6), "sums + norm + cuBLAS": 0}


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("scaled", "out is outside the tolerance"),
        ("dropped", "out is outside the tolerance"),
        ("columns", "out is outside the tolerance"),
        ("unarmed", "not armed again"),
    ],
)
def test_a_wrong_kernel_is_a_fault(
    broken: str, fault: str, case: tuple[Functional, Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, emulated = case
    monkeypatch.setattr(emulated, "tokens", (1,))
    monkeypatch.setattr(emulated, "ways", lambda m: ["one-shot"])
    monkeypatch.setattr(device, "broken", broken)
    done = run_case(emulated, device, replays=0)
    assert fault in "; ".join(done.faults)


def test_the_group_sizes() -> None:
    assert list(GPU_CASES) == ["tp8", "tp16"]


@pytest.mark.nightly
def test_a_group_of_simulated_kernels() -> None:
    pytest.importorskip("cutlass")
    case = Emulated(Simulated(), 8, tokens=(2,), timed=())
    done = run_case(case, case.device, replays=2)
    assert done.passed, done.faults

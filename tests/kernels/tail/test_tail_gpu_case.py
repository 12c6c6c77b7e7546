"""All ranks of the tail on one device: order, bookkeeping and comparisons, without a GPU."""

from __future__ import annotations

import pytest
from tail_device import Functional, Simulated

from k3fuse.kernels.check.gpu import run_case
from k3fuse.kernels.tail import one_device
from k3fuse.kernels.tail.bench import GPU_CASES
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.mix_one_device import EmulatedMix
from k3fuse.kernels.tail.one_device import Emulated
from k3fuse.kernels.tail.policy import ONE_SHOT


@pytest.fixture(scope="module")
def group() -> tuple[Functional, Emulated]:
    device = Functional()
    return device, Emulated(device, 8, tokens=(1, 10), timed=(2,))


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few replays, and the reference in the place of the simulator."""
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)
    monkeypatch.setattr(
        one_device, "simulated", lambda problem: problem.expected()[:, : problem.config.rows]
    )


@pytest.fixture
def case(
    group: tuple[Functional, Emulated], monkeypatch: pytest.MonkeyPatch
) -> tuple[Functional, Emulated]:
    device, made = group
    quick(monkeypatch)
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
    assert list(GPU_CASES) == ["tp8", "tp16", "tp8_attn_res", "tp16_attn_res"]


def test_a_group_with_attn_res_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    device = Functional()
    emulated = EmulatedMix(device, 8, tokens=(1, 3), timed=(2,))
    done = run_case(emulated, device, replays=2)
    assert done.passed, done.faults
    # One launch, and two; a launch is a second on this device.
    (times,) = done.microseconds.values()
    assert times == {"one launch": pytest.approx(1e6), "two launches": pytest.approx(2e6)}
    mixing = {config_of(v).blocks for v in device.launched if v.op == "tail"}
    assert mixing == {-1, 8}


@pytest.mark.parametrize(
    ("broken", "fault"),
    [("old prefix", "new_prefix is outside"), ("first block", "mixed is outside")],
)
def test_a_wrong_mix_is_a_fault(broken: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    device = Functional(broken)
    emulated = EmulatedMix(device, 8, tokens=(1,), timed=())
    monkeypatch.setattr(emulated, "ways", lambda m: ["one launch"])
    assert fault in "; ".join(run_case(emulated, device, replays=0).faults)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
def test_a_group_of_simulated_kernels_with_attn_res(tp: int) -> None:
    pytest.importorskip("cutlass")
    case = EmulatedMix(Simulated(), tp, tokens=(2,), timed=())
    done = run_case(case, case.device, replays=2)
    assert done.passed, done.faults


@pytest.mark.nightly
def test_a_group_of_simulated_kernels() -> None:
    pytest.importorskip("cutlass")
    case = Emulated(Simulated(), 8, tokens=(2,), timed=())
    done = run_case(case, case.device, replays=2)
    assert done.passed, done.faults

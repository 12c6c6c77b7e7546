"""All ranks on one device: order, bookkeeping and comparisons, without a GPU."""

from __future__ import annotations

import pytest

from k3fuse.kernels.check.gpu import ROUNDS, run_case
from k3fuse.kernels.output_projection import bench
from k3fuse.kernels.output_projection.bench import GPU_CASES, Emulated
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import STAGES
from one_device import Functional, Simulated


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)


@pytest.fixture(scope="module")
def group() -> tuple[Functional, Emulated]:
    device = Functional()
    return device, Emulated(device, 8, tokens=(1, 10), timed=(2,))


@pytest.fixture
def case(group: tuple[Functional, Emulated], monkeypatch: pytest.MonkeyPatch) -> Emulated:
    device, made = group
    made.reset()
    device.launched.clear()
    # The simulator's rows: those of the reference.
    monkeypatch.setattr(bench, "consumed", lambda arch, tp, partials, _: (
        made.expected[0][: partials.shape[1]]))  # fmt: skip
    return made


def test_a_group_on_one_device(case: Emulated, group: tuple[Functional, Emulated]) -> None:
    device, _ = group
    assert case.ways(1) == ["fused", "split", "two-shot"]
    assert case.ways(10) == ["split"]
    assert "132 SMs hold 1 of 8 ranks" in case.notes[2]
    assert "up to M = 9, which 132 SMs hold" in case.notes[3]
    case.step(1, "two-shot")
    kinds = [(STAGES[config_of(v).stage], config_of(v).two_shot) for v in device.launched]
    assert kinds == [("producer", True)] * 8 + [("consumer", True)] * 8
    done = run_case(case, device, replays=6)
    assert done.passed, done.faults
    assert done.replays == 6
    assert list(done.compared.values()) == [0]
    assert all(v.arch == "sm_90a" and config_of(v).multicast is False for v in device.launched)
    # A launch is a second on this device; the composition launches none of our kernels.
    (times,) = done.microseconds.values()
    assert times == {"fused_mailbox": pytest.approx(1e6), "cuBLAS + sum + AttnRes": 0}


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("scaled", "out is outside the tolerance"),
        ("dropped", "elements of new_prefix are not the exact sum"),
        ("unarmed", "mailbox is not armed"),
    ],
)
def test_a_wrong_kernel_is_a_fault(
    broken: str, fault: str, case: Emulated, group: tuple[Functional, Emulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    device, _ = group
    monkeypatch.setattr(case, "tokens", (1,))
    monkeypatch.setattr(case, "ways", lambda m: ["split"])
    monkeypatch.setattr(device, "broken", broken)
    done = run_case(case, device, replays=1)
    assert fault in "; ".join(done.faults)


def test_the_group_sizes() -> None:
    assert list(GPU_CASES) == ["tp8", "tp16"]
    assert ROUNDS > 1


@pytest.mark.nightly
def test_a_group_of_simulated_kernels() -> None:
    # Sixteen ranks' mailboxes and weights in the simulator take more memory than a test should.
    device = Simulated()
    case = Emulated(device, 8, tokens=(2,), timed=())
    done = run_case(case, device, replays=3)
    assert done.passed, done.faults
    assert list(done.compared.values()) == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("m", [1, 12, 40])
@pytest.mark.parametrize("tp", [8, 16])
def test_every_timed_kernel_ends(tp: int, m: int) -> None:
    device = Functional()
    case = Emulated(device, tp, tokens=(), timed=(m,))
    timed = case.time(m)
    for call in range(3):
        timed.prepare()
        for way in timed.ways.values():
            timed.prepare()
            way(call)

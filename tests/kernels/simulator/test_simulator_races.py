"""Planted races, each found by name in every seed, and each with a control that has none.

`pytest -s` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import (
    Fresh,
    Launch,
    Owned,
    Race,
    SimReport,
    SimulationError,
    simulate,
    simulate_sequence,
)

cutlass: Any = pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

import dsl_kernels as dsl  # noqa: E402  (needs the DSL)
import race_kernels as racy  # noqa: E402

SEEDS = range(20)
Result = tuple[tuple[Race, ...], str]


@dataclass
class Case:
    """How a kernel of the table is compiled and run; `values` gives fresh parameters."""

    tensors: tuple[Any, ...]
    values: Callable[[], list[list[Any]]]
    options: dict[str, Any] = field(default_factory=dict)


def ints(*sizes: int) -> Callable[[], list[list[Any]]]:
    return lambda: [[torch.zeros(size, dtype=torch.int32) for size in sizes]]


def two_ranks(boxes: int) -> Callable[[], list[list[Any]]]:
    """Parameters in the memory of rank 1, then the own rank."""

    def values() -> list[list[Any]]:
        shared = [torch.zeros(32, dtype=torch.int32) for _ in range(boxes)]
        return [[*(Owned(box, 1) for box in shared), rank] for rank in range(2)]

    return values


def bulk_values() -> list[list[Any]]:
    return [[torch.ones(4096).bfloat16(), torch.ones(2, 4096).bfloat16(), Fresh(torch.zeros(2))]]


I32, F32, BF16 = cutlass.Int32, cutlass.Float32, cutlass.BFloat16
LAUNCHES = {
    racy.Message: Case((dsl.fake(I32, 32),) * 3 + (I32(0),), two_ranks(3), {"ranks": 2}),
    racy.Sentinel: Case((dsl.fake(I32, 32),) * 2 + (I32(0),), two_ranks(2), {"ranks": 2}),
    racy.Neighbours: Case((dsl.fake(I32, 64),), ints(64), {"block": 64}),
    racy.LeaderWaits: Case((dsl.fake(I32, 32),), ints(32), {"block": 64}),
    racy.PeerSignal: Case((dsl.fake(I32, 32),), ints(32), {"grid": 2, "cluster": 2}),
    racy.BulkOnce: Case(
        (dsl.fake(F32, 128),) * 2, lambda: [[torch.ones(128), torch.zeros(128)]], {"block": 64}
    ),
    racy.BulkOut: Case((dsl.fake(I32, 64),), ints(64), {"block": 64}),
    racy.ElementCopy: Case(
        (dsl.fake(I32, 64),) * 2,
        lambda: [[torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]],
        {"block": 64},
    ),
    dsl.ClusterSum: Case(
        (dsl.fake(F32, 256),) * 2,
        lambda: [[torch.ones(256), torch.zeros(256)]],
        {"grid": 8, "cluster": 4},
    ),
    dsl.BulkDot: Case(
        (dsl.fake(BF16, 4096), dsl.fake(BF16, 2, 4096), dsl.fake(F32, 2)),
        bulk_values,
        {"grid": 2, "block": 160},
    ),
}


@cache
def text_of(make: Callable[[], Any]) -> tuple[str, Case]:
    kernel = make()
    launch = LAUNCHES[type(kernel)]
    return dsl.ptx_of(kernel, *launch.tensors), launch


def run(
    make: Callable[[], Any],
    seed: int | None,
    values: list[list[Any]] | None = None,
    races: bool = True,
) -> SimReport:
    text, launch = text_of(make)
    sizes = {name: (launch.options.get(name, 1), 1, 1) for name in ("grid", "cluster")}
    return simulate(
        text, **sizes, block=(launch.options.get("block", 32), 1, 1), dynamic_smem=8192,
        ranks=launch.options.get("ranks", 1), params=values or launch.values(), seed=seed,
        races=races,
    )  # fmt: skip


def outcome(make: Callable[[], Any], seed: int | None) -> Result:
    """The races of a run and the text of the error that ended it, if any."""
    try:
        report = run(make, seed)
    except SimulationError as error:
        return error.races, str(error)
    assert bool(report.races) == bool(report.race_count)
    return report.races, ""


@dataclass(frozen=True)
class Fault:
    """A kernel with a race, the same without, and how the race must be named."""

    name: str
    wrong: Callable[[], Any]
    right: Callable[[], Any]
    kind: str
    missing: str
    error: str = "no such error"


FAULTS = [
    Fault("missing release", lambda: racy.Message(send="relaxed"), racy.Message,
          "write/read", "stored relaxed"),
    Fault("missing acquire", lambda: racy.Message(receive="relaxed"), racy.Message,
          "write/read", "loaded relaxed"),
    Fault("missing release of a counter", lambda: racy.Message(send="relaxed", count=True),
          lambda: racy.Message(count=True), "write/read", "stored relaxed"),
    Fault("unfenced relaxed flag", lambda: racy.Message("relaxed", "relaxed", fences="receive"),
          lambda: racy.Message("relaxed", "relaxed", fences="send, receive"),
          "write/read", "stored relaxed"),
    Fault("relaxed flag without the reader's fence",
          lambda: racy.Message("relaxed", "relaxed", fences="send"),
          lambda: racy.Message("release", "relaxed", fences="receive"),
          "write/read", "loaded relaxed"),
    Fault("wrong scope", lambda: racy.Message(scope="gpu"), racy.Message,
          "write/read", "the peer is on another rank: use .sys"),
    Fault("wrong scope of a sentinel", lambda: racy.Sentinel(scope="gpu"), racy.Sentinel,
          "write/read|read/write", "the peer is on another rank: use .sys"),
    Fault("weak load of a sentinel", lambda: racy.Sentinel(weak=True), racy.Sentinel,
          "write/read|read/write", "one side is weak"),
    Fault("missing barrier", lambda: racy.Neighbours(32, False), lambda: racy.Neighbours(32),
          "write/read|read/write", "bar.sync"),
    Fault("missing warp barrier", lambda: racy.Neighbours(1, False), lambda: racy.Neighbours(1),
          "write/read|read/write", "bar.warp.sync between lanes"),
    Fault("one lane waits for its warp", lambda: racy.LeaderWaits(False), racy.LeaderWaits,
          "write/read|read/write", "only another lane of the warp waited|bar.sync (or an"),
    Fault("missing cluster barrier", lambda: dsl.ClusterSum(4, False),
          lambda: dsl.ClusterSum(4), "write/read|read/write", "barrier.cluster.arrive"),
    Fault("missing mbarrier init order", lambda: racy.PeerSignal("none"), racy.PeerSignal,
          "mbarrier used before its init is visible", "fence.mbarrier_init by its owner",
          "is used before mbarrier.init"),
    Fault("relaxed cluster barrier without init fence", lambda: racy.PeerSignal("unfenced"),
          lambda: racy.PeerSignal("relaxed"),
          "mbarrier used before its init is visible", "fence.mbarrier_init by its owner"),
    Fault("mbarrier arrival of a peer at .cta", lambda: racy.PeerSignal(scope="cta"),
          racy.PeerSignal, "write/read", "the mbarrier orders at .cta scope"),
    Fault("mbarrier init hidden from copies", lambda: racy.BulkOnce(init_fence=False),
          racy.BulkOnce, "mbarrier used before its init is visible", "an asynchronous copy uses"),
    Fault("missing empty-slot wait", lambda: dsl.BulkDot(4096, False), lambda: dsl.BulkDot(4096),
          "read/write|write/write", "bar.sync (or an mbarrier)|a wait for the mbarrier"),
    Fault("too few bytes expected", lambda: racy.BulkOnce(expect=256), racy.BulkOnce,
          "write/read", "counts all bytes of the asynchronous copy"),
    Fault("bulk copy without a wait", lambda: racy.BulkOnce(wait=False), racy.BulkOnce,
          "write/read", "a wait for the mbarrier"),
    Fault("missing proxy fence", lambda: racy.BulkOut("none"), racy.BulkOut,
          "missing proxy fence", "fence.proxy.async"),
    Fault("bulk store without a wait", lambda: racy.BulkOut(wait=False),
          lambda: racy.BulkOut("reader"), "read/write", "bulk.wait_group"),
    Fault("cp.async without a wait", lambda: racy.ElementCopy(False), racy.ElementCopy,
          "write/read", "cp.async.wait_group"),
]  # fmt: skip


def named(fault: Fault, result: Result) -> bool:
    races, error = result
    return fault.error in error or any(
        race.kind in fault.kind.split("|")
        and any(words in race.missing for words in fault.missing.split("|"))
        for race in races
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_race_is_found_by_name_and_its_control_is_clean(fault: Fault) -> None:
    found = sum(named(fault, outcome(fault.wrong, seed)) for seed in SEEDS)
    controls = [outcome(fault.right, seed) for seed in SEEDS]
    clean = sum(not races and not error for races, error in controls)
    print(f"\n{fault.name:44s} found {found:2d} of 20, controls clean {clean:2d} of 20")
    assert found == 20, [str(race) for race in outcome(fault.wrong, 0)[0]]
    assert clean == 20, [(str(races[0]) if races else "", error) for races, error in controls]


def dependent(early: bool, pdl: bool, seed: int) -> tuple[tuple[Race, ...], list[int], str]:
    """A producer that triggers early and its consumer: races, what arrives, the error."""
    x, y = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    one = dsl.fake(I32, 64)
    texts = [launch_text(racy.Produce, one), launch_text(racy.Consume, one, one, early=early)]
    shapes = {"grid": (2, 1, 1), "block": (32, 1, 1)}
    launches = [
        Launch(texts[0], params=[[x]], names=["x"], label="produce", **shapes),
        Launch(texts[1], params=[[x, y]], names=["x", "y"], label="consume", pdl=pdl, **shapes),
    ]
    try:
        report = simulate_sequence(launches, seed=seed, races=True)
    except SimulationError as error:
        return error.races, y.tolist(), str(error)
    return report.races, y.tolist(), ""


@cache
def launch_text(kernel: Any, *shapes: Any, **options: Any) -> str:
    return dsl.ptx_of(kernel(**options), *shapes)


def test_an_early_trigger_and_a_read_before_the_wait_are_a_race() -> None:
    for seed in SEEDS:
        (race,), _, error = dependent(True, True, seed)
        assert race.kind in ("read/write", "write/read")
        assert {race.first.launch, race.second.launch} == {
            "launch 0 'produce'", "launch 1 'consume'",
        }  # fmt: skip
        assert "griddepcontrol.wait in the later launch" in race.missing
        assert "buffer 'x' of rank 0" in race.place
        assert "may run before launch 0 'produce' is complete" in error
        for early, pdl in ((False, True), (True, False)):
            assert dependent(early, pdl, seed) == ((), [1] * 64, "")


def tensors(values: list[list[Any]]) -> list[torch.Tensor]:
    raw = [getattr(value, "tensor", value) for row in values for value in row]
    return [value for value in raw if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("make", list(LAUNCHES), ids=lambda make: make.__name__)
def test_the_checker_changes_nothing(make: Callable[[], Any]) -> None:
    kernel = FULL.get(make, make)
    results, reports = [], []
    for races in (False, True):
        values = text_of(kernel)[1].values()
        reports.append(run(kernel, 3, values, races))
        results.append(tensors(values))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[1][-1].any(), "the kernel did its work"
    off, on = reports
    assert (off.warp_instructions, off.rounds, off.traffic) == (
        on.warp_instructions, on.rounds, on.traffic,
    )  # fmt: skip
    assert off.races == ()
    assert off.race_count == 0


FULL: dict[Any, Callable[[], Any]] = {
    dsl.ClusterSum: lambda: dsl.ClusterSum(4),
    dsl.BulkDot: lambda: dsl.BulkDot(4096),
    racy.Neighbours: lambda: racy.Neighbours(32),
}

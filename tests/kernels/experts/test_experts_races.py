"""Schedules, races, and what happens when a barrier or a wait is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from expert_runs import check, judge, launch, pair_of_clusters, store

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.experts.cases import problem
from k3fuse.kernels.simulator import SimulationError

pytest.importorskip("cutlass")

# Each cluster has one expert of three units: the third exchange needs the first one's buffer.
M, EXPERTS = 17, 2


def run_once(built: Built, seed: int | None, races: bool) -> tuple[bool, int]:
    """Whether the result is right, and how many races were found."""
    made = problem(pair_of_clusters(), M, seed=1, experts=EXPERTS, kind="same")
    report = launch(built, made, seed=seed, races=races)
    return judge(made).ok and not made.idle(), len(report.races)


def test_no_races() -> None:
    assert run_once(store().get(pair_of_clusters()), None, True) == (True, 0)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.nightly) for s in (2, 3))])
def test_random_schedules(seed: int) -> None:
    made = problem(pair_of_clusters(), M, seed=seed, experts=EXPERTS, kind="same")
    launch(pair_of_clusters(), made, seed=seed)
    check(made)


# What is taken out or weakened, where (a regular expression and which of its places), for what.
MUTATIONS = {
    "acquire of the hidden rows": (
        r"mbarrier.try_wait.parity.acquire.cluster", "mbarrier.try_wait.parity.relaxed.cluster",
    ),
    "arrival at the peers": (r"mbarrier.arrive.release.cluster", "mbarrier.arrive.relaxed.cluster"),
    "order of the count": (r"atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "barriers of the multiplying warps": (r"bar.sync 1, 224;", "bar.warp.sync -1;"),
    "release of a stage": (
        r"mbarrier.arrive.shared.b64 _", "mbarrier.arrive.relaxed.cta.shared::cta.b64 _",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "order of the count" else pytest.mark.nightly)
        for name in MUTATIONS
    ],
)
def test_what_is_missing_is_found(name: str) -> None:
    built = store().get(pair_of_clusters())
    pattern, other = MUTATIONS[name]
    weak, count = re.subn(pattern, other, built.ptx)
    assert count >= 1
    try:
        right, races = run_once(replace(built, ptx=weak), None, True)
    except SimulationError:
        return
    assert not right or races


def test_the_sort_needs_no_order() -> None:
    """Pairs of an expert may come in any order: the bits do not depend on it."""
    first = problem(pair_of_clusters(), M, seed=6, experts=EXPERTS, kind="same")
    other = problem(pair_of_clusters(), M, seed=6, experts=EXPERTS, kind="same")
    launch(pair_of_clusters(), first)
    turn = torch.arange(M - 1, -1, -1)
    for tensor in (other.x, other.ids, other.weights):
        tensor.copy_(tensor[turn])
    launch(pair_of_clusters(), other)
    assert torch.equal(other.routed[turn], first.routed)

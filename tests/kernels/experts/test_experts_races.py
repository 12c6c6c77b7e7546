"""Schedules, races, and what happens when a barrier, a fence or a wait is missing or weaker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_runs import check, judge, launch, pair_of_clusters
from orders import Chain

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.experts.cases import problem
from k3fuse.kernels.simulator import MemoryAccessError, SimulationError
from left_out import sites, weakened
from stored import store

pytest.importorskip("cutlass")

# Each cluster has one expert of three units: the third exchange needs the first one's buffer.
M, EXPERTS = 17, 2


def run_once(built: Built, seed: int | None, races: bool) -> tuple[bool, int]:
    """Whether the result is right, and how many races were found."""
    made = problem(pair_of_clusters(), M, seed=1, experts=EXPERTS, kind="same")
    report = launch(built, made, seed=seed, races=races)
    return judge(made).ok and not made.idle(), len(report.races or ())


def test_no_races() -> None:
    assert run_once(store().get(pair_of_clusters()), None, True) == (True, 0)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.nightly) for s in (2, 3))])
def test_random_schedules(seed: int) -> None:
    made = problem(pair_of_clusters(), M, seed=seed, experts=EXPERTS, kind="same")
    launch(pair_of_clusters(), made, seed=seed)
    check(made)


# Left out, or weaker, one by one. -----------------------------------------------------------------

# Kernel, most tokens, tokens, config; then lines that order something, and acquires and releases.
SET_UPS = {
    "gate_up": (8, 3, {}, 12, 2),
    "one unit": (8, 3, {}, 49, 9),
    "many units": (32, 17, {}, 58, 11),
    "shuffled": (32, 17, {"shuffled": 1}, 58, 11),
}
# The last barrier of a cluster keeps its shared memory until all peers have arrived there: found by
# a peer that is late, below.
LAST = 2
# Gate and up: a warp without a tile does both for the sake of its arrivals alone; it reads nothing.
IDLE = {"gate_up": ("barrier.cluster.wait.acquire.aligned;", "griddepcontrol.wait;")}
# Lines that CI takes out of the experts; the nightly tests take all.
FEW = ("griddepcontrol", "fence")


def chain(name: str) -> tuple[Chain, Built]:
    """The set-up, and the kernel that is changed."""
    most, tokens, config, _, _ = SET_UPS[name]
    made = Chain(most, tokens, **config)
    return made, made.gate_up if name == "gate_up" else made.experts


def test_without_any_gate_and_up_goes_wrong() -> None:
    assert missed("gate_up") == [*IDLE["gate_up"]]


def test_without_some_the_experts_go_wrong() -> None:
    made, built = chain("one unit")
    assert made.found(built, seeds=(None,)) == ""
    chosen = [(text, less) for text, less in sites(built) if text.startswith(FEW)]
    assert len(chosen) == 2
    assert [text for text, less in chosen if not made.found(less, seeds=(None,))] == []


def missed(name: str) -> list[str]:
    """What can be left out, or be weaker, without anything being found; the control passes."""
    made, built = chain(name)
    assert made.found(built) == ""
    less, weak = sites(built), weakened(built)
    assert (len(less), len(weak)) == SET_UPS[name][3:]
    kept = less if name == "gate_up" else less[:-LAST]
    return [text for text, other in (*kept, *weak) if not made.found(other)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SET_UPS if name != "gate_up"])
def test_without_any_the_experts_go_wrong(name: str) -> None:
    assert missed(name) == []


# CTA 1 of a cluster is late to say that it has read the hidden rows.
LATE = """
{ .reg .pred p; .reg .b32 r, n; mov.u32 r, %cluster_ctarank; mov.u32 n, 0;
setp.ne.u32 p, r, 1; @p bra ON; HELD: add.u32 n, n, 1; setp.lt.u32 p, n, 300; @p bra HELD; ON: }
"""


def test_the_cluster_ends_together() -> None:
    built = store().get(pair_of_clusters())
    says = "{ .reg .b32 there; mapa.shared::cluster.u32 there"
    assert built.ptx.count(says) == 1
    late = built.ptx.replace(says, LATE + says)
    assert run_once(replace(built, ptx=late), None, False) == (True, 0)
    last = "barrier.cluster.wait.acquire.aligned;"
    head, _, tail = late.rpartition(last)
    with pytest.raises(MemoryAccessError, match="has exited"):
        run_once(replace(built, ptx=head + tail), None, False)
    head, _, tail = late.rpartition("barrier.cluster.arrive.release.aligned;")
    with pytest.raises(SimulationError):
        run_once(replace(built, ptx=head + tail), None, False)


def test_the_sum_over_slots_needs_its_order() -> None:
    """The last warp to count a token reads what the others have stored."""
    built = store().get(pair_of_clusters())
    relaxed = built.ptx.replace("atom.acq_rel.gpu", "atom.relaxed.gpu")
    assert relaxed != built.ptx
    _, races = run_once(replace(built, ptx=relaxed), None, True)
    assert races


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

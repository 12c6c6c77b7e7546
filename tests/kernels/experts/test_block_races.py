"""Schedules and races of the block-scaled engine, and what happens where its order is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from block_runs import HALVES, block, settings
from expert_runs import SMALL, check, judge, launch
from orders import Chain
from test_experts_races import LATE

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.experts.cases import Problem, problem
from k3fuse.kernels.simulator import SimulationError
from stored import store

pytest.importorskip("cutlass")

# One cluster, three experts, two units of one of them: the ring is filled twice, the products of
# one entry go on while the hidden rows of the one before are exchanged.
SHAPE = {**SMALL, "top_k": 2}
M, EXPERTS = 9, 3
_ORDER = re.compile(
    r"^[^\n/]*(?:fence\.proxy|mbarrier\.try_wait|mbarrier\.arrive|barrier\.cluster|bar\.sync"
    r"|bar\.warp\.sync|tcgen05\.commit|tcgen05\.(?:de)?alloc)[^\n]*$",
    re.MULTILINE,
)
SITES = 63
FEW = (14,)
# Not found, and why it need not be.
CLUSTER_ENDS = "all peers are in time: `test_the_cluster_ends_together`"
UNSEEN = {
    1: "behind the next barrier, threads that write scales fence what all have cleared",
    11: "the cluster's barrier follows",
    27: "a load of tensor memory is one of the whole warp",
    36: "the four warps have met behind their last write, and one fence is for all of it",
    39: "the slots of a token come from one warp here; `test_two_clusters` finds it",
    41: "the readers are fast: `test_tensor_memory_is_given_back_behind_the_last_read`",
    61: CLUSTER_ENDS,
    62: CLUSTER_ENDS,
}


def operands(seed: int) -> Problem:
    """Nine tokens of the first expert; the second and the third one share them."""
    made = problem(variant(), M, seed=seed, experts=EXPERTS)
    made.ids[:, 0] = 0
    made.ids[:, 1] = 1 + torch.arange(M) % 2
    return made


def variant() -> Variant:
    return block(SHAPE, 16)


@cache
def built() -> Built:
    return store().get(variant())


def found(
    made: Built, seed: int | None = None, *, races: bool = True, given: Problem | None = None
) -> str:
    """What a run of the kernel reports; "" for nothing."""
    given = given or operands(1)
    try:
        report = launch(made, given, seed=seed, races=races)
    except SimulationError as error:
        return str(error)
    said = [str(race) for race in report.races or ()]
    said += [] if judge(given).ok else ["routed is wrong"]
    return "; ".join([*said, given.idle()]).strip("; ")


def sites() -> list[re.Match[str]]:
    lines = _ORDER.finditer(built().ptx)
    return [site for site in lines if "cp.async" not in site[0] and "st.async" not in site[0]]


def test_no_races() -> None:
    config = settings(variant())
    assert EXPERTS * (config.stages1 + config.stages2) > config.stages
    assert found(built()) == ""
    assert len(sites()) == SITES


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 9))]
)
def test_random_schedules(seed: int) -> None:
    made = operands(seed)
    launch(variant(), made, seed=seed)
    check(made)


@pytest.mark.parametrize(
    "site", [pytest.param(i, marks=() if i in FEW else pytest.mark.nightly) for i in range(SITES)]
)
def test_what_is_left_out_is_found(site: int) -> None:
    place = sites()[site]
    less = built().ptx[: place.start()] + built().ptx[place.end() :]
    said = found(replace(built(), ptx=less))
    if site in UNSEEN:
        assert said == "", UNSEEN[site]
    else:
        assert said, place[0]


# Warps of the readers but the one that gives tensor memory back, held up before they read.
_SLOW = """
{ .reg .pred p; .reg .u32 t, n; mov.u32 t, %tid.x; mov.u32 n, 0; setp.lt.u32 p, t, 32;
@p bra ON; HELD: add.u32 n, n, 1; setp.lt.u32 p, n, 4000; @p bra HELD; ON: }
"""


@pytest.mark.nightly
def test_tensor_memory_is_given_back_behind_the_last_read() -> None:
    ptx = built().ptx
    at = ptx.rindex("\n", 0, ptx.rindex("tcgen05.ld.sync"))
    slow = ptx[:at] + _SLOW + ptx[at:]
    assert found(replace(built(), ptx=slow), races=False) == ""
    place = sites()[41]
    less = ptx[:at] + _SLOW + ptx[at : place.start()] + ptx[place.end() :]
    assert "not allocated" in found(replace(built(), ptx=less), races=False)


@pytest.mark.nightly
def test_the_cluster_ends_together() -> None:
    """A peer that is late to say that it has read the hidden rows finds this CTA still there."""
    says = "{ .reg .b32 there; mapa.shared::cluster.u32 there"
    assert built().ptx.count(says) == 1
    late = built().ptx.replace(says, LATE + says)
    assert found(replace(built(), ptx=late), races=False) == ""
    for last in (
        "barrier.cluster.wait.acquire.aligned;",
        "barrier.cluster.arrive.release.aligned;",
    ):
        head, _, tail = late.rpartition(last)
        assert found(replace(built(), ptx=head + tail), races=False), last


@pytest.mark.nightly
def test_behind_its_predecessor() -> None:
    """Gate and up of the shared expert, then the experts, which start early."""
    chain = Chain(8, 3, block=1)
    ptx = chain.experts.ptx
    assert chain.found(chain.experts) == ""
    assert ptx.count("griddepcontrol.wait;") == 1
    less = replace(chain.experts, ptx=ptx.replace("griddepcontrol.wait;", ""))
    assert chain.found(less, seeds=(None,))


# What orders the rows of a token's slots, which two clusters make.
SLOTS = {
    "": "",
    r"atom.acq_rel.gpu": "atom.relaxed.gpu",
    r"bar\.warp\.sync -1;(?=[^@]*\{[^@]*@p atom\.acq_rel)": "",
}


@pytest.mark.nightly
@pytest.mark.parametrize("pattern", SLOTS)
def test_two_clusters(pattern: str) -> None:
    shape = {**HALVES, "hidden": 0, "shared": 0, "top_k": 2}
    made = store().get(block(shape, 32, clusters=2))
    given = problem(made.variant, 17, seed=1, experts=2, kind="same")
    weak, count = re.subn(pattern, SLOTS[pattern], made.ptx) if pattern else (made.ptx, 1)
    assert count == 1
    said = found(replace(made, ptx=weak), given=given)
    assert bool(said) == bool(pattern), said

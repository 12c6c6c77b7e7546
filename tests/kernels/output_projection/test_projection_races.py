"""No data races, and no fence, barrier or wait that could be left out unnoticed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from exchange import kernel, store
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED
from k3fuse.kernels.output_projection.problem import make
from k3fuse.kernels.simulator import Multicast, SimulationError

pytest.importorskip("cutlass")

RANK = 1
_SITE = re.compile(
    r"^[^\n/]*(?:bar\.sync|bar\.arrive|barrier\.cluster\.\w+|mbarrier\.try_wait|fence\.mbarrier)"
    r"[^\n]*$",
    re.MULTILINE,
)
# Not looked at here: the wait for the sum of squares that only a cancelling mix takes (the last
# one), and the cluster wait of the fused kernel's producing warps, which only pairs their arrival.
CONSUMER_SITES = 5
FUSED_SITES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12)


def found(built: Built, stage: int) -> str:
    """What a run of one rank reports, its peers' partials delivered; "" for nothing."""
    config = config_of(built.variant)
    problem = make(config, 1, project=stage == FUSED)
    partials = problem.random_partials(0)
    others = {r: p for r, p in enumerate(partials) if stage == CONSUMER or r != RANK}
    problem.deliver(others, 0, count=stage == CONSUMER)
    values: dict[str, Any] = dict(problem.values(RANK))
    values |= {"mailbox": problem.boxes[RANK], "multicast": Multicast((problem.boxes[RANK],))}
    names = [parameter.name for parameter in built.plan.parameters]
    launch = Launch(built, [{name: values[name] for name in names}])
    try:
        report = run_sequence([launch], races=True, cache=store())
    except SimulationError as error:
        return str(error)
    return "; ".join(report.races or ())


def without(built: Built, site: int) -> Built:
    """The kernel without one of its barriers, waits and fences."""
    place = list(_SITE.finditer(built.ptx))[site]
    return replace(built, ptx=built.ptx[: place.start()] + built.ptx[place.end() :])


def test_the_consumer_has_no_races() -> None:
    assert found(store().get(kernel(CONSUMER, 8, 8)), CONSUMER) == ""


@pytest.mark.parametrize("site", range(CONSUMER_SITES))
def test_what_is_left_out_of_the_consumer_is_found(site: int) -> None:
    assert found(without(store().get(kernel(CONSUMER, 8, 8)), site), CONSUMER)


def test_the_fused_kernel_has_no_races() -> None:
    assert found(store().get(kernel(FUSED, 16, 8)), FUSED) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("site", FUSED_SITES)
def test_what_is_left_out_of_the_fused_kernel_is_found(site: int) -> None:
    assert found(without(store().get(kernel(FUSED, 8, 8)), site), FUSED)

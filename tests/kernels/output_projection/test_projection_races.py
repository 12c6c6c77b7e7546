"""No data races, and no fence, barrier or wait that could be left out unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exchange import kernel
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.problem import make
from k3fuse.kernels.simulator import Multicast
from left_out import sites
from scaled import Scaled
from stored import store

pytest.importorskip("cutlass")

RANK = 1


def stages(tp: int, two_shot: int) -> list[Variant]:
    tuning = {"two_shot": two_shot, "blocks": 1}
    return [kernel(stage, tp, 1, **tuning) for stage in (PRODUCER, CONSUMER)]


# The mix cancels, so that the wait for its squares is taken, too. 33 tokens are three groups of 16:
# at TP8, where two are held, one buffer is used again.
SET_UPS: dict[str, Callable[[int], Scaled]] = {
    "fused": lambda tp: Scaled([kernel(FUSED, tp, 8, blocks=1)], 1, cancels=True),
    "producer": lambda tp: Scaled([kernel(PRODUCER, tp, 48)], 33),
    "two-shot producer": lambda tp: Scaled([kernel(PRODUCER, tp, 48, two_shot=1)], 33),
    "consumer": lambda tp: Scaled(stages(tp, 0), 1, cancels=True),
    "two-shot consumer": lambda tp: Scaled(stages(tp, 1), 1, cancels=True),
}
# Barriers, fences and waits of the last kernel, and what sets its mbarriers up: name, TP -> number.
SITES = {
    ("fused", 8): 25, ("fused", 16): 22, ("producer", 8): 17, ("producer", 16): 13,
    ("two-shot producer", 8): 17, ("two-shot producer", 16): 13, ("consumer", 8): 13,
    ("consumer", 16): 13, ("two-shot consumer", 8): 13, ("two-shot consumer", 16): 13,
}  # fmt: skip
FEW = {  # what CI leaves out: what waits and what does not show in another kernel
    "fused": ("bar", "fence", "{", "griddepcontrol"),
    "producer": ("bar", "griddepcontrol"),
    "consumer": ("griddepcontrol",),
}


def unnoticed(name: str, tp: int, kinds: tuple[str, ...] = ("",)) -> list[str]:
    """What can be left out; the kernel as it is passes."""
    scaled = SET_UPS[name](tp)
    assert scaled.found() == ""
    found = sites(scaled.built[-1])
    assert len(found) == SITES[name, tp]
    return [t for t, mutated in found if t.startswith(kinds) and not scaled.found(mutated)]


@pytest.mark.parametrize("name", FEW)
def test_nothing_can_be_left_out(name: str) -> None:
    assert unnoticed(name, 8, FEW[name]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("name", SET_UPS)
def test_nothing_can_be_left_out_of_any_kernel(name: str, tp: int) -> None:
    assert unnoticed(name, tp) == []


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("stage", [FUSED, CONSUMER])
def test_a_whole_grid_has_no_races(stage: int, tp: int) -> None:
    variant = kernel(stage, tp, 8)
    problem = make(config_of(variant), 1, project=stage == FUSED)
    partials = problem.random_partials(0)
    others = {r: p for r, p in enumerate(partials) if stage == CONSUMER or r != RANK}
    problem.deliver(others, 0, count=stage == CONSUMER)
    values = {**problem.values(RANK), "mailbox": problem.boxes[RANK]}
    values["multicast"] = Multicast((problem.boxes[RANK],))
    built = store().get(variant)
    launch = Launch(built, [{p.name: values[p.name] for p in built.plan.parameters}])
    assert run_sequence([launch], races=True, cache=store()).races == ()

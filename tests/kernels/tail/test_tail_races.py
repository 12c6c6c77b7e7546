"""No data races, and no fence, barrier or wait that could be left out unnoticed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tail_runs import check, kernel, problem_of, run

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.simulator import SimulationError
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.problem import mailboxes
from left_out import sites, weakened
from stored import store

pytest.importorskip("cutlass")

WEAK = 1  # explicit acquires and releases
PREDECESSOR = "griddepcontrol.wait;"
# Nine tokens on eight CTAs: one of them normalises two.
TOKENS = 9


def found(built: Built, calls: int = 1, tokens: int = TOKENS) -> str:
    """What a run of two ranks reports; "" for nothing."""
    config = config_of(built.variant)
    boxes = mailboxes(config.box)
    problems = [problem_of(built.variant, tokens, seed, boxes=boxes) for seed in range(calls)]
    try:
        report = run(built, *problems, races=True)
    except SimulationError as error:
        return str(error)
    return "; ".join(str(race) for race in report.races or ())


def test_the_tail_has_no_races() -> None:
    assert found(store().get(kernel(2, 16))) == ""


# One-shot or two-shot, where a rank has every other token; a cluster's rows in units of 64; tokens,
# so that a CTA normalises two; lines that order something.
FORMS = [(0, 1, TOKENS, 12), (1, 1, 19, 12), (0, 2, TOKENS, 15), (1, 2, 19, 15)]


@pytest.mark.parametrize(
    ("two_shot", "units", "tokens", "lines"),
    [FORMS[0], *(pytest.param(*form, marks=pytest.mark.nightly) for form in FORMS[1:])],
)
def test_what_is_left_out_or_weaker_is_found(
    two_shot: int, units: int, tokens: int, lines: int
) -> None:
    most = 16 if tokens <= 16 else 32
    built = store().get(kernel(2, most, 64 * units, units=units, two_shot=two_shot))
    assert found(built, tokens=tokens) == ""
    less, weak = sites(built), weakened(built)
    assert (len(less), len(weak)) == (lines, WEAK)
    missed = [text for text, other in (*less, *weak) if not found(other, tokens=tokens)]
    assert missed == [PREDECESSOR]


def test_two_calls_have_no_races_and_need_the_wait_for_the_predecessor() -> None:
    built = store().get(kernel(2, 16))
    assert found(built, calls=2) == ""
    assert found(dict(sites(built))[PREDECESSOR], calls=2)


# Stores of the sentinel: a normalised row of the call before, two latent slots, two shared ones,
# a finished row.
_REARM = re.compile(r"^[^\n]*st\.relaxed\.sys\.global\.v4\.b32[^{]*\{(%r\d+),\1,\1,\1\};", re.M)
REARMED = 6


def wrong(built: Built, seed: int | None = None) -> str:
    """What two calls leave behind that they should not; "" for nothing."""
    boxes = mailboxes(config_of(built.variant).box)
    problems = [problem_of(built.variant, TOKENS, call, boxes=boxes) for call in range(2)]
    try:
        run(built, *problems, seed=seed)
        for problem in problems:
            check(problem)
    except (SimulationError, AssertionError) as error:
        return str(error) or "wrong"
    return ""


@pytest.mark.parametrize("site", range(REARMED))
def test_a_slot_that_is_not_armed_again_is_found(site: int) -> None:
    built = store().get(kernel(2, 16))
    places = list(_REARM.finditer(built.ptx))
    assert len(places) == REARMED
    place = places[site]
    ptx = built.ptx[: place.start()] + built.ptx[place.end() :]
    assert wrong(replace(built, ptx=ptx))


def test_a_poll_that_looks_at_one_word_is_found() -> None:
    built = store().get(kernel(2, 16))
    assert wrong(built, seed=1) == ""  # the control
    ptx = re.sub(r"setp\.eq\.or\.u32 p, %r\d+, 0x80000000, p;", "", built.ptx)
    assert ptx != built.ptx
    assert wrong(replace(built, ptx=ptx), seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("two_shot", [0, 1])
@pytest.mark.parametrize("units", [1, 2])
def test_no_form_has_races(two_shot: int, units: int) -> None:
    built = store().get(kernel(2, 32, 64 * units, units=units, two_shot=two_shot))
    config = config_of(built.variant)
    boxes = mailboxes(config.box)
    for m in (32, 3):
        problem = problem_of(built.variant, m, boxes=boxes)
        assert not run(built, problem, races=True).races

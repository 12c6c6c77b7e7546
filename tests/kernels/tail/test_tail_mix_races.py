"""AttnRes in the tail's launch: no data races, and nothing that orders could be left out."""

from __future__ import annotations

import pytest
from mix_runs import mix_problem, mixing
from mix_scaled import Scaled
from tail_runs import store

from k3fuse.kernels.check import Launch, run_sequence
from left_out import sites, weakened

pytest.importorskip("cutlass")

LINES, WEAK = 22, 4
# Of the norm of the latent row, which the last CTAs of a grid compute, not its first cluster:
# `test_tail_races.py` leaves them out.
ELSEWHERE = ["bar.sync \t0;"] * 2


def test_a_first_cluster_has_no_races() -> None:
    assert Scaled(16).found(seeds=()) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("two_shot", [0, 1])
def test_what_is_left_out_or_weaker_is_found(tp: int, two_shot: int) -> None:
    scaled = Scaled(tp, two_shot=two_shot)
    assert scaled.found() == ""
    less, weak = sites(scaled.built), weakened(scaled.built)
    assert (len(less), len(weak)) == (LINES, WEAK)
    assert [text for text, other in (*less, *weak) if not scaled.found(other)] == ELSEWHERE


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("blocks", [0, 8])
def test_a_whole_grid_has_no_races(tp: int, blocks: int) -> None:
    built = store().get(mixing(tp, blocks=blocks))
    launch = mix_problem(built.variant, 8).alone(built.variant, 1)
    assert run_sequence([Launch(built, launch.ranks)], races=True, cache=store()).races == ()

"""The mailbox: all ranks, late and torn delivery, reuse; races; what may not be left out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from route_runs import E, built, kernel, random_logits, run
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.mailbox import PARITIES, ErrorWord
from k3fuse.kernels.router.route_builder import config_of
from k3fuse.kernels.router.route_problem import Problem, make, published, row_words
from k3fuse.kernels.simulator import DeadlockError, SimulationError

pytest.importorskip("cutlass")

FULL = {"quantize": 1, "plan": 1}
LATENT = 3584


def right(problem: Problem) -> None:
    """Everything that came out, on every rank; the mailboxes are armed."""
    assert problem.wrong() == ""
    assert problem.unequal() == ""
    assert problem.disarmed() == ""


@pytest.mark.parametrize(("tp", "m"), [(8, 9), (16, 5)])
def test_all_ranks_at_the_real_shape(tp: int, m: int) -> None:
    variant = kernel(64, {"tp": tp}, **FULL)
    problem = make(variant, m, seed=m, ranks=tp)
    run(problem, variant)
    right(problem)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 16, 33, 64])
def test_all_ranks_at_every_count(tp: int, m: int) -> None:
    variant = kernel(64, {"tp": tp}, **FULL)
    for seed in (None, 1):
        problem = make(variant, m, seed=m, ranks=tp)
        run(problem, variant, seed=seed)
        right(problem)


def test_many_tokens_have_a_plan() -> None:
    """64 tokens that crowd on few experts, too: units of eight, more than one an expert."""
    variant = kernel(64, {"tp": 8}, **FULL)
    config = config_of(variant)
    logits, bias = random_logits(64, 5)
    crowded = bias.clone()
    crowded[torch.arange(E) % 40 == 0] += 3.0
    for chosen in (bias, crowded):
        problem = Problem(config, logits, torch.randn(64, LATENT).bfloat16(), chosen)
        problem.deliver()
        run(problem, variant)
        right(problem)
    assert int(problem.results[0]["plan"][0]) < 300


def test_gather_copies_the_rows_as_they_are() -> None:
    variant = kernel(8, {"k": 0, "tp": 16})
    problem = make(variant, 5, seed=2, ranks=2)
    problem.logits[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    problem.calls, problem.boxes = 1, [box.clone() for box in problem.boxes]
    problem.deliver()
    run(problem, variant)
    assert problem.wrong() == ""


def test_plain_rows_have_the_bits_of_the_mailbox() -> None:
    far = kernel(4, {"tp": 8}, quantize=1)
    near = kernel(4, {"tp": 8}, quantize=1, local_logits=1, local_latent=1)
    one = make(far, 3, seed=4)
    two = Problem(config_of(near), one.logits, one.latent, one.bias)
    for problem, variant in ((one, far), (two, near)):
        run(problem, variant)
        assert problem.wrong() == ""
    for name in ("weights", "ids", "latent_q", "latent_scale"):
        assert torch.equal(one.results[0][name], two.results[0][name])


def awkward_latent() -> Tensor:
    """Blocks of zeros, of subnormals, at 1.75, above it, of the largest, NaN and infinity."""
    rows = torch.randn(5, LATENT, generator=torch.Generator().manual_seed(3))
    rows[0, :32], rows[0, 32:64] = 0.0, -0.0
    rows[0, 64:96] = 1e-39
    rows[0, 96:128] = 1.75 * 2.0**5
    rows[0, 128:160] = 1.7578125 * 2.0**5
    rows[0, 160:192] = 3.3e38
    rows[1] *= 1e-37
    rows[2] *= 1e30
    rows[3, 7], rows[3, 40], rows[3, 70] = float("nan"), float("inf"), -float("inf")
    rows[4] = (rows[4] * 40).round()
    return rows.bfloat16()


def test_the_latent_row_in_mxfp8() -> None:
    variant = kernel(64, {"tp": 8}, **FULL)
    logits, bias = random_logits(5, 6)
    problem = Problem(config_of(variant), logits, awkward_latent(), bias)
    problem.deliver()
    run(problem, variant)
    right(problem)


def test_a_part_of_a_warp_does_not_wait_for_the_rest() -> None:
    """64 columns are eight pieces: lanes 8 to 31 of their warp never come to the shuffles."""
    ptx = built(small()).ptx
    latent = ptx[ptx.rindex("griddepcontrol.launch_dependents") :]
    masks = re.findall(r"shfl\.sync\.\w+\.b32 [^;]*, ([^,;]+);", latent)
    assert len(masks) == 2
    assert all(re.fullmatch(r"%\w+", mask) for mask in masks)
    assert "shl.b32" in latent.partition("shfl.sync")[0]


def test_four_layers_with_changing_counts_use_the_parities_again() -> None:
    variant = kernel(64, {"tp": 8}, **FULL)
    boxes: list[Tensor] = []
    for call, m in enumerate((16, 1, 9, 3, 10)):
        logits, bias = random_logits(m, 20 + call)
        latent = torch.randn(m, LATENT).bfloat16()
        problem = Problem(config_of(variant), logits, latent, bias, 2, boxes=boxes, calls=call)
        boxes = problem.boxes
        assert problem.disarmed() == ""
        problem.deliver()
        run(problem, variant)
        right(problem)
    assert PARITIES == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(seed: int) -> None:
    variant = kernel(64, {"tp": 8}, **FULL)
    problem = make(variant, 9, seed=seed, ranks=2)
    run(problem, variant, seed=seed)
    right(problem)


def test_a_kernel_with_a_timeout_names_token_and_rank() -> None:
    patient = kernel(4, {"tp": 8}, timeout=50)
    for place in (3 * E // 8, E + 3 * LATENT // 16 + 1):
        problem = make(patient, 2, seed=1)
        row = row_words(problem.config, problem.logits, problem.latent).shape[1]
        problem.boxes[0][row + place] = -(2**31)
        run(problem, patient)
        code = int(problem.boxes[0][problem.config.box.error // 4])
        assert ErrorWord.of(code) == ErrorWord(token=1, slot=3)


# Races, and what is left out. ---------------------------------------------------------------------

# Two warps, a mailbox of two ranks, a plan.
SMALL = {"e": 256, "k": 4, "l": 64, "tp": 2}
_SITE = re.compile(r"^[^\n/]*(?:bar\.sync|bar\.warp\.sync)[^\n]*$", re.MULTILINE)


def small() -> Variant:
    return kernel(2, SMALL, quantize=1, plan=1, max_m=2)


def found(made: Variant | Built, slow: bool = False) -> str:
    """What a run reports with the race checker, "" for nothing. slow: nearly all keys are equal."""
    logits, bias = random_logits(2, 9, 256)
    problem = Problem(config_of(small()), logits, torch.randn(2, 64).bfloat16(), bias)
    if slow:
        logits[:], bias[:] = 0.5, 0.0
        logits[:, :9] = float("nan")
    problem.deliver()
    try:
        report = run(problem, made, races=True)
    except SimulationError as error:
        return str(error)
    return "; ".join(str(race) for race in report.races or ())


def test_there_are_no_races() -> None:
    assert found(small()) == ""
    assert found(small(), slow=True) == ""


def sites() -> list[tuple[int, int]]:
    return [(m.start(), m.end()) for m in _SITE.finditer(built(small()).ptx)]


def test_what_is_left_out_is_found() -> None:
    made = built(small())
    missed = []
    for start, end in sites():
        without = replace(made, ptx=made.ptx[:start] + made.ptx[end:])
        if not found(without) and not found(without, slow=True):
            missed.append(made.ptx[start:end].strip())
    assert missed == []
    assert len(sites()) == 13


def test_an_arrival_that_orders_nothing_is_found() -> None:
    made = built(small())
    relaxed = made.ptx.replace("atom.acq_rel.gpu", "atom.relaxed.gpu")
    assert relaxed != made.ptx
    assert "ids" in found(replace(made, ptx=relaxed))


def test_what_is_published_has_no_sentinel() -> None:
    rows = torch.tensor([[-0.0, 0.0, -1.0, float("nan")]])
    assert published(rows).view(torch.int32)[0, :2].tolist() == [0, 0]


# Words that are waited for. -----------------------------------------------------------------------

# Four words of a logits thread, four of a latent thread, of the small kernel's row.
PLACES = [*range(12, 16), *range(256 + 8, 256 + 12)]
_WORD = re.compile(r"setp\.eq(?:\.or)?\.u32 p, (%\w+), 0x80000000(?:, p)?;")


def lost(made: Variant | Built, place: int) -> str:
    """What a run does without one word of the row: "" where it goes on, "waits" where not."""
    problem = make(small(), 1, seed=1)
    problem.boxes[0][place] = -(2**31)
    try:
        run(problem, made)
    except DeadlockError:
        return "waits"
    return ""


@pytest.mark.parametrize("place", PLACES)
def test_every_word_is_waited_for(place: int) -> None:
    """And a poll that does not look at it goes on: three of four words are not enough."""
    made = built(small())
    assert lost(made, place) == "waits"
    terms = list(_WORD.finditer(made.ptx))
    assert len(terms) == 8
    term = terms[PLACES.index(place)]
    # A word that is never missing: the same one with a bit set.
    blind = f"{{ .reg .b32 t; or.b32 t, {term[1]}, 1; " + term[0].replace(term[1], "t") + " }"
    mutant = replace(made, ptx=made.ptx[: term.start()] + blind + made.ptx[term.end() :])
    assert lost(mutant, place) == ""


def test_every_store_that_arms_a_word_is_needed() -> None:
    made = built(small())
    stores = list(re.finditer(r"st\.relaxed\.sys\.global\.v4\.b32 [^;]*;", made.ptx))
    assert len(stores) == 2
    for store in stores:
        problem = make(small(), 2, seed=1)
        run(problem, replace(made, ptx=made.ptx[: store.start()] + made.ptx[store.end() :]))
        assert problem.wrong() == ""
        assert "not armed" in problem.disarmed()

"""All ranks of a group at once: the whole op, layers one after the other, random schedules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exchange import K, alone, check, core, kernel
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import run_sequence
from k3fuse.kernels.common.mailbox import HIDDEN
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.problem import BF16, Problem, disarmed, mailboxes, make
from stored import store

pytest.importorskip("cutlass")

# Upstream's warp-instructions a rank, without moves and parameter loads, at 8 blocks: TP, M -> all
# launches of the op. Source: its kernels, unmodified, run in a simulator (docs page).
UPSTREAM = {
    (16, 1): 271_950, (16, 2): 321_468, (16, 4): 392_616, (16, 8): 542_752,
    (8, 1): 462_301, (8, 2): 521_402, (8, 4): 597_715, (8, 8): 720_552,
    (16, 16): 839_664, (16, 32): 1_068_112, (16, 64): 1_940_560,
    (8, 16): 1_060_752, (8, 32): 1_510_432, (8, 64): 2_133_424,
}  # fmt: skip
BYTES = {1: 1.05, 2: 1.15, 4: 1.15, 8: 1.15}


def stages(tp: int, m: int, max_m: int, **tuning: int) -> list[Variant]:
    """The kernels that serve m tokens."""
    if m <= 8:
        tuning.pop("two_shot", None)
        return [kernel(FUSED, tp, min(8, max_m), max_m=max_m, **tuning)]
    return [kernel(stage, tp, m, max_m=max_m, **tuning) for stage in (PRODUCER, CONSUMER)]


def figures(tp: int, m: int, reports: tuple[object, ...]) -> tuple[int, int, int]:
    """Instructions a rank, and bytes read and needed by all, of a fair run; polls count once."""
    instructions = sum(core(report) for report in reports)
    assert instructions <= UPSTREAM[tp, m]
    requested = distinct = 0
    for report in reports:
        for (_, name, _, way), part in report.traffic.items():  # type: ignore[attr-defined]
            if way == "read":
                # A poll that finds nothing is repeated: how often, is the schedule's affair.
                requested += part.distinct if name == "mailbox" else part.requested
                distinct += part.distinct
    assert requested / distinct <= BYTES.get(m, 1.25)
    return int(instructions), requested // tp, distinct // tp


def run(
    tp: int, m: int, seed: int | None = None, **tuning: int
) -> tuple[Problem, tuple[object, ...]]:
    variants = stages(tp, m, max(m, 8), **tuning)
    problem = make(config_of(variants[-1]), m, seed=m)
    report = run_sequence([problem.launch(v) for v in variants], seed=seed, cache=store())
    check(problem)
    return problem, report.reports


def test_all_ranks_of_a_fused_step() -> None:
    problem, reports = run(16, 2)
    figures(16, 2, reports)
    # The check can fail: one rank's partial left out, another token's rows, a hundredth too much.
    for wrong in (
        [row.roll(1, 0) for row in problem.out],
        [(row.float() * 1.01).to(BF16) for row in problem.out],
    ):
        kept, problem.out = problem.out, wrong
        with pytest.raises(AssertionError):
            check(problem)
        problem.out = kept
    problem.weight[7] = torch.zeros_like(problem.weight[7])
    with pytest.raises(AssertionError):
        check(problem)


def layers(tp: int, counts: tuple[int, ...], max_m: int, **tuning: int) -> list[Problem]:
    """One rank through layers of changing M on one mailbox, its peers' partials delivered."""
    layout = config_of(stages(tp, 1, max_m)[0]).box
    boxes = mailboxes(layout, tp)
    done = []
    for call, m in enumerate(counts):
        variants = stages(tp, m, max_m, **tuning)
        problem = make(config_of(variants[-1]), m, seed=call, boxes=boxes)
        partials = problem.partials()
        alone(problem, 2, dict(enumerate(partials)), stages=variants, call=call)
        assert disarmed(layout, [boxes[2]]) == ""
        assert boxes[2][layout.control // 4 :][:112].tolist() == [call + 1] * 112
        done.append(problem)
        # What the rank sent to the others stays there; nobody reads it in this run.
        for rank, box in enumerate(boxes):
            if rank != 2:
                box[: layout.data // 4] = boxes[2][: layout.data // 4]
    return done


def test_layers_of_changing_batches_on_one_mailbox() -> None:
    for problem in layers(8, (16, 1, 16, 7), 16):
        out, new_prefix = problem.expected()
        for got, wanted in ((problem.out[2], out), (problem.new_prefix[2], new_prefix)):
            assert got.shape == wanted.shape
            error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            assert error < 2**-6


def test_a_rank_that_is_late_at_every_kernel_boundary() -> None:
    variants = [kernel(stage, 8, 1) for stage in (PRODUCER, CONSUMER)]
    boxes = mailboxes(config_of(variants[0]).box, 8)
    problems = [make(config_of(variants[1]), 1, seed=layer, boxes=boxes) for layer in range(2)]
    launches = [problem.launch(v) for problem in problems for v in variants]
    delay = {(rank, rank): 40 for rank in range(4)}
    report = run_sequence(launches, cache=store(), delay=delay)
    for problem in problems:
        check(problem)
    ended = {r: report.sim.timeline[r, 3][1] for r in range(8)}
    started = {r: report.sim.timeline[r, r][0] for r in range(4)}
    assert all(start >= 40 for start in started.values())
    # Rank 3 is late at its last kernel alone, when the others have all that they need from it.
    assert ended[3] > max(ended[r] for r in range(4, 8))


# The whole op on all ranks. Above M = 8 the stages share nothing but the mailbox, so every batch
# of a producer, with either back-end, is in test_projection.py, and every batch of a consumer,
# one-shot and two-shot, with either back-end, in test_consumer.py; here they meet.
@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize(
    ("m", "multicast"),
    [(m, c) for m in (1, 2, 3, 4, 5, 7, 8) for c in (1, 0)] + [(15, 0), (16, 1), (32, 1), (64, 1)],
)
def test_every_batch(tp: int, m: int, multicast: int) -> None:
    two_shot = int(m >= (33 if tp == 8 else 17))
    _, reports = run(tp, m, multicast=multicast, two_shot=two_shot)
    if (tp, m) in UPSTREAM and multicast:
        print(f"TP{tp}, M = {m}: instructions, bytes read and needed", figures(tp, m, reports))


# Forms differ in the consumer, which the fused kernel has inside; test_consumer.py has the rest.
# What a form does with the row knows neither ranks nor back-end: these take turns.
@pytest.mark.nightly
@pytest.mark.parametrize("blocks", [-1, 0, 1, 4, 8])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("rounded", [0, 1])
def test_every_form(blocks: int, prefix: int, rounded: int) -> None:
    # add + RMSNorm always has a residual, and a second rounding in its place.
    tuning = {"round_before": prefix, "prefix": 1} if blocks < 0 else {"prefix": prefix}
    tp, multicast = 8 if (blocks + rounded) % 2 else 16, (blocks + prefix) % 2
    run(tp, 2, blocks=blocks, round_mix=rounded, multicast=multicast, **tuning)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize(
    ("m", "seed"), [*((1, s) for s in (1, 2, 3, 4, 5)), (8, 1), (8, 2), (10, 1), (10, 2)]
)
def test_random_schedules(tp: int, m: int, seed: int) -> None:
    run(tp, m, seed=seed, two_shot=int(m > 8), multicast=seed % 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("tp", "seed"), [(8, 1), (16, None)])
def test_layers_of_all_ranks(tp: int, seed: int | None) -> None:
    layout = config_of(stages(tp, 64, 64)[0]).box
    boxes = mailboxes(layout, tp)
    problems, launches = [], []
    for layer, m in enumerate((64, 1, 64, 7)):
        variants = stages(tp, m, 64, two_shot=layer // 2)
        problem = make(config_of(variants[-1]), m, seed=layer, boxes=boxes)
        problems.append(problem)
        launches += [problem.launch(v) for v in variants]
    run_sequence(launches, seed=seed, cache=store())
    for problem in problems:
        check(problem)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
def test_order_shows_through_the_projection(tp: int) -> None:
    variants = stages(tp, 1, 8, blocks=0, prefix=0)
    problem = make(config_of(variants[0]), 1)
    big: list[float] = [2.0**24, 1.0, -(2.0**24)]
    for rank in range(tp):
        problem.x[rank] = torch.zeros(1, K[tp], dtype=BF16)
        problem.x[rank][0, 0] = big[rank] if rank < 3 else 0.0
        problem.weight[rank] = torch.zeros(HIDDEN, K[tp], dtype=BF16)
        problem.weight[rank][:, 0] = 1.0
    run_sequence([problem.launch(v) for v in variants], cache=store())
    rows: list[Tensor] = problem.new_prefix
    assert all((row == 0).all() for row in rows)

"""All ranks at real sizes, figures, and the protocol: layers, delays, lost ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tail_runs import alone, check, core, kernel, problem_of, real, run, same

from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.simulator import DeadlockError
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.problem import Problem, disarmed, mailboxes

pytest.importorskip("cutlass")

# Upstream's warp-instructions a rank, without moves and parameter loads, its push of the shared
# partials included: TP, M -> count. Source: its kernels, unmodified, run in a simulator (page).
UPSTREAM = {
    (8, 1): 505_521, (8, 2): 815_024, (8, 4): 1_630_832, (8, 8): 667_696, (8, 16): 539_416,
    (8, 32): 810_592, (8, 64): 1_414_832, (16, 1): 322_281, (16, 2): 576_801, (16, 4): 1_097_992,
    (16, 8): 2_195_984, (16, 16): 568_228, (16, 32): 853_432, (16, 64): 1_196_720,
}  # fmt: skip
BYTES = {1: 1.15, 2: 1.15, 4: 1.15, 8: 1.15}


def figures(tp: int, m: int) -> None:
    """Instructions and bytes of one rank where no poll is repeated."""
    variant = real(tp, m)
    problem = problem_of(variant, m)
    report = alone(variant, problem, 1)
    assert core(report) <= UPSTREAM[tp, m]
    requested = distinct = 0
    for (_, name, _, way), part in report.traffic.items():
        if way == "read":
            requested += part.requested
            distinct += part.distinct
            if name == "weight":
                assert part.requested == part.distinct == problem.config.rows * 3584 * 2
    assert requested / distinct <= BYTES.get(m, 1.4)
    assert problem.disarmed() == "" or "rank 0" in problem.disarmed()


@pytest.mark.parametrize(("tp", "m"), [(8, 8), (16, 1), (8, 16)])
def test_figures(tp: int, m: int) -> None:
    figures(tp, m)


@pytest.mark.nightly
@pytest.mark.parametrize(("tp", "m"), UPSTREAM)
def test_all_figures(tp: int, m: int) -> None:
    figures(tp, m)


@pytest.mark.parametrize(("tp", "m"), [(16, 2), (8, 9)])
def test_all_ranks_at_real_sizes(tp: int, m: int) -> None:
    variant = real(tp, m)
    problem = problem_of(variant, m, seed=m)
    run(variant, problem)
    check(problem)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("multicast", [0, 1])
def test_every_batch(tp: int, m: int, multicast: int) -> None:
    found = []
    for two_shot in (0, 1):
        variant = real(tp, m, multicast=multicast, two_shot=two_shot)
        problem = problem_of(variant, m, seed=m)
        run(variant, problem)
        check(problem)
        found.append(problem)
    assert same(found[0].out[0], found[1].out[0])


def layers(
    tp: int, counts: tuple[int, ...], most: int, seed: int | None, **tuning: int
) -> list[Problem]:
    """Calls of changing M, alternately one-shot and two-shot, on one set of mailboxes."""
    variants = [kernel(tp, most, two_shot=form, **tuning) for form in (0, 1)]
    boxes = mailboxes(config_of(variants[0]).box)
    problems = []
    for layer, m in enumerate(counts):
        variant = variants[layer // 2 % 2]
        problem = problem_of(variant, m, seed=layer, boxes=boxes)
        run(variant, problem, seed=seed)
        check(problem)
        problems.append(problem)
    return problems


def test_layers_of_changing_batches_on_one_mailbox() -> None:
    layers(2, (9, 1, 16, 7), 16, seed=5)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_layers_of_all_ranks(tp: int, seed: int | None) -> None:
    layers(tp, (64, 1, 33, 7), 64, seed)


def test_calls_of_one_stream_with_ranks_that_are_late() -> None:
    """Four calls in a row, overlapping as PDL lets them; a rank is late at each boundary."""
    variant = kernel(4, 8, max_m=16)
    boxes = mailboxes(config_of(variant).box)
    problems = [
        problem_of(variant, m, seed=layer, boxes=boxes) for layer, m in enumerate((3, 1, 8, 2))
    ]
    delay = {(rank, rank): 40 for rank in range(4)}
    report = run(variant, *problems, delay=delay)
    for problem in problems:
        check(problem)  # the mailboxes are those after the last call
    started = {r: report.sim.timeline[r, r][0] for r in range(4)}
    assert all(start >= 40 for start in started.values())


@pytest.mark.nightly
@pytest.mark.parametrize("two_shot", [0, 1])
@pytest.mark.parametrize("seed", range(1, 9))
def test_random_schedules_of_calls_in_one_stream(two_shot: int, seed: int) -> None:
    variant = kernel(4, 16, two_shot=two_shot)
    boxes = mailboxes(config_of(variant).box)
    problems = [
        problem_of(variant, m, seed=layer, boxes=boxes) for layer, m in enumerate((9, 1, 16, 2))
    ]
    run(variant, *problems, seed=seed)
    for problem in problems:
        check(problem)


def test_a_good_call_after_an_aborted_one() -> None:
    variant = kernel(2, 8, timeout=60)
    layout = config_of(variant).box
    boxes = mailboxes(layout)
    aborted = problem_of(variant, 1, seed=1, boxes=boxes)
    run(variant, aborted, skip={(1, 0)})
    found = ErrorWord.of(int(boxes[0][layout.error // 4]))
    assert found is not None
    assert ErrorWord.of(int(boxes[1][layout.error // 4])) is None
    assert disarmed(layout, boxes[1:]) != ""  # what the dead rank was sent
    for box, fresh in zip(boxes, mailboxes(layout), strict=True):
        box.copy_(fresh)  # what `Workspace.reset` does
    good = problem_of(variant, 2, seed=2, boxes=boxes)
    run(variant, good)
    check(good)


@pytest.mark.parametrize(
    ("region", "slot"),
    [("latent_at", 1), ("shared_at", ErrorWord.SHARED + 1)],
)
def test_what_is_missing_is_named(region: str, slot: int) -> None:
    """One rank alone: a time-out says which partial did not come."""
    variant = kernel(2, 8, timeout=60)
    problem = problem_of(variant, 2)
    layout = problem.config.box
    problem.deliver(0)
    # Rank 1's partial of token 1, or its first columns.
    start = getattr(layout, region)(0, 1, 1) // 4
    problem.boxes[0][start : start + 4] = mailboxes(layout)[0][:4]
    values: dict[str, Any] = dict(problem.values(0))
    found = _alone_without(variant, problem, values)
    assert found == ErrorWord(1, slot)
    assert f"token 1: the {'shared expert' if slot > 63 else 'partial'}" in found.sentence()


def _alone_without(variant: Any, problem: Problem, values: dict[str, Any]) -> ErrorWord:
    from tail_runs import store

    from k3fuse.kernels.check import Launch, run_sequence
    from k3fuse.kernels.simulator import Multicast
    from k3fuse.kernels.tail.builder import BUILDER

    values |= {"mailbox": problem.boxes[0], "multicast": Multicast((problem.boxes[0],))}
    values |= {f"mailbox{i}": box for i, box in enumerate(problem.boxes)}
    names = [parameter.name for parameter in BUILDER.plan(variant).parameters]
    run_sequence([Launch(variant, [{n: values[n] for n in names}])], cache=store())
    found = ErrorWord.of(int(problem.boxes[0][problem.config.box.error // 4]))
    assert found is not None
    return found


@pytest.mark.nightly
def test_a_lost_rank_without_a_time_out_never_ends() -> None:
    variant = kernel(2, 8)
    problem = problem_of(variant, 1)
    with pytest.raises(DeadlockError, match="mailbox"):
        run(variant, problem, skip={(1, 0)})


def test_fewer_tokens_than_the_kernel_is_for_leave_the_rest_alone() -> None:
    variant = kernel(4, 8, max_m=16)
    problem = problem_of(variant, 3)
    before = [box.clone() for box in problem.boxes]
    run(variant, problem)
    check(problem)
    layout = problem.config.box
    start = layout.normed_at(0) // 4
    for box, old in zip(problem.boxes, before, strict=True):
        changed = (box != old).nonzero().flatten()
        data = changed[changed < layout.data // 4]
        assert ((data >= start) & (data < start + 3 * layout.latent_row // 4)).all()
        assert int(torch.unique(box[layout.control // 4 : layout.error // 4]).numel()) == 2

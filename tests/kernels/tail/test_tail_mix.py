"""AttnRes in the tail's launch: the bits of both kernels apart, at real sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mix_runs import HIDDEN, alone, check_mix, mix_problem, mixing, plain_of
from tail_runs import alone as one_rank
from tail_runs import check, core, kernel, problem_of, run, same, store

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import compile_variant
from k3fuse.kernels.check import run_sequence
from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.simulator import DeadlockError
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.mix_problem import MixProblem
from k3fuse.kernels.tail.problem import ARMED, BF16, Problem, mailboxes

pytest.importorskip("cutlass")

NIGHTLY = pytest.mark.nightly


def all_ranks(tp: int, m: int, blocks: int, **tuning: int) -> None:
    """Every rank: delta is the tail's, mixed rows and prefix are AttnRes's of that delta."""
    variant = mixing(tp, blocks=blocks, **tuning)
    problem = mix_problem(variant, m, seed=m + blocks)
    run(variant, problem)
    check(problem)
    check_mix(problem)
    assert same(plain_of(problem).out[0], problem.out[0])


@NIGHTLY
@pytest.mark.parametrize(("tp", "m"), [(8, 1), (8, 2), (8, 8), (16, 1), (16, 8)])
@pytest.mark.parametrize("blocks", [0, 1, 8])
def test_all_ranks_have_the_bits_of_both_kernels_apart(tp: int, m: int, blocks: int) -> None:
    all_ranks(tp, m, blocks)


@NIGHTLY
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize(
    "tuning",
    [
        {"multicast": 0}, {"two_shot": 1}, {"two_shot": 1, "multicast": 0}, {"packed": 0},
        {"norm": 0}, {"round_mix": 1},
    ],
)  # fmt: skip
def test_every_form(tp: int, tuning: dict[str, int]) -> None:
    all_ranks(tp, 3, 4, **tuning)


def one(variant: Any, problem: MixProblem, rank: int = 1) -> None:
    """One rank with all that it waits for delivered, against the kernels apart."""
    one_rank(variant, problem, rank)
    check_mix(problem, rank)
    assert torch.isfinite(problem.mixed[rank][-1]).all()


@NIGHTLY
@pytest.mark.parametrize("blocks", [0, 1, 8])
def test_a_cluster_with_two_tokens(blocks: int) -> None:
    """TP16 has seven clusters: the first one has the first and the last of eight tokens."""
    variant = mixing(16, blocks=blocks)
    assert config_of(variant).mix_groups == 2
    one(variant, mix_problem(variant, 8, seed=4))


@NIGHTLY
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("blocks", range(9))
def test_every_number_of_blocks(tp: int, blocks: int) -> None:
    variant = mixing(tp, blocks=blocks)
    for m in (1, 2, 7, 8):
        one(variant, mix_problem(variant, m, seed=m))


@NIGHTLY
@pytest.mark.parametrize("tp", [8, 16])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(tp: int) -> None:
    variant = mixing(tp)
    batch = mix_problem(variant, 8, seed=1)
    run(variant, batch)
    for token in (0, 5, 7):
        lone, rows = mix_problem(variant, 1, seed=1), slice(token, token + 1)
        lone.routed = [row[rows] for row in batch.routed]
        lone.shared = [row[rows] for row in batch.shared]
        lone.norms, lone.weights = batch.norms, batch.weights
        given, sources = batch.sources, lone.sources
        sources.prefix, sources.blocks = given.prefix[rows], [b[rows] for b in given.blocks]
        sources.score_norm, sources.score_proj = given.score_norm, given.score_proj
        sources.out_norm = given.out_norm
        run(variant, lone)
        for name in ("out", "mixed", "new_prefix"):
            assert same(getattr(lone, name)[0][0], getattr(batch, name)[0][token]), name


def test_nans_stay_in_their_token() -> None:
    variant = mixing(16)
    clean, problem = (mix_problem(variant, 8, seed=2) for _ in range(2))
    one_rank(variant, clean, 1)
    # Token 7 shares a cluster with token 0: NaN in its delta, its prefix, a block.
    problem.routed[3][0, 5] = float("nan")
    problem.sources.prefix[1, 700] = float("nan")
    problem.sources.blocks[7][2, 7000] = float("nan")
    problem.sources.blocks[0][3, 0] = float("inf")
    one_rank(variant, problem, 1)
    check_mix(problem, 1)
    mixed, wanted = problem.mixed[1], clean.mixed[1]
    assert mixed[:4].isnan().all()
    assert wanted.isfinite().all()
    assert problem.out[1][0].isnan().all()
    assert same(problem.out[1][1:], clean.out[1][1:])
    assert same(mixed[4:], wanted[4:])
    assert same(problem.new_prefix[1][2:], clean.new_prefix[1][2:])
    assert int(problem.new_prefix[1][1].isnan().sum()) == 1


@NIGHTLY
@pytest.mark.parametrize("wrong", ["block dropped", "old prefix", "delta left out"])
def test_a_wrong_kernel_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3fuse.kernels.common.device.stream import Stream
    from k3fuse.kernels.tail import mix_device

    class Wrong(Stream):
        def load(self) -> None:
            super().load()
            if wrong == "block dropped":
                self.blocks[-1] = self.blocks[0]

        def finish(self, row: Any, reduced: list[Any], store_row: bool = True) -> None:
            if wrong == "old prefix":
                # Stored before it is added to: what the caller reads as the new one is the old one.
                super().finish(row, reduced, store_row=False)
            elif wrong == "delta left out":
                super().finish(row, [word & 0 for word in reduced], store_row)
            else:
                super().finish(row, reduced, store_row)

    variant = mixing(16)
    problem = mix_problem(variant, 2)
    one(variant, problem)  # the control
    monkeypatch.setattr(mix_device, "Stream", Wrong)
    built = compile_variant(variant)
    assert built.ptx != store().get(variant).ptx
    problem = mix_problem(variant, 2)
    launch = problem.alone(variant, 1)
    run_sequence([type(launch)(built, launch.ranks)], cache=store())
    name = "new_prefix" if wrong == "old prefix" else "mixed"
    with pytest.raises(AssertionError, match=name):
        check_mix(problem, 1)


def calls(tp: int, counts: tuple[int, ...], **options: Any) -> None:
    """Calls with and without AttnRes in turn, in one stream on one set of mailboxes."""
    units = 2 if tp < 8 else 1
    with_, without = mixing(tp, units=units), kernel(tp, 8, HIDDEN // tp, units=units)
    boxes = mailboxes(config_of(with_).box)
    launches: list[Any] = []
    problems: list[Problem] = []
    for call, m in enumerate(counts):
        if call % 2:
            problem: Problem = problem_of(without, m, seed=call, boxes=boxes)
        else:
            problem = mix_problem(with_, m, seed=call, boxes=boxes)
        problems.append(problem)
        launches.append(problem.launch(without if call % 2 else with_))
    run_sequence(launches, cache=store(), **options)
    for problem in problems:
        check(problem)  # the mailboxes are those after the last call
        if isinstance(problem, MixProblem):
            check_mix(problem)


@NIGHTLY
@pytest.mark.parametrize("tp", [4, 8, 16])
def test_calls_of_both_forms_with_ranks_that_are_late(tp: int) -> None:
    calls(tp, (8, 1, 2, 5, 1), delay={(rank, rank % 5): 40 for rank in range(tp)})


@NIGHTLY
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_schedules_of_calls_of_both_forms(seed: int) -> None:
    calls(4, (3, 8, 1), seed=seed)


@NIGHTLY
@pytest.mark.parametrize(("tp", "m"), [(8, 1), (8, 8), (16, 1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedules_of_all_ranks(tp: int, m: int, seed: int) -> None:
    variant = mixing(tp)
    problem = mix_problem(variant, m, seed=seed)
    run(variant, problem, seed=seed)
    check(problem)
    check_mix(problem)


@NIGHTLY
def test_a_row_that_does_not_come_is_named() -> None:
    variant = mixing(8, blocks=1, timeout=60)
    problem = mix_problem(variant, 2)
    layout = problem.config.box
    launch = problem.alone(variant, 0)
    start = layout.row_at(0, 1) // 4 + HIDDEN // 4  # of another rank's columns
    problem.boxes[0][start : start + 4] = ARMED
    run_sequence([launch], cache=store())
    found = ErrorWord.of(int(problem.boxes[0][layout.error // 4]))
    assert found == ErrorWord(1, ErrorWord.GATHER)
    check_mix(problem)  # what came is mixed all the same


@NIGHTLY
def test_a_lost_rank_without_a_time_out_never_ends() -> None:
    variant = mixing(4, units=2)
    with pytest.raises(DeadlockError, match="mailbox"):
        run(variant, mix_problem(variant, 1), skip={(1, 0)})


def figures(tp: int, m: int) -> dict[str, tuple[int, int]]:
    """Bytes requested and warp-instructions of a rank: "fused", "tail", "attn_res"."""
    with_ = mixing(tp)
    fused = one_rank(with_, mix_problem(with_, m), 1)
    without = kernel(tp, 8, HIDDEN // tp)
    tail = one_rank(without, problem_of(without, m), 1)
    made = step(ATTN_RES.variant("sm_103a", {"m": 1 if m == 1 else 8, "blocks": 8}, {}), 1, m)
    (apart,) = run_sequence(made.launches, cache=store()).reports
    reports = {"fused": fused, "tail": tail, "attn_res": apart}
    return {name: (report.bytes_requested, core(report)) for name, report in reports.items()}


@NIGHTLY
@pytest.mark.parametrize(("tp", "m"), [(8, 1), (8, 8), (16, 1), (16, 8)])
def test_figures(tp: int, m: int) -> None:
    found = figures(tp, m)
    fused, apart = found["fused"], [a + b for a, b in zip(found["tail"], found["attn_res"])]  # noqa: B905
    # The finished row is stored, and not read again. A token has weight vectors of its own, two of
    # AttnRes alone share them.
    vectors = 0 if m == 1 else 3 * 2 * HIDDEN * m // 2
    assert fused[0] == apart[0] - m * 2 * HIDDEN + vectors
    assert fused[1] < apart[1]


@NIGHTLY
def test_few_tokens_leave_the_rest_alone() -> None:
    """Rows beyond the last token are not written; the eighth CTA of a cluster mixes nothing."""
    variant = mixing(8, blocks=1)
    problem = mix_problem(variant, 2)
    for rows in (problem.mixed, problem.new_prefix, problem.out):
        rows[1] = torch.empty(3, HIDDEN, dtype=BF16)
    one_rank(variant, problem, 1)
    for rows in (problem.mixed, problem.new_prefix, problem.out):
        assert rows[1][2].isnan().all()  # as fresh memory is in the simulator
        assert rows[1][:2].isfinite().all()
    mixed, _ = alone(problem, problem.out[1][:2])
    assert same(problem.mixed[1][:2], mixed)

"""The exchange and the residual, with any bits delivered: sums, forms, both ways of exchange."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exchange import check, consume, consumer_problem, kernel, reduced, same
from k3fuse.kernels.check import run_sequence
from k3fuse.kernels.common.mailbox import HIDDEN, SENTINEL, ErrorWord
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, PRODUCER
from k3fuse.kernels.output_projection.problem import BF16, Problem, disarmed, mailboxes, make
from k3fuse.kernels.simulator import DeadlockError
from stored import store

pytest.importorskip("cutlass")

ADD = {"blocks": -1, "round_mix": 0, "round_before": 0}
FORMS = {
    "delta over 8 blocks": {"blocks": 8},
    "delta over 4 blocks": {"blocks": 4},
    "delta over 1 block": {"blocks": 1},
    "delta without blocks": {"blocks": 0},
    "block write, 7 blocks": {"blocks": 7, "prefix": 0},
    "block write, no blocks": {"blocks": 0, "prefix": 0},
    "final": {"blocks": 8, "round_mix": 1},
    "mix alone": {"blocks": 3, "norm": 0},
    "add + RMSNorm": ADD,
    "add + RMSNorm, sum rounded": {**ADD, "round_mix": 1},
    "add + RMSNorm, rounded before": {**ADD, "round_before": 1},
    "add + RMSNorm, both": {**ADD, "round_mix": 1, "round_before": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str) -> None:
    tp = 8 if len(form) % 2 else 16
    variant, problem = consumer_problem(tp, 2, **FORMS[form])
    partials = problem.random_partials(1)
    consume(variant, problem, partials)
    check(problem, partials)


MIXES = {
    "delta": {}, "block write": {"prefix": 0}, "final": {"round_mix": 1}, "mix alone": {"norm": 0},
    "final block write": {"prefix": 0, "round_mix": 1},
}  # fmt: skip
# Exchanges of sums take 1, 2 or 4 quads: up to 2, 4 and 8 blocks.
EVERYWHERE = [{**mix, "blocks": nb} for mix in MIXES.values() for nb in (0, 1, 2, 3, 4, 5, 8)]
EVERYWHERE += [form for name, form in FORMS.items() if "add" in name]


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("form", EVERYWHERE, ids=str)
def test_every_form_everywhere(form: dict[str, int], tp: int) -> None:
    # What follows the exchange does not know how the row came: one-shot and two-shot take turns.
    two_shot = EVERYWHERE.index(form) % 2
    variant, problem = consumer_problem(tp, 2, two_shot=two_shot, **form)
    partials = problem.random_partials(form["blocks"] + 1)
    consume(variant, problem, partials)
    check(problem, partials)


# A one-shot consumer publishes nothing, so the back-end makes no difference to it.
@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64])
def test_every_batch(tp: int, m: int) -> None:
    found = []
    for two_shot, multicast in ((0, 1), (1, 1), (1, 0)):
        tuning = {"two_shot": two_shot, "multicast": multicast}
        variant, problem = consumer_problem(tp, m, blocks=1, **tuning)
        partials = problem.random_partials(m)
        consume(variant, problem, partials)
        check(problem, partials)
        found.append(problem)
    for other in found[1:]:
        assert same(found[0].out[0], other.out[0])
        assert same(found[0].new_prefix[0], other.new_prefix[0])


@pytest.mark.parametrize(
    ("tp", "multicast"),
    [
        (8, 0),
        pytest.param(8, 1, marks=pytest.mark.nightly),
        pytest.param(16, 0, marks=pytest.mark.nightly),
        (16, 1),
    ],
)
def test_two_shot_gives_the_bits_of_one_shot(tp: int, multicast: int) -> None:
    found = []
    for two_shot in (0, 1):
        variant, problem = consumer_problem(tp, 2, two_shot=two_shot, multicast=multicast)
        partials = problem.random_partials(3)
        consume(variant, problem, partials)
        check(problem, partials)
        found.append(problem)
    for name in ("out", "new_prefix"):
        assert same(getattr(found[0], name)[0], getattr(found[1], name)[0])


def test_a_token_alone_has_the_bits_it_has_in_a_batch() -> None:
    variant, batch = consumer_problem(8, 5, seed=4)
    partials = batch.random_partials(5)
    consume(variant, batch, partials)
    for token in (0, 4):
        variant, one = consumer_problem(8, 1, seed=4)
        rows = slice(token, token + 1)
        single = Problem(
            one.config, 1, [], [], batch.prefix[rows], [b[rows] for b in batch.blocks],
            batch.score_norm, batch.score_proj, batch.out_norm, one.boxes,
        )  # fmt: skip
        consume(variant, single, [p[rows] for p in partials])
        assert same(single.out[0], batch.out[0][rows])
        assert same(single.new_prefix[0], batch.new_prefix[0][rows])


@pytest.mark.parametrize("form", ["delta over 4 blocks", "final", "add + RMSNorm, both"])
def test_scalar_arithmetic_has_the_bits_of_packed(form: str) -> None:
    found = []
    for packed in (0, 1):
        variant, problem = consumer_problem(8, 1, packed=packed, **FORMS[form])
        consume(variant, problem, problem.random_partials(8))
        found.append(problem)
    assert same(found[0].out[0], found[1].out[0])
    assert same(found[0].new_prefix[0], found[1].new_prefix[0])


def rows_of(tp: int, *values: float) -> list[Tensor]:
    """Partials of one token: rank r has values[r] in all columns, the rest 0."""
    padded = [*values, *([0.0] * (tp - len(values)))]
    return [torch.full((1, HIDDEN), value, dtype=BF16) for value in padded]


BIG = 2.0**24


@pytest.mark.parametrize(
    ("values", "total"),
    [
        # 2^24 + 1 is 2^24 in FP32: the 1 survives only where the large terms have met before it.
        ((BIG, 1.0, -BIG), 0.0),
        ((BIG, -BIG, 1.0), 1.0),
        ((1.0, BIG, -BIG), 0.0),
        ((-BIG, BIG, 1.0, BIG, 1.0, -BIG), 0.0),
    ],
)
@pytest.mark.parametrize("two_shot", [0, 1])
def test_ranks_are_added_in_order(values: tuple[float, ...], total: float, two_shot: int) -> None:
    variant, problem = consumer_problem(8, 1, blocks=0, prefix=0, two_shot=two_shot)
    partials = rows_of(8, *values)
    consume(variant, problem, partials)
    assert (problem.new_prefix[0] == total).all()
    check(problem, partials)


def special_partials(tp: int) -> list[Tensor]:
    """Random partials of two tokens with what sentinels and zeros could trip over."""
    generator = torch.Generator().manual_seed(11)
    words = [
        torch.randn(2, HIDDEN, generator=generator).to(BF16).view(torch.int32) for _ in range(tp)
    ]
    # Words around the sentinel, NaNs of all signs and payloads, infinities, subnormals, -0.0.
    odd = [
        0x80000001, 0x80008000, 0x00008000, 0x8000FFFF, 0xFFFF8000, 0xFF808000, 0x7F808000,
        0x7FC08000, 0xFFC0FFC0, 0x7F817F81, 0xFFFFFFFF, 0x7FFF7FFF, 0x00010001, 0x80018001,
        0xFF800000, 0x7F80FF80,
    ]  # fmt: skip
    signed = torch.tensor([w - (1 << 32) if w >> 31 else w for w in odd], dtype=torch.int32)
    assert SENTINEL not in odd
    for place in range(tp):
        # One rank at a time, so that a NaN stands beside ordinary values.
        words[place][0, place * len(odd) : (place + 1) * len(odd)] = signed
    return [w.view(BF16) for w in words]


@pytest.mark.parametrize(("tp", "two_shot"), [(8, 1), (16, 0)])
def test_special_values_arrive(tp: int, two_shot: int) -> None:
    variant, problem = consumer_problem(tp, 2, blocks=1, prefix=0, two_shot=two_shot)
    partials = special_partials(tp)
    consume(variant, problem, partials)
    assert problem.disarmed() == ""
    wanted = reduced(partials)
    for rank in range(tp):
        got = problem.new_prefix[rank]
        assert same(torch.where(got == 0, 0, got), torch.where(wanted == 0, 0, wanted))
    assert wanted.isnan().any()
    assert wanted.isinf().any()
    # A NaN spoils its own token alone.
    assert problem.out[0][0].isnan().all()
    clean, _ = problem.expected(partials)
    assert torch.allclose(problem.out[0][1].float(), clean[1].float(), rtol=2e-2, atol=2e-2)


def test_a_mix_that_cancels_is_normalised_like_any_other() -> None:
    variant, problem = consumer_problem(8, 1, blocks=1, prefix=0)
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(1, HIDDEN, generator=generator).to(BF16)
    # Equal scores (0), so the mix is half of block + row: a last bit here and there is left.
    problem.score_proj.zero_()
    odd = torch.arange(HIDDEN) % 7 == 0
    block = torch.where(odd, -row * (1 + 2**-7), -row).to(BF16)
    exact = Problem(
        problem.config, 1, [], [], problem.prefix, [block], problem.score_norm,
        problem.score_proj, problem.out_norm, problem.boxes,
    )  # fmt: skip
    partials = [row, *[torch.zeros_like(row)] * 7]
    consume(variant, exact, partials)
    check(exact, partials)
    assert exact.out[0].abs().max() > 1


@pytest.mark.parametrize("two_shot", [0, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_late_and_torn_delivery(two_shot: int, seed: int) -> None:
    variant, problem = consumer_problem(8, 1, two_shot=two_shot)
    partials = problem.random_partials(seed)
    consume(variant, problem, partials, seed=seed)
    check(problem, partials)


def test_a_missing_partial_is_an_error_word_with_a_time_out() -> None:
    variant, problem = consumer_problem(8, 2, timeout=3)
    partials = problem.random_partials(1)
    problem.deliver({rank: p for rank, p in enumerate(partials) if rank != 5})
    run_sequence([problem.launch(variant)], cache=store())
    layout = problem.config.box
    for box in problem.boxes:
        found = ErrorWord.of(int(box[layout.error // 4]))
        assert found is not None
        assert found.slot == 5
        assert found.token in (0, 1)


def test_a_good_step_after_an_aborted_one() -> None:
    variants = [kernel(stage, 8, 1, timeout=80) for stage in (PRODUCER, CONSUMER)]
    layout = config_of(variants[0]).box
    boxes = mailboxes(layout, 8)
    aborted = make(config_of(variants[1]), 1, seed=1, boxes=boxes)
    launches = [aborted.launch(v) for v in variants]
    run_sequence(launches, cache=store(), skip={(5, 0), (5, 1)})
    for rank, box in enumerate(boxes):
        found = ErrorWord.of(int(box[layout.error // 4]))
        assert found == (None if rank == 5 else ErrorWord(0, 5))
    assert "words not armed" in disarmed(layout, boxes[5:6])  # what the dead rank was sent
    for box, fresh in zip(boxes, mailboxes(layout, 8), strict=True):
        box.copy_(fresh)  # what `Workspace.reset` does
    good = make(config_of(variants[1]), 1, seed=2, boxes=boxes)
    run_sequence([good.launch(v) for v in variants], cache=store())
    check(good)


def test_a_missing_owner_is_an_error_word_with_a_time_out() -> None:
    variant, problem = consumer_problem(8, 1, timeout=3, two_shot=1)
    partials = problem.random_partials(1)
    # Rank 2 never gets rank 1's share: it gives up, its sum is wrong, and its error word says so.
    problem.deliver(dict(enumerate(partials)))
    layout = problem.config.box
    start = (layout.receive + layout.part) // 4
    problem.boxes[2][start : start + layout.part // 4] = SENTINEL - (1 << 32)
    run_sequence([problem.launch(variant)], cache=store())
    found = ErrorWord.of(int(problem.boxes[2][layout.error // 4]))
    assert found in (ErrorWord(0, 1), ErrorWord(0, ErrorWord.GATHER))


def test_a_missing_partial_without_a_time_out_never_ends() -> None:
    variant, problem = consumer_problem(8, 1, blocks=0)
    partials = problem.random_partials(1)
    problem.deliver({rank: p for rank, p in enumerate(partials) if rank != 5})
    with pytest.raises(DeadlockError, match="mailbox"):
        run_sequence([problem.launch(variant)], cache=store())


def test_fewer_tokens_than_the_kernel_is_for() -> None:
    variant = kernel(CONSUMER, 8, 8)
    problem = make(config_of(variant), 3, project=False)
    partials = problem.random_partials(2)
    consume(variant, problem, partials)
    check(problem, partials)


def test_garbage_fails() -> None:
    variant, problem = consumer_problem(8, 2)
    partials = problem.random_partials(1)
    consume(variant, problem, partials)
    check(problem, partials)
    out = problem.out
    garbage = {
        "rows": [*out[:3], out[3].roll(1, 0), *out[4:]],
        "scaled": [(row.float() * 1.01).to(BF16) for row in out],
        "stale": [torch.zeros_like(row) for row in out],
    }
    for rows in garbage.values():
        problem.out = rows
        with pytest.raises(AssertionError):
            check(problem, partials)
    problem.out = out
    check(problem, partials)
    with pytest.raises(AssertionError):
        check(problem, [*partials[:-1], torch.zeros_like(partials[-1])])

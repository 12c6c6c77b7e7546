"""The projection: partial rows, what is published, no trace of batch size or grid in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exchange import (
    K,
    alone,
    core,
    kernel,
    owned_partial,
    partial_of,
    positive_zeros,
    publish,
    same,
)
from k3fuse.kernels.common.mailbox import HIDDEN, PRODUCERS, Mailbox
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.problem import ARMED, BF16, make

pytest.importorskip("cutlass")


def operands(m: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(BF16)
    return x, (torch.randn(HIDDEN, k, generator=generator) * k**-0.5).to(BF16)


def expected(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().t()).to(BF16)


@pytest.mark.parametrize(("tp", "m"), [(8, 33), (16, 17)])
def test_partials_of_many_tokens(tp: int, m: int) -> None:
    x, weight = operands(m, K[tp])
    layout = Mailbox(tp, max_m=m)
    boxes, report = publish(x, weight, tp=tp, multicast=0, rank=3)
    got = partial_of(boxes[0], layout, 3, m)
    assert compare(got, expected(x, weight), tolerance(BF16, K[tp])).ok
    for box in boxes[1:]:
        assert torch.equal(box[: layout.data // 4], boxes[0][: layout.data // 4])
    # Nothing but these rows is written, and each CTA has counted the call.
    rest = boxes[0][: layout.data // 4].clone()
    start = layout.slot(0, 3) // 4
    rest[start : start + m * HIDDEN // 2] = ARMED
    assert (rest == ARMED).all()
    assert boxes[3][layout.control // 4 :][:PRODUCERS].tolist() == [1] * PRODUCERS
    # Weights once, x once a cluster.
    traffic = report.reports[0].traffic
    assert traffic[0, "weight", 0, "read"].requested == HIDDEN * K[tp] * 2
    assert traffic[0, "x", 0, "read"].requested == 16 * m * K[tp] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64])
def test_every_batch(tp: int, m: int) -> None:
    x, weight = operands(m, K[tp], seed=m)
    layout = Mailbox(tp, max_m=m)
    multicast, _ = publish(x, weight, tp=tp, rank=3, multicast=1)
    peers, _ = publish(x, weight, tp=tp, rank=3, multicast=0)
    owned, _ = publish(x, weight, tp=tp, rank=3, two_shot=1)
    got = partial_of(multicast[3], layout, 3, m)
    assert compare(got, expected(x, weight), tolerance(BF16, K[tp])).ok
    assert all(same(partial_of(box, layout, 3, m), got) for box in peers)
    assert same(owned_partial(owned, layout, 3, m), got)


@pytest.mark.parametrize("tp", [8, 16])
def test_two_shot_sends_each_owner_its_columns(tp: int) -> None:
    x, weight = operands(5, K[tp], seed=1)
    layout = Mailbox(tp, max_m=5)
    one, _ = publish(x, weight, tp=tp, multicast=1, rank=2)
    two, _ = publish(x, weight, tp=tp, two_shot=1, rank=2)
    got = owned_partial(two, layout, 2, 5)
    assert same(got, partial_of(one[2], layout, 2, 5))
    written = [int((box[: layout.data // 4] != ARMED).sum()) for box in two]
    assert written == [5 * HIDDEN // 2 // tp] * tp


@pytest.mark.parametrize(("tp", "m"), [(8, 8), (16, 5)])
def test_the_fused_kernel_has_the_bits_of_the_two_grids(tp: int, m: int) -> None:
    found = []
    config = config_of(kernel(FUSED, tp, 8))
    for stages in (
        [kernel(FUSED, tp, 8)],
        [kernel(PRODUCER, tp, 8), kernel(CONSUMER, tp, 8)],
    ):
        problem = make(config, m, seed=3)
        partials = problem.partials()
        report = alone(problem, 1, dict(enumerate(partials)), stages=stages)
        out, new_prefix = problem.expected(partials)
        band = tolerance(BF16, config.k, 3)
        assert compare(problem.out[1], out, band).ok
        assert compare(problem.new_prefix[1], new_prefix, band).ok
        found.append((problem, report))
    for name in ("out", "new_prefix"):
        assert same(getattr(found[0][0], name)[1], getattr(found[1][0], name)[1])
    fused = found[0][1].reports[0]
    assert fused.traffic[0, "weight", 0, "read"].requested == HIDDEN * K[tp] * 2


def test_a_token_alone_has_the_bits_it_has_in_a_batch() -> None:
    x, weight = operands(20, 768, seed=2)
    layout = Mailbox(16, max_m=20)
    boxes, _ = publish(x, weight, tp=16)
    batch = partial_of(boxes[0], layout, 0, 20)
    for token in (0, 19):
        boxes, _ = publish(x[token : token + 1], weight, tp=16, max_m=20)
        assert same(partial_of(boxes[0], layout, 0, 1)[0], batch[token])


def test_scalar_arithmetic_has_the_bits_of_packed() -> None:
    x, weight = operands(2, 768, seed=6)
    layout = Mailbox(16, max_m=2)
    found = [
        partial_of(publish(x, weight, tp=16, packed=packed)[0][0], layout, 0, 2)
        for packed in (0, 1)
    ]
    assert same(*found)


def test_no_minus_zero_is_published() -> None:
    # x w underflows to a negative number below BF16's smallest: rounded, it is -0.0.
    x = torch.zeros(3, 768, dtype=BF16)
    x[:, 0] = torch.tensor([-(2.0**-70), 1.0, float("inf")])
    weight = torch.zeros(HIDDEN, 768, dtype=BF16)
    weight[:, 0] = 2.0**-70
    weight[1::2, 0] = -(2.0**-70)
    weight[4::16, 0] = float("nan")
    boxes, _ = publish(x, weight, tp=16)
    got = partial_of(boxes[0], Mailbox(16, max_m=3), 0, 3)
    wanted = expected(x, weight)
    assert ((wanted == 0) & wanted.signbit()).any(), "no -0.0 to publish"
    assert same(got, positive_zeros(wanted))
    words = got.view(torch.int32)
    assert not (words == ARMED).any()


def test_rows_of_x_may_lie_apart() -> None:
    x, weight = operands(4, 768, seed=5)
    wide = torch.full((4, 800), float("nan"), dtype=BF16)
    wide[:, :768] = x
    problem = make(config_of(kernel(FUSED, 16, 8)), 4, seed=5)
    problem.x[0], problem.weight[0] = wide, weight
    values = problem.values(0)
    assert values["x_pitch"] == 768
    partials = {rank: torch.ones(4, HIDDEN, dtype=BF16) for rank in range(1, 16)}
    problem.pitch = 800
    alone(problem, 0, partials, stages=[kernel(FUSED, 16, 8)])
    own = positive_zeros(expected(x, weight))
    _, new_prefix = problem.expected([own, *partials.values()])
    band = tolerance(BF16, 768, 3)
    assert compare(problem.new_prefix[0], new_prefix, band).ok


def test_instructions_of_the_projection() -> None:
    # Upstream's TP16 producer, counted the same way: 217,504 at M = 4 (docs page).
    x, weight = operands(4, 768)
    _, report = publish(x, weight, tp=16)
    assert core(report.reports[0]) <= 217_504

"""Runs of the output projection's kernels for its tests: one stage, or one rank of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, SequenceReport, run_sequence
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.mailbox import HIDDEN, Mailbox
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.output_projection.builder import BUILDER, config_of
from k3fuse.kernels.output_projection.config import CONSUMER, PRODUCER
from k3fuse.kernels.output_projection.problem import BF16, Problem, make
from k3fuse.kernels.simulator import Fresh, Multicast
from stored import store

K = {8: 1536, 16: 768}
ROUNDINGS = 3


def kernel(stage: int, tp: int, m: int, **tuning: int) -> Variant:
    """A variant for sm_103a; mailbox slots of m rows unless stated."""
    tuning.setdefault("max_m", m)
    return BUILDER.variant("sm_103a", {"tp": tp, "m": m}, {"stage": stage, **tuning})


def consumer_problem(tp: int, m: int, seed: int = 0, **tuning: int) -> tuple[Variant, Problem]:
    """The consumer for m tokens, and inputs without a projection."""
    variant = kernel(CONSUMER, tp, m, **tuning)
    return variant, make(config_of(variant), m, seed, project=False)


def consume(
    variant: Variant, problem: Problem, partials: Sequence[Tensor], seed: int | None = None
) -> SequenceReport:
    """Run the consumer on all ranks with these partials delivered."""
    problem.deliver(dict(enumerate(partials)))
    return run_sequence([problem.launch(variant)], seed=seed, cache=store())


def core(report: Any) -> float:
    """Warp-instructions a rank without register moves and parameter loads, as the baseline has."""
    plain = sum(
        count
        for opcode, count in report.sim.opcodes.items()
        if not opcode.startswith(("mov", "ld.param", "cvta"))
    )
    return plain / report.sim.ranks


def check(problem: Problem, partials: Sequence[Tensor] | None = None) -> None:
    """Outputs of all ranks against the reference; mailboxes armed; ranks equal.

    With the partials that went in, the new prefix is exact: the sum in rank order, rounded once.
    """
    out, new_prefix = problem.expected(partials)
    assert problem.disarmed() == ""
    assert problem.unequal() == ""
    band = tolerance(BF16, problem.config.k, ROUNDINGS)
    for rank in range(problem.config.tp):
        found = compare(problem.out[rank], out, band)
        assert found.ok, f"out of rank {rank}: {found}"
        if partials is not None:
            assert same(problem.new_prefix[rank], new_prefix), f"new_prefix of rank {rank}"
        else:
            found = compare(problem.new_prefix[rank], new_prefix, band)
            assert found.ok, f"new_prefix of rank {rank}: {found}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN for any NaN."""
    nan = a.isnan() & b.isnan()
    equal = a.view(torch.int16) == b.view(torch.int16)
    return bool((equal | nan).all())


def positive_zeros(rows: Tensor) -> Tensor:
    """Rows as a publisher sends them: no -0.0."""
    return torch.where(rows == 0, torch.zeros_like(rows), rows)


def reduced(partials: Sequence[Tensor]) -> Tensor:
    """The all-reduced rows of published partials."""
    return ordered_sum([positive_zeros(p) for p in partials]).to(BF16)


def publish(
    x: Tensor, weight: Tensor, *, tp: int, rank: int = 0, **tuning: int
) -> tuple[list[Tensor], SequenceReport]:
    """Run one rank's producer alone; its mailboxes (int32 words), all in one memory.

    x [m, k], weight [HIDDEN, k].
    """
    m, k = x.shape
    variant = kernel(PRODUCER, tp, m, **tuning)
    config = config_of(variant)
    boxes = make(config, 1, project=False).boxes
    values: dict[str, Any] = {
        "x": x.contiguous(), "weight": weight, "mailbox": boxes[rank],
        "m": m, "rank": rank, "x_pitch": k,
        **{f"mailbox{i}": box for i, box in enumerate(boxes)},
        "multicast": Multicast((boxes[rank],)),
    }  # fmt: skip
    names = [p.name for p in BUILDER.plan(variant).parameters]
    launch = Launch(variant, [{name: values[name] for name in names}])
    return boxes, run_sequence([launch], cache=store())


def partial_of(box: Tensor, layout: Mailbox, rank: int, m: int) -> Tensor:
    """The partial rows [m, HIDDEN] of a rank in the first call's one-shot slots."""
    start = layout.slot(0, rank) // 4
    return box[start : start + m * HIDDEN // 2].view(BF16).reshape(m, HIDDEN).clone()


def owned_partial(boxes: Sequence[Tensor], layout: Mailbox, rank: int, m: int) -> Tensor:
    """The partial rows [m, HIDDEN] of a rank from the first call's receive slots of all owners."""
    start = (layout.receive + rank * layout.max_m * layout.part) // 4
    width = layout.part // 4
    parts = [
        box[start : start + m * width].view(BF16).reshape(m, HIDDEN // layout.tp) for box in boxes
    ]
    return torch.cat(parts, dim=1)


def alone(
    problem: Problem,
    rank: int,
    partials: dict[int, Tensor],
    *,
    stages: Sequence[Variant],
    call: int = 0,
) -> SequenceReport:
    """Run the kernels of one rank, the others' partials delivered beforehand.

    That is how one device can stand in for a group: nobody has to be waited for.
    """
    problem.deliver({r: p for r, p in partials.items() if r != rank}, call, count=False)
    values: dict[str, Any] = problem.values(rank)
    values["multicast"] = Multicast((problem.boxes[rank],))
    values["mailbox"] = problem.boxes[rank]
    values |= {f"mailbox{i}": box for i, box in enumerate(problem.boxes)}
    values |= {name: Fresh(getattr(problem, name)[rank]) for name in ("out", "new_prefix")}
    launches = []
    for variant in stages:
        names = [p.name for p in BUILDER.plan(variant).parameters]
        launches.append(Launch(variant, [{name: values[name] for name in names}]))
    return run_sequence(launches, cache=store())

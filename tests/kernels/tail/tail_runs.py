"""Runs of the tail for its tests: all ranks, or one rank with what the others send delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, SequenceReport, run_sequence
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.tail.builder import BUILDER, config_of
from k3fuse.kernels.tail.cases import ROUNDINGS
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.problem import BF16, Problem, make
from stored import store


def kernel(tp: int, m: int, rows: int = 64, **tuning: int) -> Variant:
    """A variant for sm_103a with `rows` rows a rank, a cluster by default; slots of m rows."""
    tuning.setdefault("max_m", m)
    return BUILDER.variant("sm_103a", {"tp": tp, "m": m, "rows": rows}, tuning)


def real(tp: int, m: int, **tuning: int) -> Variant:
    """The variant that serves m tokens at Kimi K3's sizes."""
    most = next(n for n in (8, 16, 32, 64) if n >= m)
    tuning.setdefault("two_shot", int(tp == 16 and m > 32))
    return kernel(tp, most, 7168 // tp, **tuning)


def problem_of(variant: Variant, m: int, seed: int = 0, **options: Any) -> Problem:
    """Inputs for it."""
    return make(config_of(variant), m, seed, **options)


def run(variant: Variant | Built, *problems: Problem, **options: Any) -> SequenceReport:
    """Calls one after the other on all ranks."""
    first = variant.variant if isinstance(variant, Built) else variant
    launches = [problem.launch(first) for problem in problems]
    if isinstance(variant, Built):
        launches = [Launch(variant, launch.ranks) for launch in launches]
    return run_sequence(launches, cache=store(), **options)


def check(problem: Problem) -> None:
    """Outputs of all ranks against the reference; mailboxes armed; ranks equal."""
    assert problem.disarmed() == ""
    assert problem.unequal() == ""
    found = compare(problem.out[0], problem.expected(), tolerance(BF16, LATENT, ROUNDINGS))
    assert found.ok, str(found)


def alone(variant: Variant, problem: Problem, rank: int) -> Any:
    """One rank, with all that it waits for delivered, so that no poll is repeated."""
    launch = problem.alone(variant, rank)
    return run_sequence([launch], cache=store()).reports[0]


def core(report: Any) -> int:
    """Warp-instructions without register moves and parameter loads, as the baseline has them."""
    return sum(
        count
        for opcode, count in report.sim.opcodes.items()
        if not opcode.startswith(("mov", "ld.param", "cvta"))
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN for any NaN."""
    nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | nan).all())


def rows_of(tp: int, width: int, tokens: Sequence[Sequence[float]]) -> list[Tensor]:
    """Partials by rank: of token t, rank r has tokens[t][r] in all columns, 0 beyond the last."""
    table = torch.zeros(tp, len(tokens), 1)
    for token, values in enumerate(tokens):
        for rank, value in enumerate(values):
            table[rank, token, 0] = value
    return [rows.expand(-1, width).to(BF16).contiguous() for rows in table]

"""What the tail's kernel must do: cases for `k3fuse kernels check`."""

from __future__ import annotations

from types import MappingProxyType

import torch

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Output, Step
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.tail.builder import BUILDER, config_of
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.policy import TABLE, TWO_SHOT
from k3fuse.kernels.tail.problem import BF16, Problem, make

# Normalised row, up-projection and sum are rounded; the latent sum and the shared one are exact.
ROUNDINGS = 3
# For random schedules and the race checker: a cluster a rank, few tokens, and few ranks.
PROTOCOL_RANKS, RACE_RANKS, FEW_TOKENS = 4, 2, 3


def step_of(variant: Variant, problem: Problem) -> Step:
    """One call on all ranks."""
    expected = problem.expected()
    band = tolerance(BF16, LATENT, ROUNDINGS)
    outputs = [Output("out", rank, out, expected, band) for rank, out in enumerate(problem.out)]
    return Step(
        (problem.launch(variant),),
        tuple(outputs),
        {"mailboxes armed": problem.disarmed, "ranks equal": problem.unequal},
    )


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """The form of the op: a row rounded before the norm's weight."""
    row = TABLE.lookup(target.name, m)
    if row is None:
        return ()
    two_shot = int(row.kernel == TWO_SHOT)

    def made(tokens: int, most: int, seed: int, **shape: int) -> Step:
        tuning = {"max_m": most, "two_shot": two_shot}
        kernel = BUILDER.variant(target.arch, {"m": most, "tp": target.tp, **shape}, tuning)
        return step_of(kernel, make(config_of(kernel), tokens, seed, arch=target.arch))

    few = min(m, FEW_TOKENS)

    def step(seed: int) -> Step:
        return made(m, row.m_max, seed)

    def protocol(seed: int) -> Step:
        return made(few, few, seed, tp=PROTOCOL_RANKS, rows=64)

    def small(seed: int) -> Step:
        return made(few, few, seed, tp=RACE_RANKS, rows=64)

    kind = "two_shot" if two_shot else "one_shot"
    return (
        Case(
            "tail", f"{kind}_tp{target.tp}_m{m}", step, protocol, small, waits=True,
            garbage=MappingProxyType({**GARBAGE, "a rank's columns missing": _columns_missing}),
        ),
    )  # fmt: skip


def _columns_missing(result: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The first columns all zeros, as where their owner had published nothing."""
    wrong = result.clone()
    wrong[:, : result.shape[1] // 16] = 0
    return wrong

"""What the tail's kernel must do: cases for `k3fuse kernels check`."""

from __future__ import annotations

from types import MappingProxyType

import torch

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Output, Step
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.tail.builder import BUILDER, MIXED_TOKENS, config_of
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.mix_problem import MixProblem, make_mixed
from k3fuse.kernels.tail.policy import MIXED, MIXED_TABLE, TABLE, TWO_SHOT
from k3fuse.kernels.tail.problem import BF16, Problem, make

# Normalised row, up-projection and sum are rounded; the latent sum and the shared one are exact.
ROUNDINGS = 3
# The new prefix, the sum of that row and the prefix, is rounded once more; so are mixed rows of it.
MIX_ROUNDINGS = ROUNDINGS + 1
BLOCKS = 8  # of the case with AttnRes
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


def mix_step_of(variant: Variant, problem: MixProblem) -> Step:
    """As `step_of`, with AttnRes behind it."""
    plain = step_of(variant, problem)
    band = tolerance(BF16, LATENT, MIX_ROUNDINGS)
    outputs = list(plain.outputs)
    for name, wanted in zip(("mixed", "new_prefix"), problem.mix(problem.expected()), strict=True):
        for rank, rows in enumerate(getattr(problem, name)):
            outputs.append(Output(name, rank, rows, wanted, band))
    return Step(plain.launches, tuple(outputs), plain.invariants)


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """The form of the op, a row rounded before the norm's weight; and with AttnRes behind it."""
    mixed = MIXED_TABLE.lookup(target.name, m)
    return (*_plain(target, m), *(_mixed(target, m) if mixed and mixed.kernel == MIXED else ()))


def _mixed(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """At its sizes: AttnRes is for whole rows.

    Random schedules of four ranks with twice the rows; races of one rank with all delivered.
    """

    def kernel(tp: int, units: int) -> Variant:
        tuning = {"max_m": MIXED_TOKENS, "blocks": BLOCKS, "units": units}
        return BUILDER.variant(target.arch, {"m": MIXED_TOKENS, "tp": tp}, tuning)

    whole, few = kernel(target.tp, 1), kernel(PROTOCOL_RANKS, 2)

    def problem(variant: Variant, tokens: int, seed: int) -> MixProblem:
        return make_mixed(config_of(variant), tokens, seed, arch=target.arch)

    def step(seed: int) -> Step:
        return mix_step_of(whole, problem(whole, m, seed))

    def protocol(seed: int) -> Step:
        return mix_step_of(few, problem(few, min(m, FEW_TOKENS), seed))

    def small(seed: int) -> Step:
        return Step((problem(whole, 1, seed).alone(whole, 0),), ())

    garbage = {**GARBAGE, "a rank's columns missing": _columns_missing}
    return (
        Case(
            "tail", f"attn_res_tp{target.tp}_m{m}", step, protocol, small, waits=True,
            garbage=MappingProxyType(garbage),
        ),
    )  # fmt: skip


def _plain(target: CheckTarget, m: int) -> tuple[Case, ...]:
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

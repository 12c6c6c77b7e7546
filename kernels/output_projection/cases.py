"""What the output projection's kernels must do: cases for `k3fuse kernels check`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Mutation, Output, Step
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.plan import FUSED_TOKENS
from k3fuse.kernels.output_projection.policy import TABLE, TWO_SHOT
from k3fuse.kernels.output_projection.problem import BF16, Problem, make, variants

# Partial, all-reduced row and new prefix are rounded before the output is.
ROUNDINGS = 3


def step_of(problem: Problem, launches: int) -> Step:
    """A step of a problem; launches are made by `variants` for its config."""
    config = problem.config
    kernels = variants(config.tp, config.m, knobs(problem), fused=launches == 1, arch=problem.arch)
    out, new_prefix = problem.expected()
    band = tolerance(BF16, config.k, ROUNDINGS)
    outputs = []
    for rank in range(config.tp):
        outputs.append(Output("out", rank, problem.out[rank], out, band))
        outputs.append(Output("new_prefix", rank, problem.new_prefix[rank], new_prefix, band))
    return Step(
        tuple(problem.launch(kernel) for kernel in kernels),
        tuple(outputs),
        {"mailboxes armed": problem.disarmed, "ranks equal": problem.unequal},
    )


def knobs(problem: Problem) -> dict[str, int]:
    """The builder's config of a problem, without the stage."""
    config = problem.config
    names = (
        "blocks", "prefix", "norm", "round_mix", "round_before", "multicast", "two_shot", "max_m",
        "timeout",
    )  # fmt: skip
    return {name: int(getattr(config, name)) for name in names}


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """The delta form over 8 blocks: the fused kernel up to 8 tokens, two grids above."""
    fused = m <= FUSED_TOKENS
    row = TABLE.lookup(target.name, m)
    two_shot = row is not None and row.kernel == TWO_SHOT

    def problem(tokens: int, seed: int) -> Problem:
        size = FUSED_TOKENS if fused else m
        tuning = {"max_m": size, "two_shot": int(two_shot)}
        kernel = variants(target.tp, size, tuning, fused=fused, arch=target.arch)[-1]
        return make(config_of(kernel), tokens, seed, arch=target.arch)

    def step(seed: int) -> Step:
        return step_of(problem(m, seed), 1 if fused else 2)

    def protocol(seed: int) -> Step:
        return step_of(problem(1 if fused else m, seed), 1 if fused else 2)

    def small(seed: int) -> Step:
        return consumer_step(target, two_shot, seed)

    kind = "fused" if fused else "two_shot" if two_shot else "one_shot"
    return (
        Case(
            "output_projection", f"{kind}_tp{target.tp}_m{m}", step, protocol, small, waits=True,
            garbage=MappingProxyType(garbage()),
        ),
    )  # fmt: skip


def consumer_step(target: CheckTarget, two_shot: bool, seed: int) -> Step:
    """One token's exchange and residual on all ranks, with the partials delivered beforehand."""
    tuning = {"max_m": 1, "two_shot": int(two_shot)}
    kernel = variants(target.tp, 1, tuning, fused=False, arch=target.arch)[-1]
    problem = make(config_of(kernel), 1, seed, arch=target.arch, project=False)
    partials = problem.random_partials(seed)
    problem.deliver(dict(enumerate(partials)))
    out, new_prefix = problem.expected(partials)
    band = tolerance(BF16, problem.config.k, ROUNDINGS)
    outputs = []
    for rank in range(target.tp):
        outputs.append(Output("out", rank, problem.out[rank], out, band))
        outputs.append(Output("new_prefix", rank, problem.new_prefix[rank], new_prefix, band))
    return Step((problem.launch(kernel),), tuple(outputs), {"mailboxes armed": problem.disarmed})


def garbage() -> Mapping[str, Mutation]:
    """What every kernel must be refused for."""
    return dict(GARBAGE)

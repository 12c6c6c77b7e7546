"""Runs of the front kernel for its tests: all ranks of a group, or one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import run_sequence
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.router.front_builder import BUILDER, config_of
from k3fuse.kernels.router.front_problem import BF16, Problem, make
from stored import store

HIDDEN = 7168
SHARED = {8: 768, 16: 384}
# Two tiles of each part and a half one, on two ranks; two blocks of a CTA's columns.
SMALL = {"tp": 2, "k": 1024, "experts": 160, "latent": 160, "shared": 40}
# Gate and up are rounded before the activation, its result after.
ROUNDINGS = 3


def kernel(m: int, shape: Mapping[str, int], arch: str = "sm_103a", **tuning: int) -> Variant:
    """The variant for up to m tokens."""
    return BUILDER.variant(arch, {"m": m, **shape}, tuning)


def full(tp: int, m: int, shared: bool = True, **tuning: int) -> Variant:
    """The variant at the sizes of Kimi K3."""
    return kernel(m, {"tp": tp, "shared": SHARED[tp] if shared else 0}, **tuning)


@cache
def weights(tp: int, shared: bool) -> Problem:
    """Weights at the sizes of Kimi K3, made once."""
    return make(config_of(full(tp, 8, shared)), 1)


def run_one(
    made: Variant | Built, problem: Problem, seed: int | None = None, races: bool = False
) -> RunReport:
    """One launch on the ranks of the problem."""
    variant = made.variant if isinstance(made, Built) else made
    launch = problem.launch(variant)
    if isinstance(made, Built):
        launch = type(launch)(made, launch.ranks, launch.needed)
    report = run_sequence([launch], seed=seed, races=races, cache=store())
    return report.reports[0]


def wrong(problem: Problem, call: int = 0) -> str:
    """One line that says what differs from the reference on any rank, "" where nothing does."""
    config, k = problem.config, problem.config.k
    said = problem.unequal(call) or problem.strays(call)
    if said:
        return said
    got = problem.published(0, call)
    names = ("logits", "latent")
    for name, value, wanted in zip(names, got, problem.expected(), strict=True):
        band = tolerance(wanted.dtype, k)
        if wanted.numel() and not compare(value, wanted, band).ok:
            return f"{name}: {compare(value, wanted, band)}"
    return hidden_wrong(problem) if config.shared else ""


def hidden_wrong(problem: Problem) -> str:
    """The same for the shared hidden rows."""
    band = tolerance(BF16, problem.config.k, ROUNDINGS)
    for place, rank in enumerate(problem.ranks):
        found = compare(problem.hidden[place], problem.expected_hidden(rank), band)
        if not found.ok:
            return f"hidden of rank {rank}: {found}"
    return ""


def words(problem: Problem, call: int = 0) -> Tensor:
    """The rows of a call in rank 0's mailbox, as words [m, row / 4]."""
    layout = problem.config.box
    start = layout.at(call, 0) // 4
    return problem.boxes[0][start : start + problem.m * layout.row // 4].view(problem.m, -1).clone()


def requested(report: RunReport) -> float:
    """Bytes asked for over bytes needed, reads and writes."""
    asked = sum(traffic.requested for traffic in report.traffic.values())
    return asked / sum(report.needed.values())


def core(report: RunReport) -> float:
    """Warp-instructions a rank without register moves and parameter loads, as the baseline has."""
    plain = (
        n for o, n in report.sim.opcodes.items() if not o.startswith(("mov", "ld.param", "cvta"))
    )
    return sum(plain) / report.sim.ranks


def small(m: int, seed: int = 0, **kind: Any) -> tuple[Variant, Problem]:
    """A small kernel for m tokens, and a problem for it. kind: shape, tuning, or `make`'s."""
    shape = {**SMALL, **{name: kind.pop(name) for name in list(kind) if name in SMALL}}
    tuning = {n: kind.pop(n) for n in list(kind) if n in ("multicast", "replicated", "max_m")}
    variant = kernel(kind.pop("most", max(8, m)), shape, **tuning)
    return variant, make(config_of(variant), m, seed, **kind)


def tokens(problem: Problem, chosen: Sequence[int], boxes: list[Tensor]) -> Problem:
    """The same weights with some of the tokens."""
    part = make(problem.config, len(chosen), boxes=boxes, weights=problem, ranks=problem.ranks)
    part.x = problem.x[list(chosen)].contiguous()
    return part


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))

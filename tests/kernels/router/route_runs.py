"""Runs of the route kernel for its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import SequenceReport, run_sequence
from k3fuse.kernels.router.route_builder import BUILDER, config_of
from k3fuse.kernels.router.route_problem import Problem
from stored import store

E = 896
PLAIN = {"local_logits": 1}


def kernel(m: int, shape: dict[str, int] | None = None, **config: int) -> Variant:
    """A variant for sm_103a."""
    return BUILDER.variant("sm_103a", {"m": m, **(shape or {})}, config)


def built(variant: Variant) -> Built:
    """The variant, compiled once."""
    return store().get(variant)


def choose(
    logits: Tensor, bias: Tensor | None = None, *, top_k: int = 16, size: int = 64,
    scale: float = 1.0, **config: int,
) -> Problem:  # fmt: skip
    """Route plain logits [m, E], and check everything that comes out; m up to `size` at a time."""
    shape = {"e": logits.shape[1], "l": 0, "k": top_k}
    variant = kernel(size, shape, bias=int(bias is not None), local_logits=1, **config)
    problem = Problem(config_of(variant), logits, None, bias, scale=scale)
    run(problem, variant)
    assert problem.wrong() == ""
    return problem


def run(problem: Problem, made: Variant | Built, **how: Any) -> SequenceReport:
    """Run the kernel on all ranks of the problem."""
    return run_sequence([problem.launch(made)], cache=store(), **how)


def core(report: Any) -> int:
    """Warp-instructions without register moves and parameter loads, as the baseline counts."""
    plain = (
        n for o, n in report.sim.opcodes.items() if not o.startswith(("mov", "ld.param", "cvta"))
    )
    return sum(plain)


def random_logits(m: int, seed: int, experts: int = E) -> tuple[Tensor, Tensor]:
    """Logits of spread 3, a correction bias of spread 0.05."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(m, experts, generator=generator)
    return logits, 0.05 * torch.randn(experts, generator=generator)

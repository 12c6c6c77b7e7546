"""Runs of the experts kernel for its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import run
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.common.microscaling import BLOCK, decode_e2m1, round_mxfp8
from k3fuse.kernels.common.tolerances import Comparison, compare, tolerance
from k3fuse.kernels.experts.cases import Problem, exact_linear, kernel
from stored import store

BF16 = torch.bfloat16
# Eight warps of eight CTAs; four slots a token.
SMALL = {"latent": 896, "inter": 64, "hidden": 448, "shared": 192, "top_k": 4}


def small(m: int = 64, arch: str = "sm_103a", **config: int) -> Variant:
    """A narrow expert in one cluster, for up to m tokens."""
    return kernel(arch, {**SMALL, "m": m}, clusters=1, **config)


def pair_of_clusters(arch: str = "sm_103a") -> Variant:
    """A narrow expert in two clusters, two slots, no shared expert, for up to 32 tokens."""
    shape = {**SMALL, "m": 32, "hidden": 0, "shared": 0, "top_k": 2}
    return kernel(arch, shape, clusters=2)


def launch(made: Variant | Built, problem: Problem, **how: Any) -> RunReport:
    """Run the kernel on one rank; the outputs are the problem's."""
    return run(made, [problem.values()], needed=problem.needed(), cache=store(), **how)


def judge(problem: Problem, expected: Tensor | None = None) -> Comparison:
    """The routed partial beside the reference, or beside `expected`."""
    wanted = problem.expected() if expected is None else expected
    return compare(problem.routed, wanted, tolerance(BF16, problem.config.latent, 2))


def check(problem: Problem) -> None:
    """Both outputs and the counts are right."""
    found = judge(problem)
    assert found.ok, found
    if problem.shared is not None:
        x, down, out = problem.shared
        found = compare(out, exact_linear(x, down), tolerance(BF16, problem.config.shared))
        assert found.ok, found
    assert problem.idle() == ""


def weights_once(problem: Problem, report: RunReport) -> None:
    """Each byte of each expert that has a token was asked for once, and no other byte."""
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        read = report.traffic[0, name, 0, "read"]
        assert read.requested == read.distinct == problem.needed()[name], name


def core(report: RunReport) -> int:
    """Warp-instructions without register moves and parameter loads, as the baseline counts."""
    plain = (
        n for o, n in report.sim.opcodes.items() if not o.startswith(("mov", "ld.param", "cvta"))
    )
    return sum(plain)


def wide(codes: Tensor, scales: Tensor) -> Tensor:
    """FP64 of packed E2M1 codes [n, k/2] with E8M0 scales [n, k/32]; no scale overflows."""
    power = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.int() - 127)
    power = torch.where(scales == 255, torch.nan, power)
    blocks = decode_e2m1(codes).double().reshape(*scales.shape, BLOCK)
    return (blocks * power[..., None]).flatten(-2)


def exact_rows(problem: Problem, expert: int) -> Tensor:
    """Rows of all tokens through one expert: sums in FP64, the stated roundings."""
    x = round_mxfp8(problem.x).double()
    gate, up = (x @ wide(problem.w13[expert], problem.w13_scale[expert]).t()).float().chunk(2, -1)
    hidden = round_mxfp8(problem.activation(gate, up), problem.config.floor).double()
    return (hidden @ wide(problem.w2[expert], problem.w2_scale[expert]).t()).float().to(BF16)

"""Runs of the attention projection's kernel for its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.builder import BUILDER, rows_shape
from k3fuse.kernels.attention_projection.cases import needed, values
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import run
from k3fuse.kernels.check.report import RunReport
from k3fuse.kernels.common.tolerances import tolerance
from stored import store

BF16 = torch.bfloat16
HIDDEN = 7168


def kernel(
    m: int, rows: Sequence[int], k: int = HIDDEN, arch: str = "sm_103a", **config: int
) -> Variant:
    """The variant for up to m tokens: the stationary kernel, unless config says stream=1."""
    return BUILDER.variant(arch, {"m": m, "k": k, **rows_shape(rows)}, {"stream": 0, **config})


def operands(
    m: int, rows: Sequence[int], k: int = HIDDEN, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """x [m, k] about 1, and weights [n, k] that make outputs about 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(BF16)
    return x, [(torch.randn(n, k, generator=generator) * k**-0.5).to(BF16) for n in rows]


def project(
    made: Variant | Built, x: Tensor, weights: Sequence[Tensor], **how: Any
) -> tuple[list[Tensor], RunReport]:
    """Run the kernel on one rank: its outputs, and the report."""
    outs = [torch.empty(x.shape[0], w.shape[0], dtype=BF16) for w in weights]
    given = values(made.variant if isinstance(made, Built) else made, x, weights, outs)
    report = run(made, [given], needed=needed(x, weights, outs), cache=store(), **how)
    return outs, report


def band(k: int) -> Any:
    """Tolerance of a row of k columns."""
    return tolerance(BF16, k)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product in FP64, rounded once."""
    return (x.double() @ weight.double().t()).to(BF16)


def requested(report: RunReport) -> float:
    """Bytes asked for over bytes needed, reads and writes."""
    asked = sum(traffic.requested for traffic in report.traffic.values())
    return asked / sum(report.needed.values())


def core(report: RunReport) -> int:
    """Warp-instructions without register moves and parameter loads, as the baseline counts."""
    plain = (
        n for o, n in report.sim.opcodes.items() if not o.startswith(("mov", "ld.param", "cvta"))
    )
    return sum(plain)

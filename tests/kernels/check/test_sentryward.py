"""A second opinion: sentryward, a static verifier of PTX (extra `sentryward`), on the same kernels.

It proves all schedules of one launch on one GPU, without values and without a memory model. The
verdicts of both stand in docs/workbench.md; the tests compare with that table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.resources import Resources
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, builder
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step, check_case
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.simulator import Fresh

pytest.importorskip("cutlass")
sys.path.append(str(Path(__file__).parents[1] / "simulator"))

PAGE = Path(__file__).parents[3] / "docs" / "workbench.md"
GB300 = CheckTarget("gb300:tp8", "sm_103a", 8)
MEMORY_MIB, SECONDS = 4096, 60
WELL, FAULTY = "passes", "fails"


class Subject(NamedTuple):
    """A kernel and the tensors of a step from a seed: inputs, the output, what it must be."""

    built: Built
    tensors: Callable[[int], tuple[dict[str, Any], torch.Tensor, torch.Tensor]]
    k: int


def from_text(name: str, text: str, plan: Plan) -> Built:
    variant = Variant("subject", name, "sm_103a", (), ())
    return Built(variant, plan, text, b"", "", Resources(32, 0, 0, 0))


def gemv(folder: Path, *, barrier: bool = True) -> Subject:
    shape, config = {"m": 1, "n": 2, "k": 64}, {"rows": 1, "warps": 2}
    built = Cache(folder).get(builder("workbench_gemv").variant("sm_103a", shape, config))
    text = built.ptx if barrier else re.sub(r"\n\s*bar(rier)?\.sync[^\n]*", "", built.ptx)
    assert (text == built.ptx) is barrier

    def tensors(seed: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 64, generator=generator).bfloat16()
        w = torch.randn(2, 64, generator=generator).bfloat16()
        y = torch.empty(1, 2).bfloat16()
        return {"x": x, "w": w, "y": Fresh(y)}, y, (x.double() @ w.double().T).bfloat16()

    return Subject(from_text("gemv", text, built.plan), tensors, 64)


def pointers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(n, "pointer") for n in names)


def bulk(_: Path, *, wait_for_empty: bool = True) -> Subject:
    import cutlass

    import dsl_kernels as dsl

    k, bf16 = 4096, cutlass.BFloat16
    text = dsl.ptx_of(
        dsl.BulkDot(k, wait_for_empty), dsl.fake(bf16, k), dsl.fake(bf16, 2, k),
        dsl.fake(cutlass.Float32, 2),
    )  # fmt: skip
    plan = Plan((2, 1, 1), (160, 1, 1), (1, 1, 1), 4096, pointers("x", "w", "y"))

    def tensors(seed: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, generator=generator).bfloat16() for n in (k, 2 * k))
        y = torch.empty(2)
        return {"x": x, "w": w, "y": Fresh(y)}, y, (w.double().view(2, k) @ x.double()).float()

    return Subject(from_text("bulk", text, plan), tensors, k)


def cluster(_: Path, *, barrier: bool = True) -> Subject:
    import cutlass

    import dsl_kernels as dsl

    row = dsl.fake(cutlass.Float32, 256)
    text = dsl.ptx_of(dsl.ClusterSum(4, barrier), row, row)
    plan = Plan((8, 1, 1), (32, 1, 1), (4, 1, 1), 128, pointers("x", "y"))

    def tensors(seed: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        x = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        y = torch.empty(256)
        sums = x.view(2, 4, 32).sum(1, keepdim=True).expand(2, 4, 32).reshape(-1)
        return {"x": x, "y": Fresh(y)}, y, sums

    return Subject(from_text("cluster", text, plan), tensors, 4)


# Row of the page -> subject.
SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "`workbench_gemv`": gemv,
    "`workbench_gemv` without its barrier": partial(gemv, barrier=False),
    "bulk copies into a ring": bulk,
    "bulk copies that do not wait for an empty slot": partial(bulk, wait_for_empty=False),
    "sum over a cluster": cluster,
    "sum over a cluster without its first barrier": partial(cluster, barrier=False),
}


def table() -> dict[str, tuple[str, str]]:
    """Kernel -> (verdict of sentryward, verdict of the check), from the page."""
    part = PAGE.read_text().partition("## A second opinion")[2].partition("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines()
            if line.startswith("| ")]  # fmt: skip
    return {name: (theirs.strip("`"), ours) for name, theirs, ours, *_ in rows[2:]}


def test_the_page_has_a_row_for_each() -> None:
    assert set(table()) == set(SUBJECTS)
    assert [ours for _, ours in table().values()] == [WELL, FAULTY] * 3


@pytest.mark.parametrize("name", SUBJECTS)
def test_our_verdict(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name](tmp_path)

    def step(seed: int) -> Step:
        values, y, expected = subject.tensors(seed)
        band = tolerance(y.dtype, subject.k)
        return Step((Launch(subject.built, [values]),), (Output("y", 0, y, expected, band),))

    result = check_case(Case("subject", subject.built.variant.name, step), GB300)
    assert (WELL if result.passed else FAULTY) == table()[name][1], result.gates


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_verdict_of_sentryward(name: str, tmp_path: Path) -> None:
    sentryward = pytest.importorskip("sentryward")
    built = SUBJECTS[name](tmp_path).built
    plan, ptx, config = built.plan, tmp_path / "kernel.ptx", tmp_path / "input.json"
    ptx.write_text(built.ptx)
    launch: dict[str, Any] = {
        "grid_dim": plan.grid, "block_dim": plan.block, "dynamic_shared_bytes": plan.dynamic_smem,
    }  # fmt: skip
    if plan.cluster != (1, 1, 1):
        launch["cluster_dim"] = plan.cluster
    declared = [
        {"parameter": i, "type": "pointer", "space": "global", "object": p.name}
        for i, p in enumerate(plan.parameters)
    ]
    config.write_text(
        json.dumps(
            {"schema": "spverify.kernel-input/v1", "launch": launch, "declarations": declared}
        )
    )
    found = sentryward.verify(
        ptx, input=config, timeout_seconds=SECONDS, memory_limit_mib=MEMORY_MIB
    )
    assert found["result"] == table()[name][0], found["diagnostics"]

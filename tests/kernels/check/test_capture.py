"""The DSL's compiled host code, run against the stand-in runtime: it launches what plans state."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3fuse.kernels.build import compile as compile_module
from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.errors import MissingDslError
from k3fuse.kernels.build.variant import Variant, builder
from k3fuse.kernels.check import capture as capture_module
from k3fuse.kernels.check.capture import Captured, CaptureError, capture
from k3fuse.kernels.simulator import Fresh
from tolerances import assert_close

HERE = Path(__file__).parent
GEMV = builder("workbench_gemv").variant("sm_103a", {"m": 2, "n": 8, "k": 64}, {"pdl": 1})
SHOWN = builder("workbench_gemv").variant("sm_103a", {"m": 1, "n": 64, "k": 64}, {})
PAGE = Path(__file__).parents[3] / "docs" / "workbench.md"
Launches = tuple[Captured, Captured, Captured]
LARGE_SMEM, NON_PORTABLE_CLUSTER = 8, 14  # cudaFuncAttribute


def cluster() -> Variant:
    return builder("cluster_builder:BUILDER").variant("sm_103a", {"cluster": 4}, {})


@pytest.fixture(scope="module")
def launches() -> Launches:
    """Of the GEMV, of the cluster kernel, and of the example in the docs."""
    if why := capture_module.missing():
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        # The child finds the builder of the tests as this process does.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, sys.path)]))
        gemv, summed, shown = capture([GEMV, cluster(), SHOWN])
    return gemv, summed, shown


def test_the_host_code_launches_what_the_plans_state(
    launches: Launches,
) -> None:
    gemv, summed, _ = launches
    assert gemv.differences(builder(GEMV.op).plan(GEMV)) == []
    assert summed.differences(builder(cluster().op).plan(cluster())) == []
    assert (gemv.grid, gemv.block, gemv.pdl, gemv.dynamic_smem) == (
        (2, 1, 1),
        (128, 1, 1),
        True,
        128,
    )
    assert (summed.grid, summed.cluster, summed.pdl) == ((8, 1, 1), (4, 1, 1), False)
    assert gemv.arguments == ("x", "w", "y")
    assert summed.arguments == ("x", "y", "factor")
    assert [len(content) for _, content in summed.parameters] == [8, 8, 4]
    # The host code opts in to all the shared memory that a CTA may have, and to large clusters.
    assert {a for a, _ in gemv.settings} == {LARGE_SMEM, NON_PORTABLE_CLUSTER}


def test_the_example_on_the_page_is_real(launches: Launches) -> None:
    found = launches[2]
    differences = found.differences(builder(SHOWN.op).plan(SHOWN))
    text = PAGE.read_text()
    assert 'variant("sm_103a", {"m": 1, "n": 64, "k": 64}, {})' in text
    assert f"# {found.grid} {found.arguments} {differences}" in text


def test_a_plan_that_differs_is_told(launches: Launches) -> None:
    gemv, _, _ = launches
    plan = builder(GEMV.op).plan(GEMV)
    for what, wrong in {
        "grid": replace(plan, grid=(3, 1, 1)),
        "block": replace(plan, block=(64, 1, 1)),
        "cluster": replace(plan, cluster=(2, 1, 1)),
        "dynamic shared memory": replace(plan, dynamic_smem=0),
        "pdl": replace(plan, pdl=False),
        "parameters": replace(plan, parameters=plan.parameters[::-1]),
    }.items():
        (line,) = gemv.differences(wrong)
        assert line.startswith(f"{what}: plan ")


def test_the_captured_launch_runs_in_the_simulator(launches: Launches, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    gemv, summed, _ = launches
    x, w, y = torch.randn(2, 64).bfloat16(), torch.randn(8, 64).bfloat16(), torch.empty(2, 8)
    y = y.bfloat16()
    built = cache.get(GEMV)
    assert built.entry == gemv.kernel
    report = gemv.simulate(built, {"x": x, "w": w, "y": Fresh(y)})
    assert_close(y, (x.double() @ w.double().T).bfloat16(), k=64)
    assert report.traffic[0, "w", 0, "read"].requested == w.nbytes
    row, out = torch.arange(256.0), torch.empty(256)
    summed.simulate(cache.get(cluster()), {"x": row, "y": Fresh(out), "factor": 3})
    sums = row.reshape(2, 4, 32).sum(1, keepdim=True).expand(2, 4, 32).reshape(-1)
    assert torch.equal(out, 3 * sums)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "dsl_installed", lambda: False)
        with pytest.raises(CaptureError, match="needs the CuTe DSL, which is not installed; pip"):
            capture([GEMV])
        assert str(MissingDslError("x")).startswith("compiling x needs")
    pytest.importorskip("cutlass")
    assert compile_module.dsl_installed()
    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "COMPILERS", ("no_such_compiler",))
        with pytest.raises(CaptureError, match="needs a C compiler; install one of no_such"):
            capture([GEMV])


def test_what_goes_wrong_in_the_child_is_passed_on() -> None:
    if why := capture_module.missing():
        pytest.skip(why)
    unknown = replace(GEMV, op="no_such_module:BUILDER")
    with pytest.raises(CaptureError, match=r"the host code did not run: .*names no builder"):
        capture([unknown])

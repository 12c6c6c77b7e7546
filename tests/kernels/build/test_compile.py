"""Compiling with the DSL, without a GPU, for every architecture; and plans that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from k3fuse.kernels.build import compile as compile_module
from k3fuse.kernels.build import packed
from k3fuse.kernels.build.compile import Built, compile_variant
from k3fuse.kernels.build.elf import read_cubin
from k3fuse.kernels.build.errors import BuildError, MissingDslError
from k3fuse.kernels.build.resources import find_tool
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, builder
from k3fuse.kernels.build.workbench_gemv import WorkbenchGemv
from workbench_cases import ARCHS, OP, SMALL, STORED, gemv


def needs_dsl() -> None:
    pytest.importorskip("cutlass")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_gemv_compiles(arch: str) -> None:
    needs_dsl()
    built = compile_variant(gemv(arch))
    assert f".target {arch}" in built.ptx
    assert f".entry {built.entry}(" in built.ptx
    assert read_cubin(built.cubin).arch == arch
    assert built.plan == builder(OP).plan(built.variant)
    assert (built.resources.spill_bytes, built.resources.static_smem) == (0, 0)
    assert 16 <= built.resources.registers <= 64
    # The loads of one piece: a row of x for each of 2, a row of W for each of 4, 16 bytes each.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", built.ptx)) == SMALL["m"] + 4
    if find_tool("nvdisasm") is not None:
        assert built.resources.sass is not None
        assert built.resources.sass["BAR"] == 1


def test_the_resources_are_those_of_the_stored_kernel() -> None:
    needs_dsl()
    stored = packed.select(packed.load(STORED), "sm_103a", OP)
    dsl = dict(stored.factors)["version:nvidia-cutlass-dsl"]
    from importlib.metadata import version

    if version("nvidia-cutlass-dsl") != dsl:
        pytest.skip(f"stored with DSL {dsl}")
    built = compile_variant(gemv(), histogram=False)
    assert built.resources.sass is None
    assert built.resources.registers == stored.resources.registers
    assert built.entry == stored.entry


def test_pdl_is_compiled_in() -> None:
    needs_dsl()
    built, plain = compile_variant(gemv(pdl=1)), compile_variant(gemv())
    for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        assert instruction in built.ptx
        assert instruction not in plain.ptx
    assert built.plan.pdl


def test_spills_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_dsl()
    from k3fuse.kernels.build import gemv_device

    monkeypatch.setattr(gemv_device, "VECTOR", 1)  # less code, the same sums
    # 128 sums a thread, and 512 threads that leave 128 registers to each.
    variant = builder(OP).variant("sm_90a", {"m": 8, "n": 16, "k": 64}, {"rows": 16, "warps": 16})
    built = compile_variant(variant)
    assert built.resources.registers == 128
    assert built.resources.spill_bytes > 0
    assert built.resources.stack_bytes > 0
    if built.resources.sass is not None:
        # Spills of four bytes or more.
        accesses = built.resources.sass["STL"] + built.resources.sass["LDL"]
        assert built.resources.spill_bytes >= 4 * accesses > 0


WRONG: dict[str, Callable[[Plan], Plan]] = {
    "grid": lambda p: replace(p, grid=(3, 1, 1)),
    "block": lambda p: replace(p, block=(64, 1, 1)),
    "cluster": lambda p: replace(p, cluster=(2, 1, 1)),
    "pdl": lambda p: replace(p, pdl=True),
    "dynamic shared memory": lambda p: replace(p, dynamic_smem=p.dynamic_smem - 4),
    "parameters": lambda p: replace(p, parameters=p.parameters[:2]),
    "parameters (": lambda p: replace(p, parameters=(*p.parameters[:2], Parameter("y", "i32"))),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_plan_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    needs_dsl()
    right = WorkbenchGemv.plan
    monkeypatch.setattr(WorkbenchGemv, "plan", lambda self, v: WRONG[what](right(self, v)))
    with pytest.raises(BuildError) as caught:
        compile_variant(gemv())
    assert f"{gemv().label}: the plan states {what}" in str(caught.value)
    assert "correct the builder's plan" in str(caught.value)


def test_what_the_compiler_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_dsl()
    right = WorkbenchGemv.trace

    def lacking(self: WorkbenchGemv, variant: Variant) -> tuple[Any, tuple[Any, ...]]:
        kernel, arguments = right(self, variant)
        return kernel, arguments[:2]

    monkeypatch.setattr(WorkbenchGemv, "trace", lacking)
    with pytest.raises(BuildError) as caught:
        compile_variant(gemv())
    assert str(caught.value).startswith(f"{gemv().label} does not compile: ")
    assert "\n" not in str(caught.value)


def test_without_the_dsl_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "dsl_installed", lambda: False)
    with pytest.raises(MissingDslError) as caught:
        compile_variant(gemv())
    assert str(caught.value) == (
        f"compiling {gemv().label} needs the CuTe DSL, which is not installed; "
        "pip install 'k3fuse[kernels]'"
    )


def test_shared_memory_is_static_and_dynamic() -> None:
    stored = packed.load(STORED)[0]
    grown = Built(
        stored.variant, stored.plan, "", stored.cubin, stored.entry,
        replace(stored.resources, static_smem=100),
    )  # fmt: skip
    assert grown.smem_bytes == stored.smem_bytes + 100


def test_host_code_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_dsl()
    assert compile_variant(gemv()).entry
    monkeypatch.setattr(compile_module, "launch_of", lambda text: None)
    with pytest.raises(BuildError, match="not understood; pip install nvidia-cutlass-dsl=="):
        compile_variant(gemv())

"""`k3fuse kernels check`: the contract's keys, exit codes, one line for what cannot be checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hand_kernels import GB300, double, double_case
from k3fuse.kernels.build import compile as compile_module
from k3fuse.kernels.check import Case, Step, registry
from k3fuse.kernels.common.policy import planned, table
from k3fuse.kernels.common.registry import OPS
from k3fuse.rewriter.cli import main

# Of the command contract.
KEYS = {
    "op", "variant", "arch", "registers", "spill_bytes", "smem_bytes", "grid", "block", "cluster",
    "bytes_requested", "bytes_needed", "warp_instructions", "max_error", "tolerance", "races",
    "ranks", "seeds", "passed",
}  # fmt: skip
OK, FAILED, WRONG_USE = 0, 1, 2


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["kernels", "check", *(str(a) for a in arguments)])


def one_line(result: Result, code: int) -> str:
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """Cases of one's own: the doubling kernel, wrong for M = 2."""
    import hand_kernels

    def cases(target: Any, m: int) -> Any:
        wrong = ("add.f32 %f1, %f0, %f0", "add.f32 %f1, %f0, 0f00000000")
        return (double_case(double(wrong if m == 2 else ("", ""))),)

    monkeypatch.setattr(hand_kernels, "cases", cases, raising=False)
    return "hand_kernels:cases"


def test_a_right_kernel_is_one_document(own: str, tmp_path: Path) -> None:
    result = call(own, "--m", "1", "--seeds", "2", "--json")
    assert result.exit_code == OK, result.output
    document = json.loads(result.stdout)
    assert (document["schema"], document["passed"]) == ("k3fuse.kernels-check/1", True)
    (row,) = document["kernels"]
    assert set(row) >= KEYS
    assert (row["seeds"], row["bytes_requested"], row["bytes_needed"]) == (2, 256, 256)
    assert [g["name"] for g in row["gates"]][:5] == [
        "build", "resources", "numerics", "garbage", "protocol",
    ]  # fmt: skip
    file = tmp_path / "report.json"
    written = call(own, "--m", "1", "--seeds", "2", "--json", "-o", file)
    assert (written.exit_code, written.stdout) == (OK, "")
    assert json.loads(file.read_text())["kernels"][0]["op"] == "by_hand"


def test_several_launches_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import hand_kernels

    def twice(seed: int) -> Step:
        one, two = double_case(double()).step(seed), double_case(double()).step(seed + 1)
        return Step((*one.launches, *two.launches), (*one.outputs, *two.outputs))

    cases = lambda target, m: (Case("by_hand", "twice", twice),)  # noqa: E731
    monkeypatch.setattr(hand_kernels, "cases", cases, raising=False)
    result = call("hand_kernels:cases", "--seeds", "1")
    assert result.exit_code == OK, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    each, again, whole = lines[2:5]
    assert each == again
    assert each.endswith(" 256 256 1.00")
    assert whole.startswith("2 launches ")
    assert whole.endswith(" 512 512 1.00")


def test_progress_is_on_standard_error(own: str) -> None:
    result = call(own, "--m", "1", "--seeds", "2")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("k3fuse: 1/")
    assert "protocol, random schedule 2 of 2" in lines[5]
    assert all(line.endswith(" ...") for line in lines)
    assert " ..." not in result.stdout
    assert result.stdout.splitlines()[0] == f"{own} for gb300:tp8, M = 1"
    assert result.stdout.splitlines()[-1] == "passed"


def test_a_wrong_kernel_is_exit_code_1(own: str) -> None:
    result = call(own, "--m", "2", "--seeds", "1")
    assert result.exit_code == FAILED
    assert result.stdout.splitlines()[-1] == "FAILED: numerics"
    row = json.loads(call(own, "--m", "2", "--seeds", "1", "--json").stdout)["kernels"][0]
    assert row["passed"] is False
    assert row["max_error"] > row["tolerance"] > 0


def test_an_op_without_a_kernel_names_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = table("tail", planned(1, 64, "latent_tail", 2))
    monkeypatch.setitem(OPS, "tail", replace(OPS["tail"], table=plan))
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    line = one_line(call("tail", "--m", "8"), FAILED)
    assert "k3fuse: tail has no kernel for gb300:tp8 yet" in line
    assert "plans latent_tail (2 launches" in line
    document = json.loads(call("tail", "--target", "gb300:tp16", "--json").stdout)
    assert (document["passed"], document["kernels"]) == (False, [])
    assert document["reason"].startswith("tail has no kernel for gb300:tp16 yet")


def test_a_kernel_without_cases_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    line = one_line(call("tail"), FAILED)
    assert "tail has a kernel but no case for gb300:tp8 at M = 8; write it in kernels/tail" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gemm",), "op 'gemm' is unknown; use one of attention_projection, output_projection,"),
        (("router", "--m", "65"), "router: m=65 is outside the policy of gb300:tp8; use 1 to 64"),
        (("workbench_gemv", "--m", "9"), "m=9 is outside the kernel; use 1 to 8"),
        (("router", "--target", "reference"), "names no architecture; use for example gb300:tp8"),
        (("router", "--target", "gb300:tp7"), "tp7 is not covered"),
        (("no.module:cases",), "'no.module:cases' names no cases (No module named 'no')"),
        (("hand_kernels:absent",), "use package.module:function"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert message in one_line(result, WRONG_USE)
    assert result.stdout == ""


def test_without_the_dsl_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "dsl_installed", lambda: False)
    result = call("workbench_gemv", "--m", "1", "--cache", tmp_path)
    assert result.exit_code == WRONG_USE
    assert "needs the CuTe DSL, which is not installed; pip install" in result.stderr


def test_the_gemv_passes(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    k = 12288 // 16
    result = call(
        "workbench_gemv", "--target", "gb300:tp16", "--m", "1", "--seeds", "1", "--cache", tmp_path,
        "--json",
    )  # fmt: skip
    assert result.exit_code == OK, result.output
    (row,) = json.loads(result.stdout)["kernels"]
    assert row["variant"] == f"m1_n7168_k{k}_r4_w4"
    assert row["bytes_needed"] == 2 * (7168 * k + k + 7168)
    # W once, x by each of 1792 CTAs.
    assert row["bytes_requested"] == 2 * (7168 * k + 1792 * k + 7168)
    assert 0 <= row["max_error"] < row["tolerance"]
    (half,) = registry.cases_of("workbench_gemv", GB300, 2)
    assert half.name == "m2_n7168_k1536_r4_w4"


def test_attn_res_passes_in_every_form(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    result = call("attn_res", "--m", "1", "--seeds", "1", "--cache", tmp_path, "--json")
    assert result.exit_code == OK, result.output
    rows = json.loads(result.stdout)["kernels"]
    assert [r["variant"] for r in rows] == [
        "m1_blocks8_delta_norm_packed", "m1_blocks0_delta_norm_packed", "m1_blocks4_packed",
    ]  # fmt: skip
    for row in rows:
        assert (row["passed"], row["races"], row["spill_bytes"]) == (True, 0, 0)
        # At M = 1 every byte is asked for once; the vectors of scores go unused without blocks.
        assert row["bytes_requested"] <= 1.05 * row["bytes_needed"]

"""`k3fuse kernels`: keys, exit codes, one line for each error; building needs the DSL."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3fuse.kernels.build import compile as compile_module
from k3fuse.kernels.build import packed
from k3fuse.kernels.build.cache import key_factors
from k3fuse.kernels.build.variant import BUILDERS
from k3fuse.rewriter.cli import main
from workbench_cases import ARCHS, OP, STORED

KEYS = {
    "op", "variant", "arch", "registers", "spill_bytes", "smem_bytes", "grid", "block", "cluster",
}  # fmt: skip
SHAPE = ("--shape", "m=2,n=8,k=64")
OK, WRONG_USE = 0, 2


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["kernels", *(str(a) for a in arguments)])


def kernels(result: Result) -> list[dict[str, Any]]:
    """The rows of the one JSON document on standard output."""
    assert result.exit_code == OK, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["kernels"]
    assert all(set(row) >= KEYS for row in found)
    return found


def one_line(result: Result) -> str:
    assert result.exit_code == WRONG_USE, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    lines = [x for x in result.stderr.splitlines() if x and not x.endswith(" ...")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_the_group_is_found_by_entry_point() -> None:
    assert "kernels" not in main.commands
    shown = CliRunner().invoke(main, ["--help"])
    assert "kernels" in shown.stdout
    names = [line.split()[0] for line in call("--help").stdout.partition("Commands:")[2].split("\n")
             if line.strip()]  # fmt: skip
    assert names == ["bench", "build", "check", "gpu", "list", "pack", "show"]


def test_list_needs_no_dsl(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "dsl_installed", lambda: False)
    rows = kernels(call("list", OP, "--json", "--cache", cache))
    assert [r["variant"].partition("_")[0] for r in rows] == ["m1", "m2", "m4", "m8"]
    everything = kernels(call("list", "--json", "--cache", cache))
    assert {r["op"] for r in everything} == set(BUILDERS)
    assert {(r["op"], r["arch"], r["registers"]) for r in rows} == {(OP, "sm_103a", None)}
    assert rows[0]["grid"] == [1792, 1, 1]
    archs = [x for arch in ARCHS for x in ("--arch", arch)]
    assert len(kernels(call("list", OP, *archs, "--json", "--cache", cache))) == 12
    text = call("list", OP, "--cache", cache)
    assert (text.exit_code, len(text.stdout.splitlines())) == (OK, 5)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "gemm"), "op 'gemm' has no kernel to build; use one of workbench_gemv"),
        (("list", "--arch", "sm_80"), "arch 'sm_80' is not covered; use one of sm_90a"),
        (("list", "--target", "gb300:tp7"), "tp7 is not covered"),
        (("list", "--target", "reference"), "names no architecture; use for example gb300:tp8"),
        (("show", OP, "--shape", "m=2,n"), "--shape 'm=2,n' is no list of sizes"),
        (("show", OP, "--m", "9"), "m=9 is outside the kernel; use 1 to 8"),
        (("show", OP, "--config", "stages=2"), "no config 'stages'; it has rows, warps, pdl"),
        (("show", OP, "--packed", "absent"), "absent: no such file; write one with"),
        (("pack", OP), "pack writes a file; name it, for example -o kernels.k3pack"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in one_line(call(*arguments))


def test_without_the_dsl_building_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "dsl_installed", lambda: False)
    for command in (("build", OP), ("show", OP), ("pack", OP, "-o", str(cache / "x"))):
        text = one_line(call(*command, "--cache", cache))
        assert text.endswith("not installed; pip install 'k3fuse[kernels]'")


# --- a packed file, without the DSL -----------------------------------------------------------


def test_show_reads_a_packed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "dsl_installed", lambda: False)
    archs = [x for arch in ARCHS for x in ("--arch", arch)]
    rows = kernels(call("show", OP, "--packed", STORED, *archs, "--json"))
    assert [(r["arch"], r["registers"], r["spill_bytes"], r["smem_bytes"]) for r in rows] == [
        ("sm_90a", 39, 0, 128),
        ("sm_100a", 32, 0, 128),
        ("sm_103a", 32, 0, 128),
    ]
    row = rows[2]
    assert (row["grid"], row["block"], row["cluster"]) == ([2, 1, 1], [128, 1, 1], [1, 1, 1])
    assert [(p["name"], p["offset"], p["size"]) for p in row["parameters"]] == [
        ("x", 0, 8), ("w", 8, 8), ("y", 16, 8),
    ]  # fmt: skip
    assert [(o["sms"], o["resident"]) for o in row["occupancy"]] == [
        (152, 2432), (148, 2368), (132, 2112),
    ]  # fmt: skip
    counts = list(row["sass"].values())
    assert counts == sorted(counts, reverse=True)
    assert "ptx" not in row


def test_show_prints_for_people() -> None:
    text = call("show", OP, "--packed", STORED, "--key").stdout
    assert "workbench_gemv/m2_n8_k64_r4_w4@sm_103a" in text
    assert "registers   32 a thread, 0 bytes spilled" in text
    assert "152 SMs     16 CTAs (64 warps) an SM, bound by registers" in text
    assert "FHFMA 64" in text
    assert "  arch: sm_103a" in text


def test_show_says_what_changed_since_a_kernel_was_built(tmp_path: Path) -> None:
    file = tmp_path / "old.k3pack"
    (kernel,) = (k for k in packed.load(STORED) if k.variant.arch == "sm_103a")
    current = key_factors(kernel.variant)
    old = {**current, "version:torch": "1.0", "sources:build": "0"}
    packed.pack([replace(kernel, factors=tuple(old.items()))], file)
    (row,) = kernels(call("show", OP, "--packed", file, "--json"))
    assert row["changed"] == {n: [old[n], current[n]] for n in ("version:torch", "sources:build")}
    text = call("show", OP, "--packed", file, "--key").stdout
    assert f"  version:torch: 1.0 -> {current['version:torch']}" in text
    packed.pack([replace(kernel, factors=tuple(current.items()))], file)
    assert "would differ" not in call("show", OP, "--packed", file, "--key").stdout


def test_a_packed_file_of_another_arch_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "hopper.k3pack"
    packed.pack([k for k in packed.load(STORED) if k.variant.arch == "sm_90a"], file)
    text = one_line(call("show", OP, "--packed", file))
    assert "for sm_90a, not for sm_103a; build and pack with --arch sm_103a" in text
    assert kernels(call("show", OP, "--packed", file, "--arch", "sm_90a", "--json"))


def test_a_damaged_packed_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "cut.k3pack"
    file.write_bytes(STORED.read_bytes()[:-100])
    assert "pack it again" in one_line(call("show", OP, "--packed", file))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("k3fuse.kernels/1", "k3fuse.kernels/0", "schema 'k3fuse.kernels/0', this version reads"),
        ('"rows": 4', '"rows": 2', "the checksum of its k3fuse.json is wrong; pack it again"),
    ],
)
def test_a_packed_file_that_was_changed_is_one_line(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "changed.k3pack"
    with zipfile.ZipFile(STORED) as source, zipfile.ZipFile(file, "w") as goal:
        for name in source.namelist():
            data = source.read(name)
            if name == packed.MANIFEST:
                assert old.encode() in data
                data = data.replace(old.encode(), new.encode())
            goal.writestr(name, data)
    assert message in one_line(call("show", OP, "--packed", file))
    assert kernels(call("show", OP, "--packed", STORED, "--json"))


# --- with the DSL -----------------------------------------------------------------------------


def test_build_list_show_and_pack(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    where = ("--cache", str(cache), *SHAPE)
    (built,) = kernels(call("build", OP, "--json", *where))
    assert built["spill_bytes"] == 0
    assert built["registers"] > 0
    (listed,) = kernels(call("list", OP, "--json", *where))
    assert listed == built
    (shown,) = kernels(call("show", OP, "--json", "--ptx", *where))
    assert {k: shown[k] for k in built} == built
    assert ".target sm_103a" in shown["ptx"]
    assert shown["factors"]["arch"] == "sm_103a"
    assert shown["changed"] == {}
    file = tmp_path / "out" / "one.k3pack"
    document = json.loads(call("pack", OP, "--json", *where, "-o", file).stdout)
    assert document["kernels"] == [built]
    assert document["bytes"] == file.stat().st_size
    (again,) = kernels(call("show", OP, "--packed", file, "--json"))
    assert {k: again[k] for k in built} == built


def test_output_goes_to_a_file(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    result = call("list", OP, "--json", "--cache", cache, "-o", file)
    assert (result.exit_code, result.stdout) == (OK, "")
    assert len(json.loads(file.read_text())["kernels"]) == 4

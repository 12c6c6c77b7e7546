"""What is installed, and what importing it does."""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("rewriter", "patterns", "kernels")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = (
    "torch_dynamo_backends",
    "k3fuse.patterns",
    "k3fuse.commands",
    "k3fuse.sources",
    "vllm.general_plugins",
    "console_scripts",
)


def modules() -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def data_files() -> list[Path]:
    """What the packages need beside Python: markers, the page, the schema, C sources."""
    kinds = {".typed", ".j2", ".css", ".js", ".json", ".c"}
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    return sorted(p for p in found if p.suffix in kinds and "__pycache__" not in p.parts)


def run(code: str, *flags: str, arguments: Sequence[str] = ()) -> str:
    command = [sys.executable, *flags, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_package_is_listed() -> None:
    # A folder with a name of its own (k3fuse_vllm) in package-dir, or k3fuse.FOLDER.
    own = {folder: name for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
    folders = [p.parent.relative_to(ROOT) for p in modules() if p.name == "__init__.py"]
    found = {own.get(f.as_posix(), "k3fuse." + ".".join(f.parts)) for f in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert found == set(listed)


def test_every_module_is_in_a_package() -> None:
    orphans = [p for p in modules() if not (p.parent / "__init__.py").exists()]
    assert orphans == []


def test_every_root_is_typed() -> None:
    for folder in FOLDERS:
        assert (ROOT / folder / "py.typed").is_file(), folder
        assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][f"k3fuse.{folder}"]


def test_no_tool_skips_a_folder_of_ours() -> None:
    """Pytest, ruff and git skip folders called `build` unless they are told not to."""
    tools = PROJECT["tool"]
    skipped = [*tools["pytest"]["ini_options"]["norecursedirs"], *tools["ruff"]["exclude"]]
    skipped += [
        line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line[0] != "/"
    ]
    names = {p.parent.name for f in ("tests", *FOLDERS) for p in (ROOT / f).rglob("*.py")}
    assert "build" in names
    assert {n for n in names for s in skipped if fnmatch.fnmatch(n, s)} == set()


HEAVY = ("vllm", "triton", "cuda", "cutlass", "transformers", "torch._inductor", "torch._dynamo")


_ENGINE = (
    "import k3fuse.rewriter.engine; from k3fuse.rewriter.pattern import load_patterns\n"
    "load_patterns()"
)
_DYNAMO = "import torch._dynamo"
# Each in a fork of one process that has imported torch alone: name -> modules that it loads.
_LOADED = """
import json, os, sys, sympy, torch
before = set(sys.modules)
for name, statement in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if not os.fork():
        exec(statement)
        print(json.dumps([name, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@functools.cache
def loaded() -> dict[str, set[str]]:
    """Heavy modules that statements load in a new process, those of `import torch` aside."""
    statements = {folder: f"import k3fuse.{folder}" for folder in FOLDERS}
    statements |= {"engine": _ENGINE, "dynamo": _DYNAMO}
    found = dict(map(json.loads, run(_LOADED, arguments=[json.dumps(statements)]).splitlines()))
    assert set(found) == set(statements)
    return {
        name: {n for n in names for h in HEAVY if n == h or n.startswith(h + ".")}
        for name, names in found.items()
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_importing_a_package_loads_nothing_heavy(folder: str) -> None:
    assert loaded()[folder] == set()


def test_the_engine_loads_no_gpu_package() -> None:
    heavy = loaded()["engine"]
    assert {n for n in heavy if n.partition(".")[0] in ("vllm", "cuda", "cutlass")} == set()


def test_a_heavy_import_is_noticed() -> None:
    assert "torch._dynamo" in loaded()["dynamo"]


@pytest.mark.parametrize("group", GROUPS)
def test_entry_points_resolve(group: str) -> None:
    project = PROJECT["project"]
    tables = {**project["entry-points"], "console_scripts": project["scripts"]}
    mine = {
        e.name: e
        for e in entry_points(group=group)
        if e.value.startswith(("k3fuse.", "k3fuse_vllm."))
    }
    assert set(mine) == set(tables[group])
    for name, entry in mine.items():
        assert entry.value == tables[group][name]
        assert entry.load() is not None


def test_optimised_mode_works() -> None:
    out = run(
        "from k3fuse.rewriter.pattern import load_patterns\n"
        "from k3fuse.rewriter import backend, cli\n"
        "print(sorted(p.name for p in load_patterns()), __debug__)",
        "-OO",
    )
    assert "'router'" in out
    assert out.strip().endswith("False")


def asserts(source: str) -> list[int]:
    return [n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assert)]


def test_no_assert_outside_tests() -> None:
    found = {str(p.relative_to(ROOT)): asserts(p.read_text()) for p in modules()}
    assert len(found) > 60
    assert {p: lines for p, lines in found.items() if lines} == {}
    assert asserts("x = 1\nassert x") == [2]


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        (source / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("k3fuse-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {p.name for p in data_files()} >= {"py.typed", "page.js", "report.schema.json"}
    own = "rewriter/vllm_pass/"  # packed under a name of its own, see package-dir
    paths = [p.relative_to(ROOT).as_posix() for p in (*modules(), *data_files())]
    expected = {
        f"k3fuse_vllm/{p.removeprefix(own)}" if p.startswith(own) else f"k3fuse/{p}" for p in paths
    }
    assert {n for n in names if n.startswith(("k3fuse/", "k3fuse_vllm/"))} == expected
    assert any(n.endswith("licenses/LICENSE") for n in names)

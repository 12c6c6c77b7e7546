"""The cache: what its key depends on, hits, damage, and that failures leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3fuse.kernels.build import cache as cache_module
from k3fuse.kernels.build.cache import Cache, default_folder, diff_factors, key_factors, key_of
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Variant
from workbench_cases import gemv, made


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of kernel sources."""
    for name, text in (("one.py", "a = 1\n"), ("sub/two.py", "b = 2\n"), ("sub/read.md", "-")):
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "sources"


def copied(folder: Path, name: str, change: dict[str, str]) -> Path:
    """A copy of a source folder with files replaced; digests are kept by folder in a process."""
    goal = folder.parent / name
    for path in folder.rglob("*.*"):
        target = goal / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    for file, text in change.items():
        (goal / file).write_text(text)
    return goal


def test_every_factor_changes_the_key(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = gemv()
    plain = key_factors(base, sources)
    found = {"nothing": key_of(plain)}

    def differs(what: str, factors: dict[str, str], names: set[str]) -> None:
        assert set(diff_factors(plain, factors)) == names, what
        found[what] = key_of(factors)

    for what, variant, names in (
        ("op", replace(base, op="other"), {"op"}),
        ("name", replace(base, name="other"), {"name"}),
        ("arch", replace(base, arch="sm_90a"), {"arch"}),
        ("shape", replace(base, shape=(("m", 3),)), {"shape"}),
        ("config", replace(base, config=(("rows", 3),)), {"config"}),
    ):
        differs(what, key_factors(variant, sources), names)
    edited = copied(sources, "edited", {"sub/two.py": "b = 3\n"})
    differs("source", key_factors(base, edited), {"sources:sub"})
    renamed = copied(sources, "renamed", {"sub/three.py": ""})
    differs("new source", key_factors(base, renamed), {"sources:sub"})
    real = cache_module._version

    def installed(distribution: str, newer: str) -> str:
        return "9" if distribution == newer else real(distribution)

    for distribution in ("nvidia-cutlass-dsl", "torch", "k3fuse"):
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_version", lambda d, n=distribution: installed(d, n))
            differs(distribution, key_factors(base, sources), {f"version:{distribution}"})
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_COMPILER_OPT", "-O0")
        differs("environment", key_factors(base, sources), {"environment:CUTE_DSL_COMPILER_OPT"})
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "COMPILER_OPTIONS", ("-O0",))
        differs("options", key_factors(base, sources), {"options"})
    assert len(found) == 13
    assert len(set(found.values())) == len(found)


def test_what_does_not_change_the_key(sources: Path) -> None:
    base = key_factors(gemv(), sources)
    moved = copied(sources, "moved", {"sub/read.md": "other text"})
    assert key_factors(gemv(), moved) == base
    assert key_of(dict(reversed(base.items()))) == key_of(base)


def test_the_key_is_the_same_in_every_process() -> None:
    code = (
        "from k3fuse.kernels.build import builder\n"
        "from k3fuse.kernels.build.cache import key_factors, key_of\n"
        "b = builder('workbench_gemv')\n"
        "print(key_of(key_factors(b.variant('sm_103a', {'k': 64, 'n': 8, 'm': 2}, {}))))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2", "77")
    }
    assert keys == {key_of(key_factors(gemv()))}


def test_the_package_has_a_factor_a_folder() -> None:
    factors = key_factors(gemv())
    assert {"sources:.", "sources:build", "sources:common"} <= set(factors)
    assert factors["version:torch"]
    assert all(isinstance(v, str) for v in factors.values())


def test_the_folder_of_a_builder_of_ones_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = replace(gemv(), op="builder_of_ones_own:BUILDER")

    def factor(folder: Path, device: str, below: str) -> str:
        (folder / "below").mkdir(parents=True)
        (folder / "builder_of_ones_own.py").write_text("BUILDER = 1\n")
        (folder / "device.py").write_text(device)
        (folder / "below" / "other.py").write_text(below)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            return key_factors(variant)["sources:own"]

    base = factor(tmp_path / "base", "a = 1\n", "")
    assert factor(tmp_path / "below", "a = 1\n", "b = 1\n") == base
    assert factor(tmp_path / "edited", "a = 2\n", "") != base
    # Without such a builder there is no such factor.
    assert "sources:own" not in key_factors(gemv())
    assert "sources:own" not in key_factors(variant)


def test_diffs_name_both_sides() -> None:
    assert diff_factors({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}) == {
        "b": ("2", "4"),
        "d": ("", "5"),
        "c": ("3", ""),
    }


class Compiler:
    """Counts; `cubin` is what it makes."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.cubin = b"first"

    def __call__(self, variant: Variant) -> Built:
        self.variants.append(variant)
        return made(variant, cubin=self.cubin)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def test_a_variant_is_compiled_once(tmp_path: Path, compiler: Compiler) -> None:
    store = Cache(tmp_path, compiler=compiler)
    assert store.peek(gemv()) is None
    first = store.get(gemv())
    assert Cache(tmp_path, compiler=compiler).get(gemv()) == first == store.peek(gemv())
    assert compiler.variants == [gemv()]
    store.get(gemv(rows=2))
    assert compiler.variants == [gemv(), gemv(rows=2)]
    assert dict(first.factors) == key_factors(gemv())
    files = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    assert files == sorted(f"{key_of(key_factors(v))}.k3pack" for v in compiler.variants)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "cut": lambda b: b[: len(b) // 2],
    "flipped": lambda b: b.replace(b"first", b"firzt"),
    "text": lambda b: b"not a packed file",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_built_again_with_one_line(
    tmp_path: Path, compiler: Compiler, damage: str
) -> None:
    lines: list[str] = []
    store = Cache(tmp_path, compiler=compiler, warn=lines.append)
    store.get(gemv())
    path = store.path(gemv())
    # Small members are stored as they are or compressed; the flip must hit something.
    changed = DAMAGE[damage](path.read_bytes())
    if changed == path.read_bytes():
        middle = len(changed) // 4
        changed = changed[:middle] + bytes([changed[middle] ^ 1]) + changed[middle + 1 :]
    path.write_bytes(changed)
    compiler.cubin = b"second"
    assert store.get(gemv()).cubin == b"second"
    assert len(lines) == 1
    assert lines[0].startswith(f"k3fuse: rebuilding {gemv().label}: {path}: ")
    assert "\n" not in lines[0]
    assert store.get(gemv()).cubin == b"second"
    assert (len(lines), len(compiler.variants)) == (1, 2)


def test_an_entry_of_another_variant_is_not_trusted(tmp_path: Path, compiler: Compiler) -> None:
    lines: list[str] = []
    store = Cache(tmp_path, compiler=compiler, warn=lines.append)
    store.get(gemv(rows=2))
    store.path(gemv()).parent.mkdir(exist_ok=True)
    store.path(gemv()).write_bytes(store.path(gemv(rows=2)).read_bytes())
    assert store.get(gemv()).variant == gemv()
    assert len(lines) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(variant: Variant) -> Built:
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        Cache(tmp_path / "c", compiler=fail).get(gemv())
    assert list(tmp_path.rglob("*")) == []


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3FUSE_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "k3fuse" / "kernels"
    monkeypatch.setenv("K3FUSE_KERNEL_CACHE", str(tmp_path / "mine"))
    assert default_folder() == Cache().folder == tmp_path / "mine"

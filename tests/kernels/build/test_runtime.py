"""Kernels ready to launch: where they come from, loaded once a device, never inside a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import LaunchError, MissingDslError, PackedError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.runtime import ENVIRONMENT, Runtime
from workbench_cases import STORED, gemv, made


class Bench:
    """Counts compilations and loads."""

    def __init__(self, tmp_path: Path, *, dsl: bool = True, **options: Any) -> None:
        self.dsl, self.device, self.recording = dsl, 0, False
        self.compiled: list[Variant] = []
        self.loaded: list[tuple[int, Built]] = []
        options.setdefault("packs", ())
        self.runtime = Runtime(
            cache=Cache(tmp_path / "cache", compiler=self.compile),
            load=self.load,
            device=lambda: self.device,
            capturing=lambda: self.recording,
            **options,
        )

    def compile(self, variant: Variant) -> Built:
        if not self.dsl:
            raise MissingDslError(variant.label)
        self.compiled.append(variant)
        return made(variant)

    def load(self, built: Built) -> Callable[..., None]:
        self.loaded.append((self.device, built))
        return lambda *values: None


def test_a_kernel_is_compiled_once_and_loaded_once_a_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.runtime.kernel(gemv())
    assert bench.runtime.kernel(gemv()) is first
    bench.device = 1
    assert bench.runtime.kernel(gemv()) is not first
    assert bench.runtime.kernel(gemv(rows=2)) is not first
    assert bench.compiled == [gemv(), gemv(rows=2)]
    assert [(device, built.variant) for device, built in bench.loaded] == [
        (0, gemv()), (1, gemv()), (1, gemv(rows=2)),
    ]  # fmt: skip


def test_a_packed_file_comes_before_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(STORED))
    bench = Bench(tmp_path, packs=None)
    variant = next(k.variant for k in packed.load(STORED) if k.variant.arch == "sm_103a")
    bench.runtime.kernel(variant)
    assert bench.compiled == []
    assert bench.loaded[0][1].cubin.startswith(b"\x7fELF")
    bench.runtime.kernel(gemv(rows=2))
    assert bench.compiled == [gemv(rows=2)]


def test_nothing_is_loaded_inside_a_capture(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recording = True
    with pytest.raises(LaunchError, match="run one step with this token count first"):
        bench.runtime.kernel(gemv())
    assert bench.compiled == []
    bench.recording = False
    ready = bench.runtime.kernel(gemv())
    bench.recording = True
    assert bench.runtime.kernel(gemv()) is ready


def test_without_a_compiler_the_fix_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dsl=False)
    with pytest.raises(LaunchError, match=r"not installed.*or pack it elsewhere.*" + ENVIRONMENT):
        bench.runtime.kernel(gemv())
    assert bench.loaded == []


def test_a_packed_kernel_that_is_launched_in_another_way(tmp_path: Path) -> None:
    right = made()
    for plan, fits in ((right.plan, True), (replace(right.plan, dynamic_smem=64), False)):
        file = tmp_path / f"{fits}.k3pack"
        packed.pack([replace(right, plan=plan)], file)
        bench = Bench(tmp_path, packs=[file])
        if fits:
            bench.runtime.kernel(gemv())
            assert (len(bench.loaded), bench.compiled) == (1, [])
            continue
        with pytest.raises(PackedError, match="launches it in another way; pack it again"):
            bench.runtime.kernel(gemv())

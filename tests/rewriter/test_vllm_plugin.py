"""vLLM's entry point: one wrapper around a worker's start, which asks before it imports more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from k3fuse_vllm import plugin

WORKER = "vllm.v1.worker.worker_base"
SOURCE = """
class WorkerWrapperBase:
    def __init__(self, config):
        self.vllm_config, self.worker = config, "the worker"

    def init_device(self, device):
        return f"started on {device}"
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def take() -> dict[str, ModuleType]:
        names = [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]
        return {name: sys.modules.pop(name) for name in names}

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    kept = take()
    yield
    take()
    sys.modules.update(kept)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the watch was called with."""
    calls: list[Any] = []
    stand_in: Any = ModuleType("k3fuse_vllm.worker")
    stand_in.watch = lambda worker, config: calls.append((worker, config))
    monkeypatch.setitem(sys.modules, "k3fuse_vllm.worker", stand_in)
    return calls


def config(additional: Any = None, backend: Any = "", passes: Any = ()) -> Any:
    compilation = SimpleNamespace(backend=backend, inductor_passes=dict(passes))
    return SimpleNamespace(additional_config=additional, compilation_config=compilation)


def worker_module() -> Any:
    module = ModuleType(WORKER)
    exec(SOURCE, module.__dict__)
    sys.modules[WORKER] = module
    return module


class Pass:
    pass


Pass.__module__ = "k3fuse_vllm.graph_pass"


@pytest.mark.parametrize(
    ("asked", "is_asked"),
    [
        (config({"k3fuse": {}}), True),
        (config(backend="k3fuse"), True),
        (config(passes={"post": "k3fuse_vllm.graph_pass.decode_pass"}), True),
        (config(passes={"post": Pass()}), True),
        (config({"other": {}}, "inductor", {"post": "another.pass"}), False),
        (config("k3fuse"), False),
        (None, False),
    ],
)
def test_only_who_asked_is_watched(asked: Any, is_asked: bool, watched: list[Any]) -> None:
    module = worker_module()
    plugin.register()
    plugin.register()
    assert module.WorkerWrapperBase(asked).init_device("cpu") == "started on cpu"
    assert watched == ([("the worker", asked)] if is_asked else [])


def test_a_worker_that_is_imported_later_is_wrapped_then(
    tmp_path: Path, watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path.joinpath(*WORKER.split(".")[:-1])
    folder.mkdir(parents=True)
    (folder / "worker_base.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    before = len(sys.meta_path)
    plugin.register()
    plugin.register()
    assert len(sys.meta_path) == before + 1
    module = import_module(WORKER)
    assert len(sys.meta_path) == before
    assert module.WorkerWrapperBase(config({"k3fuse": {}})).init_device("cpu")
    assert len(watched) == 1


def test_a_vllm_without_such_a_worker_is_left_alone(watched: list[Any]) -> None:
    sys.modules[WORKER] = ModuleType(WORKER)
    plugin.register()
    assert not hasattr(sys.modules[WORKER], "WorkerWrapperBase")
    assert watched == []


def test_a_worker_that_is_not_there_is_as_absent_as_before() -> None:
    plugin.register()
    with pytest.raises(ModuleNotFoundError):
        import_module("vllm_without.worker_base")
    found = next(f for f in sys.meta_path if isinstance(f, plugin._WhenImported))
    assert found.find_spec("torch", None) is None

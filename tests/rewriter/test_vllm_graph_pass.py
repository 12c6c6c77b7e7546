"""The pass of vLLM's own compile, with a stand-in of vLLM's base class."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from build import identity, stored
from k3fuse.rewriter import backend
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse_vllm.routes import Decision
from k3fuse_vllm.settings import Route, Settings

LAYER = "layer1_tp8_m4_opaque"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """k3fuse_vllm.graph_pass, imported beside the stand-in."""
    base: Any = ModuleType("vllm.compilation.passes.inductor_pass")
    base.InductorPass = type("InductorPass", (), {})
    parts = base.__name__.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "k3fuse_vllm.graph_pass", raising=False)
    yield importlib.import_module("k3fuse_vllm.graph_pass")
    sys.modules.pop("k3fuse_vllm.graph_pass")
    backend.reset_reports()


def settings(groups: Any, **more: Any) -> Settings:
    given = {"target": "gb300:tp8", "plan": True, "log": "off", "groups": groups, **more}
    return Settings(Options.make(given), given=more)


def test_a_piece_is_rewritten_in_place(module: Any) -> None:
    file = stored(LAYER)
    module.set_engine(settings(file.meta["groups"]), Decision(Route.PASS))
    module.decode_pass(file.module.graph)
    targets = {str(n.target) for n in file.module.graph.nodes}
    assert {"k3fuse.router_front.default", "k3fuse.tail.default"} <= targets
    (report,) = backend.reports()
    assert report.counts()["router"].found == 1


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Decision(Route.REGIONAL), ""),
        (Decision(Route.PASS, (Reason(Code.ENGINE_UNSUPPORTED, "LoRA is on", ()),)), "LoRA is on"),
        (None, "in a process where the plugin was not loaded"),
    ],
)
def test_other_engines_pieces_stay(
    decision: Decision | None, said: str, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = stored(LAYER)
    before = identity(file.module)
    if decision is not None:
        module.set_engine(settings(file.meta["groups"]), decision)
    for _ in range(2):
        module.decode_pass(file.module.graph)
    assert identity(file.module) == before
    assert backend.reports() == []
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)  # once
    assert said in "".join(lines)


@pytest.mark.parametrize(("start", "taken"), [(1, True), (64, True), (65, False)])
def test_ranges_that_may_be_decode_steps_are_taken(start: int, taken: bool, module: Any) -> None:
    found = module.decode_pass.is_applicable_for_range(SimpleNamespace(start=start, end=8192))
    assert found is taken


def test_the_key_holds_options_target_and_whether_it_is_used(module: Any) -> None:
    def key(wish: Settings | None, decision: Decision) -> str:
        module._ENGINE[:] = [(wish, decision)]
        found = module.decode_pass.uuid()
        assert found == module.decode_pass.uuid()
        assert found.startswith("k3fuse-")
        return str(found)

    refused = Decision(Route.PASS, (Reason(Code.ENGINE_UNSUPPORTED, "LoRA is on", ()),))
    keys = {
        key(settings({}), Decision(Route.PASS)),
        key(settings({}, validate="off"), Decision(Route.PASS)),
        key(settings({}), refused),
        key(None, Decision(Route.NONE)),
    }
    assert len(keys) == 4


def test_the_pass_is_one_object_wherever_it_is_sent(module: Any) -> None:
    assert copy.deepcopy(module.decode_pass) is module.decode_pass
    assert pickle.loads(pickle.dumps(module.decode_pass)) is module.decode_pass

"""One worker's rewrite from its start to the end of its warm-up, with stand-ins of vLLM's parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from build import run_stored
from k3fuse.kernels.common.policy import planned, table
from k3fuse.rewriter import backend, options
from k3fuse.rewriter.backend import StrictError
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.reasons import Code
from k3fuse.rewriter.report import Report
from k3fuse_vllm import experts as registry
from k3fuse_vllm import worker as worker_module
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.routes import Decision
from k3fuse_vllm.settings import Route, Settings
from k3fuse_vllm.worker import Watch, watch, with_kernels

PASS = {"post_grad_custom_post_pass": "k3fuse_vllm.graph_pass.decode_pass"}
FACTS = Facts(
    architecture="DeepseekV3ForCausalLM", vllm="0.33.0", tp=8, mode=3, passes=PASS,
    full_graphs=True, capability=(10, 3), ranges=(64,),
    additional={"k3fuse": {"target": "gb300:tp8"}},
)  # fmt: skip


class Worker:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.model_runner = SimpleNamespace(model="the model")

    def load_model(self) -> str:
        self.steps.append("load")
        return "loaded"

    def compile_or_warm_up_model(self) -> str:
        self.steps.append("warm up")
        return "warm"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose facts are FACTS; what is set for the process goes with the test."""
    vllm: Any = ModuleType("vllm")
    vllm.envs = SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    graph_pass: Any = ModuleType("k3fuse_vllm.graph_pass")
    graph_pass.engines = []
    graph_pass.set_engine = lambda *engine: graph_pass.engines.append(engine)
    monkeypatch.setitem(sys.modules, "k3fuse_vllm.graph_pass", graph_pass)
    monkeypatch.setattr(worker_module, "experts_op", lambda: None)
    monkeypatch.setattr(registry, "_ENGINE", [])
    compilation = SimpleNamespace(
        static_forward_context={}, static_all_moe_layers=(), inductor_compile_config={}
    )
    made = SimpleNamespace(compute_hash=lambda: "engine", compilation_config=compilation,
                           facts=FACTS)  # fmt: skip
    monkeypatch.setattr(Facts, "of", classmethod(lambda cls, config: config.facts))
    return made


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Options of the process that were set."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(options, "set_process_options", found.append)
    yield found
    backend.reset_reports()


@pytest.fixture(scope="module")
def report() -> Report:
    return run_stored("layer1_tp8_m4_opaque", target="gb300:tp8", dry_run=True)[1]


def started(config: Any) -> tuple[Worker, Watch]:
    worker = Worker()
    found = watch(worker, config)
    assert found is not None
    return worker, found


def end(worker: Worker) -> None:
    assert (worker.load_model(), worker.compile_or_warm_up_model()) == ("loaded", "warm")
    assert worker.steps == ["load", "warm up"]


def test_nobody_asked(config: Any) -> None:
    config.facts = replace(FACTS, passes={}, additional={})
    worker = Worker()
    assert watch(worker, config) is None
    assert worker.load_model.__func__ is Worker.load_model  # type: ignore[attr-defined]


def test_a_start_ends_in_a_summary_and_a_record(
    config: Any, report: Report, nothing_stays: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    worker, found = started(config)
    assert found.decision.route is Route.PASS
    assert found.decision.active
    assert nothing_stays[0]["target"] == "gb300:tp8"
    assert "disable" not in nothing_stays[0]
    assert sys.modules["k3fuse_vllm.graph_pass"].engines == [(found.settings, found.decision)]
    assert [config] == registry._ENGINE
    monkeypatch.setattr(backend, "reports", lambda: [report])
    with caplog.at_level(logging.WARNING, "k3fuse"):
        end(worker)
    assert "sites in 1 graphs, route pass, target gb300:tp8" in caplog.text
    assert [p.name for p in tmp_path.rglob("*.json")] == ["rank0.json"]


def test_a_refused_engine_runs_stock_and_says_why(
    config: Any, nothing_stays: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    config.facts = replace(FACTS, lora=True)
    with caplog.at_level(logging.WARNING, "k3fuse"):
        worker, found = started(config)
        end(worker)
    assert not found.decision.active
    assert "router" in nothing_stays[0]["disable"]
    assert "; fix: " in caplog.text
    assert "k3fuse: not used: ENGINE_UNSUPPORTED" in caplog.text


def strict(facts: Facts = FACTS, **more: Any) -> Facts:
    return replace(facts, additional={"k3fuse": {"target": "gb300:tp8", "strict": True, **more}})


def test_strict_mode_ends_a_start_that_is_refused(config: Any) -> None:
    config.facts = strict(replace(FACTS, lora=True))
    with pytest.raises(StrictError, match="ENGINE_UNSUPPORTED"):
        watch(Worker(), config)


def test_strict_mode_ends_a_start_without_a_graph(
    config: Any, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.facts = strict()
    worker, _ = started(config)
    with pytest.raises(StrictError, match="COMPILE_NOT_REACHED"):
        worker.compile_or_warm_up_model()
    monkeypatch.setattr(backend, "reports", lambda: [report])
    end(started(config)[0])  # the control


def test_strict_mode_ends_a_start_with_missing_sites(
    config: Any, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.facts = strict()
    worker, found = started(config)
    monkeypatch.setattr(backend, "reports", lambda: [report])
    regions = {"reasons": [], "modules": {}, "sites": {"router": 1}, "expected": {"router": 3}}
    found.regions = SimpleNamespace(for_report=lambda: regions, reach=lambda runner: None)
    with pytest.raises(StrictError, match="2 of router expected and not rewritten"):
        worker.compile_or_warm_up_model()


@pytest.mark.parametrize("differing", [[], [1]])
def test_ranks_compare_their_sites(
    differing: list[int], config: Any, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = started(config)
    asked: list[str] = []
    monkeypatch.setattr(backend, "reports", lambda: [report])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(worker_module, "agree", lambda h: asked.append(h) or differing)
    if differing:
        with pytest.raises(StrictError, match=r"ranks \[1\] run other sites than rank 0"):
            worker.compile_or_warm_up_model()
    else:
        end(worker)
    assert len(asked) == 1


def test_a_backend_in_mode_1_meets_small_steps_and_vllms_settings(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config as inductor

    seen: list[Any] = []
    monkeypatch.setattr(worker_module, "small_steps", seen.append)
    monkeypatch.setattr(inductor, "max_fusion_size", inductor.max_fusion_size)
    config.facts = replace(FACTS, mode=1, passes={}, backend="k3fuse", ranges=())
    wanted = {"max_fusion_size": 7, "there_is_no_such_setting": 1, "pre_grad": object()}
    config.compilation_config.inductor_compile_config = wanted
    worker, found = started(config)
    assert found.decision.route is Route.BACKEND
    assert inductor.max_fusion_size == 7
    end(worker)
    assert seen == [worker.model_runner]


def test_fresh_leaves_no_cache_on(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    for name in ("VLLM_DISABLE_COMPILE_CACHE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(inductor, "force_disable_caches", False)
    config.facts = replace(FACTS, additional={"k3fuse": {"target": "gb300:tp8", "fresh": True}})
    started(config)
    assert inductor.force_disable_caches


def test_regions_are_compiled_between_load_and_warm_up(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3fuse_vllm import regional

    steps: list[Any] = []

    class Regions:
        def __init__(self, *_: Any) -> None:
            steps.append("made")

        def prepare(self) -> None:
            steps.append("prepared")

        def compile(self, model: Any) -> None:
            steps.append(model)

        def reach(self, runner: Any) -> None:
            steps.append(runner)

        def for_report(self) -> dict[str, Any]:
            return {"reasons": [], "modules": {}, "sites": {}, "expected": {}}

    monkeypatch.setattr(regional, "Regions", Regions)
    config.facts = Facts(
        architecture="KimiK3ForConditionalGeneration", vllm="0.33.0", tp=8, full_graphs=True,
        capability=(10, 3), additional={"k3fuse": {"target": "gb300:tp8"}},
    )  # fmt: skip
    worker, found = started(config)
    assert found.decision.route is Route.REGIONAL
    assert steps == []
    end(worker)
    assert steps == ["made", "prepared", "the model", worker.model_runner]


def test_a_target_without_kernels_compiles_no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = Decision(Route.REGIONAL)

    def judged(**more: Any) -> Decision:
        return with_kernels(decision, Settings(Options.make({"target": "gb300:tp8", **more})))

    assert judged() is decision
    later = SimpleNamespace(table=table("later", planned(1, 64, "later", 1)))
    monkeypatch.setattr(worker_module, "OPS", {"later": later})
    (reason,) = judged().reasons
    assert reason.code is Code.KERNEL_UNAVAILABLE
    assert judged(plan=True) is decision
    assert judged(target="reference") is decision
    assert with_kernels(Decision(Route.PASS), Settings(Options())) == Decision(Route.PASS)

"""The record of an engine's start: what it says, when it is found again, and what it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from build import run_stored
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.target import Target
from k3fuse_vllm import record as record_module
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.record import Outcome, Record, merged
from k3fuse_vllm.routes import Decision
from k3fuse_vllm.settings import Route

TARGET = Target.parse("gb300:tp8")
LAYER = "layer1_tp8_m4_opaque"


def config(digest: str = "engine") -> Any:
    """An engine's configuration whose model has no MoE layers."""
    compilation = SimpleNamespace(static_forward_context={}, static_all_moe_layers=())
    return SimpleNamespace(compute_hash=lambda: digest, compilation_config=compilation)


def settings(**changes: Any) -> Any:
    options = SimpleNamespace(target=TARGET)
    return SimpleNamespace(**{"options": options, "given": {}, "fresh": False, "report": "",
                              **changes})  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of vLLM's caches."""
    vllm: Any = ModuleType("vllm")
    vllm.envs = SimpleNamespace(VLLM_CACHE_ROOT=str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return tmp_path


@pytest.fixture(scope="module")
def report() -> Report:
    return run_stored(LAYER, target="gb300:tp8", dry_run=True)[1]


def record(route: Route = Route.PASS, engine: str = "engine", **changes: Any) -> Record:
    return Record(config(engine), settings(**changes), Decision(route), Facts(vllm="0.33.0"))


def test_a_warm_start_reads_what_the_cold_one_wrote(cache: Path, report: Report) -> None:
    cold = record().outcome([report])
    assert (cold.reached, cold.cached) == (True, False)
    path = record().write(cold)
    assert path == cache / "k3fuse" / path.parent.name / "rank0.json"
    assert [p.name for p in path.parent.iterdir()] == ["rank0.json"]
    assert json.loads(path.read_text())["from_cache"] is False
    warm = record().outcome([])
    assert warm.cached
    assert warm.sites() == cold.sites()
    assert warm.site_hash == cold.site_hash == merged([report]).site_hash()
    assert "(from a warm cache)" in warm.headline()
    # A start that compiled as many graphs is the newer one.
    assert not record().outcome([report]).cached


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "another"},
        {"route": Route.BACKEND},
        {"given": {"validate": "off"}},
        {"fresh": True},
        {"options": SimpleNamespace(target=Target.parse("gb300:tp16"))},
    ],
)
def test_another_decision_finds_nothing(other: dict[str, Any], cache: Path, report: Report) -> None:
    record().write(record().outcome([report]))
    assert record().outcome([]).cached  # the control
    found = record(**other).outcome([])
    assert (found.reached, found.cached, found.site_hash) == (False, False, None)
    assert found.sites() == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "k3fuse.vllm/0", "graphs": 3}', "{}"])
def test_a_damaged_record_is_none(text: str, cache: Path, report: Report) -> None:
    path = record().write(record().outcome([report]))
    path.write_text(text)
    assert not record().outcome([]).reached


@pytest.mark.parametrize(
    ("route", "said"),
    [
        (Route.PASS, "vLLM compiled no piece of this model"),
        (Route.BACKEND, "the runner compiled no model"),
        (Route.REGIONAL, "no module of the region was called"),
        (Route.NONE, "no route leads to the rewrite"),
    ],
)
def test_a_start_without_a_graph_says_what_to_look_at(route: Route, said: str, cache: Path) -> None:
    line = record(route).outcome([]).headline()
    assert "COMPILE_NOT_REACHED" in line
    assert said in line


def test_a_refused_engine_says_why(cache: Path) -> None:
    reason = Reason(Code.ENGINE_UNSUPPORTED, "LoRA is on", ())
    refused = Record(config(), settings(), Decision(Route.PASS, (reason,)), Facts())
    found = refused.outcome([])
    assert found.headline() == "k3fuse: not used: ENGINE_UNSUPPORTED  LoRA is on"
    assert found.summary("there").splitlines() == [found.headline(), "k3fuse: report: there"]


def test_the_summary_counts_and_gives_reasons(cache: Path, report: Report) -> None:
    found = record().outcome([report, report])
    lines = found.summary("there").splitlines()
    sites = sum(count.found for count in report.counts().values())
    assert lines[0] == f"k3fuse: {2 * sites} sites in 2 graphs, route pass, target gb300:tp8"
    assert lines[-1] == "k3fuse: report: there"
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-1] if " found " in line}
    assert rows["router"] == ["found", "2", "near", "0", "refused", "0"]


def test_modules_of_a_region_count_once_each(cache: Path, report: Report) -> None:
    regions = {"reasons": [], "modules": {"layers": 3}, "sites": {"router": 3},
               "expected": {"router": 4, "experts": 0}}  # fmt: skip
    found = record(Route.REGIONAL).outcome([report], regions)
    assert found.sites() == {"router": 3}
    assert found.missing() == {"router": 1}
    assert record().outcome([report]).missing() == {}
    # What was compiled by layers is compiled again at every start: no record is read.
    record(Route.REGIONAL).write(found)
    assert not record(Route.REGIONAL).outcome([]).cached


def test_rank_0_writes_the_users_file_too(
    cache: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / "folder" / "mine.json"
    mine = record(report=str(file))
    outcome = mine.outcome([report])
    assert mine.write(outcome) == file
    assert json.loads(file.read_text())["graphs"] == 1
    file.unlink()
    monkeypatch.setattr(record_module, "rank", lambda: 3)
    assert mine.write(outcome).name == "rank3.json"
    assert not file.exists()


def test_merging_leaves_the_reports_as_they_are(report: Report) -> None:
    before = json.dumps(report.to_json(), default=str)
    both = merged([report, replace(report)])
    assert len(both.sites) == 2 * len(report.sites)
    assert json.dumps(report.to_json(), default=str) == before
    assert Outcome({"graphs": 0, "reasons": [], "route": "pass"}).site_hash is None

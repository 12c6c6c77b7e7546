"""vLLM's opaque experts op in its stored graphs: near without an engine, a site with its layer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from build import run_stored, stored
from expert_layer import BACKEND, NAME, PATTERN, as_loaded, k3_layer
from k3fuse.patterns.experts_partials import LAYER_GUARDS, misplaced, objections
from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.key import decision, factors
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.report import Report
from k3fuse_vllm import experts as registry
from k3fuse_vllm.expert_layout import Layout
from k3fuse_vllm.experts import ExpertLayer

STACK = "stack5_tp{}_m4_opaque"


def look(monkeypatch: pytest.MonkeyPatch, tp: int = 8, **how: Any) -> Report:
    """The stored five layers, their experts loaded; nothing is edited, which would need vLLM."""
    as_loaded(monkeypatch, tp)
    options = {"target": f"gb300:tp{tp}", "dry_run": True, **how}
    return run_stored(STACK.format(tp), **options)[1]


def sites(report: Report) -> list[Any]:
    return [site for site in report.sites if site.pattern == PATTERN]


def test_without_an_engine_every_layer_says_that_it_is_not_loaded() -> None:
    file, report = run_stored(STACK.format(8))
    assert not sites(report)
    near = [miss for miss in report.near if miss.pattern == PATTERN]
    assert {miss.reason.code.value for miss in near} == {"ENGINE_UNSUPPORTED"}
    assert [miss.reason.sentence for miss in near] == [
        f"the experts of model.layers.{n}.block_sparse_moe.experts are not loaded: "
        "no engine runs here"
        for n in range(1, 5)
    ]
    left = [n for n in file.module.graph.nodes if "moe_forward_shared" in str(n.target)]
    assert len(left) == 4  # vLLM's op stays, and everything else was rewritten
    assert report.counts()["experts"].found == 4


@pytest.mark.parametrize("tp", [8, 16])
def test_loaded_layers_are_sites(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    report = look(monkeypatch, tp)
    found = sites(report)
    assert [s.outcome for s in found] == ["found"] * 4
    assert [s.layer for s in found] == [1, 2, 3, 4]
    assert {s.form for s in found} == {"trtllm mxfp4"}
    assert {s.kernel.name for s in found} == {"route_and_mx_experts"}
    assert {s.kernel.launches for s in found} == {3}
    assert {len(s.nodes) for s in found} == {3}  # the op and its two results
    assert found[0].notes == (f"layer {NAME}, {BACKEND}",)
    counts = report.counts()
    assert sum(c.near + c.refused for c in counts.values()) == 0
    assert counts["experts"].found == counts["router"].found == 4  # tail and front stay sites


def test_a_symbolic_count_is_decided_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    as_loaded(monkeypatch)
    report = run_stored("stack5_tp8_mdyn_opaque", target="gb300:tp8", dry_run=True)[1]
    assert [s.outcome for s in sites(report)] == ["found"] * 4
    assert all("decided at run time" in s.kernel.policy for s in sites(report))


def test_switched_off_as_every_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    off = look(monkeypatch, disable=[PATTERN])
    assert {r.code.value for s in sites(off) for r in s.reasons} == {"DISABLED_BY_USER"}
    assert off.counts()["experts"].found == 4
    some = look(monkeypatch, only_layers=[2])
    assert [s.outcome for s in sites(some)] == ["refused", "found", "refused", "refused"]


def test_other_ranks_than_the_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_loaded(monkeypatch, 16)
    report = run_stored(STACK.format(8), target="gb300:tp8", dry_run=True)[1]
    assert {r.code.value for s in sites(report) for r in s.reasons} == {"GROUP_MISMATCH"}


def test_hash_and_decision_cover_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare both; what is in the graph is in the compiler's cache key."""
    plain = look(monkeypatch)
    again = look(monkeypatch)
    off = look(monkeypatch, disable=[PATTERN])
    assert plain.site_hash() == again.site_hash()
    assert decision(plain) == decision(again)
    assert off.site_hash() != plain.site_hash()
    layout = Layout("rows", "", "", "Mxfp4MoEMethod B12X_MXFP4_MXFP8", "mxfp8")
    as_loaded(monkeypatch, layout=layout)
    other = run_stored(STACK.format(8), target="gb300:tp8", dry_run=True)[1]
    assert {s.outcome for s in sites(other)} == {"found"}
    assert other.site_hash() != plain.site_hash()
    as_loaded(monkeypatch, beta=3.0)
    refused = run_stored(STACK.format(8), target="gb300:tp8", dry_run=True)[1]
    assert {s.outcome for s in sites(refused)} == {"refused"}
    assert decision(refused) != decision(plain)


def test_cache_keys_ask_the_engine_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers() -> str:
        return factors(Options(), load_patterns())["layers.experts_partials"]

    assert layers() == ""  # no engine
    seen = {layers()}
    monkeypatch.setattr(registry, "_ENGINE", [None])
    for layer in (k3_layer(), k3_layer(tp=16), k3_layer(beta=3.0)):
        # Tensors without memory are no loaded ones.
        monkeypatch.setattr(registry, "survey", lambda _, found=layer: {NAME: found})
        assert layers() == ""
        monkeypatch.setattr(ExpertLayer, "loaded", True)
        seen.add(layers())
        monkeypatch.undo()
        monkeypatch.setattr(registry, "_ENGINE", [None])
    assert len(seen) == 4


def test_facts_follow_the_layer_and_not_its_name() -> None:
    one = k3_layer()
    assert one.facts() == k3_layer("model.layers.7.experts").facts()
    assert json.loads(one.facts())["activation"] == ["situ", 4.0, 25.0]
    others = [
        replace(one, beta=3.0),
        replace(one, layout=Layout("rows", "", "", "", "mxfp8")),
        replace(one, routing=replace(one.routing, top_k=8)),
        replace(one, routing=replace(one.routing, bias=None)),
        replace(one, extras=("LoRA",)),
        replace(one, shared=None),
        replace(one, w13=one.w13.transpose(0, 1)),  # type: ignore[union-attr]
        k3_layer(tp=16),
    ]
    assert len({one.facts(), *(layer.facts() for layer in others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"width": 512}, "experts of 384 columns are stored with 512"),
        ({"w13": None}, "w13 is not there"),
        ({"w2": torch.empty(896, 3584, 384, dtype=torch.bfloat16, device="meta")}, "w2 is bfloat"),
        ({"w2": torch.empty(896, 3584, 384, dtype=torch.uint8, device="meta")}, "w2 is (896, 3584"),
        ({"shared": None}, "shared expert has no weights"),
    ],
)
def test_what_lies_elsewhere_is_named(change: dict[str, Any], said: str) -> None:
    found = misplaced(replace(k3_layer(), **change))
    assert said in found
    assert bool(found) == bool(said)


def test_an_address_between_two_loads_is_named() -> None:
    layer = k3_layer()
    odd = torch.zeros(896 + 1)[1:]
    found = misplaced(replace(layer, routing=replace(layer.routing, bias=odd)))
    assert found == "correction bias starts 4 bytes beyond a multiple of 16"


def test_the_reference_asks_less() -> None:
    """Another geometry runs there; another meaning does not."""
    small = replace(k3_layer(tp=4), routing=replace(k3_layer().routing, top_k=8), beta=2.0)
    assert {r.code.value for r in objections(small)} >= {"SHAPE_MISMATCH", "TP_UNSUPPORTED"}
    assert len(objections(small)) == 4
    shared = replace(small.shared, beta=2.0)  # type: ignore[type-var]
    assert objections(replace(small, shared=shared), reference=True) == []
    assert [r.code.value for r in objections(small, reference=True)] == ["ATTR_MISMATCH"]
    without = replace(
        k3_layer(), linear_beta=None, shared=replace(k3_layer().shared, linear_beta=None)
    )  # type: ignore[type-var]
    (reason,) = objections(without, reference=True)
    assert "activation = situ without positive betas" in reason.sentence
    assert len(LAYER_GUARDS) == 21


def test_an_op_without_a_shared_expert_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    as_loaded(monkeypatch)
    file = stored("layer1_tp8_m4_opaque")
    (node,) = [n for n in file.module.graph.nodes if "moe_forward_shared" in str(n.target)]
    assert registry.find("x").name == "x"  # the control: there is a layer for every name
    node.args = (*node.args[:4], 5, node.args[5])
    options = {"target": "gb300:tp8", "dry_run": True, "log": "off", "groups": file.meta["groups"]}
    report = rewrite(file.module, Options.make(options))
    (miss,) = [n for n in report.near if n.pattern == PATTERN]
    assert miss.reason.sentence.endswith("the layer argument names no layer")

"""Sites in the stored decode graphs of vLLM: all found, none near, in every file."""

from __future__ import annotations

import re

import pytest

from build import DATA, run, run_stored, stored
from expert_layer import PATTERN, without_registry
from k3fuse.kernels.common.policy import planned, table
from k3fuse.patterns import experts
from k3fuse.rewriter.graph_file import GraphFile
from k3fuse.rewriter.graph_text import graph_text
from k3fuse.rewriter.report import PatternCount

FILES = sorted(p.stem for p in DATA.glob("*.json"))


def expected(name: str) -> dict[str, int]:
    """Sites of one file. vLLM applies the final norm with the logits, so `final` is a mix alone."""
    dense = {"attention_projection": 1, "output_projection": 1, "router": 0, "experts": 0}
    if name.startswith("final"):
        return {**dict.fromkeys(dense, 0), "attn_res": 1}
    if name.startswith("stack5"):
        return {
            "attention_projection": 5, "output_projection": 5, "router": 4, "experts": 4,
            "attn_res": 6,
        }  # fmt: skip
    moe = 0 if name.startswith("layer0") else 1
    return {**dense, "router": moe, "experts": moe, "attn_res": 1}


@pytest.mark.parametrize("name", FILES)
def test_every_site_of_a_stored_graph_is_found(name: str) -> None:
    file, report = run_stored(name)
    counts = report.counts()
    assert {n: c.found for n, c in counts.items() if n != PATTERN} == expected(name)
    assert without_registry(report) == 0, report.reason_lines()
    # The weights behind vLLM's op are an engine's.
    opaque = counts.get(PATTERN, PatternCount())
    assert (opaque.found, opaque.near, opaque.refused) == (0, expected(name)["experts"], 0)
    m = file.meta["m"]
    assert report.m == ("s0" if m in ("dyn", None) else m)
    file.module.graph.lint()
    fused = [n for n in file.module.graph.nodes if str(n.target).startswith("k3fuse.")]
    assert len(fused) == sum(expected(name).values())
    for node in fused:
        assert node.kwargs["target"] == f"gb300:tp{file.meta['tp']}"
        assert node.kwargs["composition"]
        assert node.kwargs.get("group", "tp:0") == "tp:0"


def test_layers_of_a_stack_are_numbered() -> None:
    _, report = run_stored("stack5_tp8_m4_opaque")
    for pattern, first in (
        ("attention_projection", 0),
        ("output_projection", 0),
        ("router", 1),
        ("experts", 1),
    ):
        layers = [s.layer for s in report.sites if s.pattern == pattern]
        assert layers == list(range(first, 5)), pattern
    assert [s.layer for s in report.sites if s.form.startswith("mla")] == [3]


@pytest.mark.parametrize("name", ["layer12_tp8_m4_opaque", "layer91_tp16_m8_opaque"])
def test_one_layer_keeps_its_number(name: str) -> None:
    layer = int(re.findall(r"\d+", name)[0])
    _, report = run_stored(name)
    assert {s.layer for s in report.sites} == {layer}


BUILT = {"attention_projection", "output_projection", "attn_res", "router", "experts"}
NO_TAIL = table("tail", planned(1, 64, "latent_tail", 1))


def test_every_site_of_a_layer_has_a_kernel() -> None:
    file = stored("layer1_tp8_m4_opaque")
    report = run(file.module, "gb300:tp8", groups=file.meta["groups"])
    assert {s.pattern for s in report.sites} == BUILT
    assert len(report.sites) == 5
    assert not any(s.reasons for s in report.sites)
    assert _ops(file) == [
        "k3fuse.attention_projection.default",
        "k3fuse.attn_res.default",
        "k3fuse.output_projection_attn_res.default",
        "k3fuse.router_front.default",
        "k3fuse.tail.default",
    ]


def test_without_a_plan_only_what_has_a_kernel_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts, "TAIL_TABLE", NO_TAIL)
    file = stored("layer1_tp8_m4_opaque")
    report = run(file.module, "gb300:tp8", groups=file.meta["groups"])
    refused = [s for s in report.sites if s.reasons]
    assert {s.pattern for s in refused} == {"experts"}
    assert {s.reasons[0].code.value for s in refused} == {"KERNEL_UNAVAILABLE"}
    assert "planned: " in refused[0].reasons[0].sentence
    assert "k3fuse.tail.default" not in _ops(file)
    planned_too = run_stored("layer1_tp8_m4_opaque")[1]
    assert planned_too.nodes_after < report.nodes_after < report.nodes_before  # the control


def _ops(file: GraphFile) -> list[str]:
    nodes = file.module.graph.nodes
    return sorted(str(n.target) for n in nodes if str(n.target).startswith("k3fuse."))


def test_a_graph_without_a_kernel_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "TAIL_TABLE", NO_TAIL)
    file = stored("layer1_tp8_m4_opaque")
    before = graph_text(file.module.graph)
    report = run(
        file.module,
        "gb300:tp8",
        groups=file.meta["groups"],
        disable=tuple(sorted(BUILT - {"experts"})),
    )
    assert {s.reasons[0].code.value for s in report.sites} >= {"KERNEL_UNAVAILABLE"}
    assert graph_text(file.module.graph) == before
    assert report.nodes_before == report.nodes_after


@pytest.mark.parametrize(("target", "code"), [("gb300:tp8", "TP_UNSUPPORTED"), ("gb300:tp8", None)])
def test_a_group_of_unknown_size_is_not_assumed(target: str, code: str | None) -> None:
    file = stored("layer1_tp8_m4_opaque")
    groups = {} if code else file.meta["groups"]
    report = run(file.module, target, plan=True, groups=groups)
    reduced = [s for s in report.sites if s.pattern in ("output_projection", "router", "experts")]
    assert len(reduced) == 3
    for site in reduced:
        codes = {r.code.value for r in site.reasons}
        assert (code in codes) if code else not codes

"""Graphs around every family with 0 to 3 defects: values stay, or there is a reason.

`run.py` is the same for more graphs and another seed, with a ledger.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest

import check
from build import run
from check import FAMILIES, Graph, Unbuildable, examine, groups, made
from defects import CATALOGUE
from draw import declared, examined
from k3fuse.rewriter.reasons import Code

SEED, GRAPHS, PIECE = 0, 1000, 50
# Fewer graphs to a traced module than in long runs, so that more modules are seen.
SHARED = 5
# Draws whose defects contradict each other or do not fit the graph are not graphs.
SPARE = 1.4


@pytest.fixture(autouse=True, scope="module")
def _groups() -> None:
    groups()


@pytest.mark.parametrize("piece", range(GRAPHS // PIECE))
def test_near_misses(piece: int) -> None:
    """1,000 graphs, no false accept, no crash, no unexpected code, every control matched."""
    counted: collections.Counter[str] = collections.Counter()
    problems = []
    number = round(piece * PIECE * SPARE)
    while sum(counted.values()) < PIECE:
        found = examined(SEED, number, SHARED)
        number += 1
        if found.verdict.outcome != "unbuildable":
            counted[found.verdict.outcome] += 1
        if found.problem:
            problems.append(f"{found.number}: {found.problem} | {found.graph.text()}")
        assert number < (piece + 2) * PIECE * SPARE, "too many draws are no graphs"
    assert not problems, "\n".join(problems)
    # The control: the generator makes both kinds of graphs.
    assert counted["rewritten"] >= 5, counted
    assert counted["refused"] >= 5, counted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_without_a_defect_is_rewritten(family: str) -> None:
    for seed in range(3):
        verdict = examine(declared(family, seed, ()))
        assert (verdict.outcome, verdict.fault) == ("rewritten", ""), declared(family, seed, ())
        assert verdict.absorbed == (family == "experts_mix")


def test_an_attn_res_of_something_else_is_not_absorbed() -> None:
    """But for the second one of a delta, which stays apart beside the first."""
    defects = [d for d in CATALOGUE if d.kind == "absorbed"]
    assert len(defects) >= 12
    for defect in defects:
        if not any("written" in knob for knob in defect.knobs):  # a value of its own, perhaps
            verdict = examine(declared("experts_mix", 1, (defect,)))
            assert (verdict.outcome, verdict.fault) == ("rewritten", ""), defect.name
            assert verdict.absorbed == ("second" in defect.knobs), defect.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_run_keeps_what_is_healthy(family: str) -> None:
    """Every site is run against its op, or is left because no part of it can run here."""
    for seed in range(2):
        module, _ = made(declared(family, seed, ()))
        report = run(module, validate="values")
        codes = {r.code.value for s in report.sites for r in s.reasons}
        sites = [s for s in report.found if s.pattern == FAMILIES[family].pattern]
        assert codes <= {"VALUES_UNCHECKED"}, codes
        assert sites or "VALUES_UNCHECKED" in codes
        assert report.value_runs["kept"] == len(report.found)


def test_the_catalogue_is_sound() -> None:
    names = [d.name for d in CATALOGUE]
    assert len(set(names)) == len(names)
    assert len(CATALOGUE) >= 150
    known = {c.value for c in Code} | {""}
    for defect in CATALOGUE:
        assert defect.codes <= known, defect.name
        assert set(defect.families) <= set(FAMILIES), defect.name
    kinds = {d.kind for d in CATALOGUE}
    assert kinds >= {"axis", "operand", "literal", "dtype", "stride", "group", "reader", "crossed"}


def test_a_wrong_op_is_a_false_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison: references that are off by a little are all noticed."""
    from k3fuse.kernels.attention_projection import reference as projection
    from k3fuse.kernels.attn_res import reference as attn_res
    from k3fuse.kernels.router import reference as router

    def off(function: Any) -> Any:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            first, *rest = function(*args, **kwargs)
            return [(first.float() * 1.06).to(first.dtype), *rest]

        return wrong

    for module, name, family in (
        (projection, "attention_projection", "attention"),
        (attn_res, "attn_res", "attn_res"),
        (router, "router", "router"),
    ):
        graph = declared(family, 1, ())
        assert examine(graph).fault == ""
        monkeypatch.setattr(module, name, off(getattr(module, name)))
        assert "off by" in examine(graph).fault, family


def test_a_graph_that_does_not_run_is_no_graph() -> None:
    graph = declared("router", 0, ())
    with pytest.raises(Unbuildable):
        examine(dataclasses.replace(graph, knobs={**graph.knobs, "top": 99}))
    assert isinstance(graph, Graph)


def test_a_graph_that_makes_much_of_a_rounding_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One over a sum near 0, behind experts whose delta is rounded another way."""
    knobs = {
        **declared("experts_mix", 0, ()).knobs, "mix": "dot", "mix_eps": 0.5, "form": "bank",
        "blocks": 3, "norm_square": "pow", "norm_scale_first": True, "norm_weight_first": False,
        "norm_eps": 0.5, "norm_eps_first": True, "experts": "einsum", "merged": True,
        "linear": "matmul", "between": "reshape", "sum": "b + a", "given_routing": False,
        "round_mix": False, "delta too": False, "mix_of": "delta", "prefix_of": "given",
        "group": groups()[0], "block_of": "delta",
    }  # fmt: skip
    graph = Graph("experts_mix", knobs, 1013941626, "aot", (), ("graph: another literal",), 210)
    verdict = examine(graph)
    assert (verdict.outcome, verdict.fault) == ("rewritten", "")
    monkeypatch.setattr(check, "_rounded", lambda value: value)
    assert "off by" in examine(graph).fault  # the control


def test_an_order_that_torch_leaves_open_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of four slots, divided by the tokens' sums instead of the slots'.

    So the result depends on the order of the slots, which `topk(sorted=False)` does not promise.
    """
    graph = declared("router", 0, ())
    knobs = {
        **graph.knobs, "logits": "wide linear", "key": "s + b", "scoring": "sigmoid",
        "pick": "topk", "renorm": "plain", "renorm_eps": 1e-20, "scale": 1.0,
        "weights_dtype": (), "latent": True, "groups": 0, "group": "", "sorted": False,
    }  # fmt: skip
    graph = Graph("router", knobs, 180650216, "dynamic", (), ("graph: another literal",), 31623)
    verdict = examine(graph)
    assert (verdict.outcome, verdict.fault) == ("rewritten", "")
    monkeypatch.setattr(check, "in_order", lambda module: None)
    assert "off by" in examine(graph).fault  # the control: in the order that CPUs have, it shows

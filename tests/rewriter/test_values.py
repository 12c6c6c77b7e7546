"""validate="values": every site run against its op; a wrong op that the structure cannot tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from build import identity, run, run_stored, trace
from build import rows as given
from k3fuse.patterns.output_projection import OutputProjection
from k3fuse.rewriter import values
from k3fuse.rewriter.site import Replacement
from k3fuse.rewriter.verify import VerifyError, verify

M, K, H, E, TOP = 4, 32, 64, 16, 4


def block(x: Tensor, w: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    total = F.linear(x, w) + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.1)
    return (wide * scale * norm.float()).to(torch.bfloat16), total


def module() -> fx.GraphModule:
    return trace(block, given(M, K), given(H, K) * K**-0.5, given(M, H, seed=1), given(H, seed=2))


class _Changed(OutputProjection):
    """The pattern with one argument of its op changed."""

    change: Any = staticmethod(lambda args: args)

    def replacement(self, *args: Any) -> Replacement:
        planned = super().replacement(*args)
        return dataclasses.replace(planned, args=self.change(planned.args))


def changed(change: Any) -> tuple[Any, ...]:
    return (type("Changed", (_Changed,), {"change": staticmethod(change)})(),)


WRONG = {
    "another epsilon": lambda a: (*a[:4], 3.0, *a[5:]),
    "the norm's weight as x's row": lambda a: (a[0], a[1], a[2], a[3], -0.05, *a[5:]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_only_the_values_tell_a_wrong_op(wrong: str) -> None:
    patterns = changed(WRONG[wrong])
    structure = run(module(), patterns=patterns, validate="structure")
    assert [s.outcome for s in structure.sites] == ["found"]
    graph = module()
    before = identity(graph)
    report = run(graph, patterns=patterns, validate="values")
    (site,) = report.sites
    assert [r.code.value for r in site.reasons] == ["VALUES_DIFFER"]
    assert "differs by" in site.reasons[0].sentence
    assert identity(graph) == before
    assert report.value_runs == {"sites": 1, "runs": 1, "kept": 0}


def test_the_right_op_passes_and_the_cost_is_reported() -> None:
    report = run(module(), patterns=changed(lambda a: a), validate="values")
    assert [s.outcome for s in report.sites] == ["found"]
    assert report.validated == "values"
    assert report.value_runs == {"sites": 1, "runs": 1, "kept": 1}
    document = report.to_json()
    assert document["phases"]["values"] > 0
    assert document["value_runs"]["runs"] == 1


def test_the_model_at_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sites of different layers are run once; what is too large is left with a reason."""
    from k3fuse.patterns.sources.kimi_k3 import build
    from k3fuse.rewriter.sources import SourceRequest
    from k3fuse.rewriter.target import Target

    monkeypatch.setattr(values, "MAX_BYTES", 40 * 2**20)
    graph = build(SourceRequest(Target.parse("gb300:tp8"), 8, 3, "list"))[0]
    report = run(graph.module, "gb300:tp8", plan=True, groups=graph.groups, validate="values")
    assert {r.code.value for s in report.sites for r in s.reasons} == {"VALUES_UNCHECKED"}
    assert "experts" in {s.pattern for s in report.sites if s.outcome == "refused"}
    assert {s.pattern for s in report.found} == {"attn_res", "output_projection"}
    assert report.value_runs["runs"] < report.value_runs["sites"]


def test_what_cannot_be_run_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_BYTES", 100)
    report = run(module(), validate="values")
    codes = {r.code.value for s in report.sites for r in s.reasons}
    assert codes == {"VALUES_UNCHECKED"}
    assert "limited to" in report.sites[0].reasons[0].sentence
    monkeypatch.undo()
    assert run(module(), validate="values").found


def test_another_librarys_op_is_left() -> None:
    _, report = run_stored("layer1_tp8_m4_opaque", validate="values")
    codes = {r.code.value for s in report.sites if s.pattern == "attn_res" for r in s.reasons}
    assert codes == {"VALUES_UNCHECKED"}


def test_a_symbolic_count_is_run_with_a_few_tokens() -> None:
    _, report = run_stored("layer3_tp8_mdyn_opaque", validate="values")
    kept = {s.pattern for s in report.found}
    assert "attention_projection" in kept
    assert {r.code.value for s in report.sites for r in s.reasons} <= {"VALUES_UNCHECKED"}


@pytest.mark.parametrize("part", ["shape", "dtype", "nothing"])
def test_a_reader_that_would_see_another_value_breaks_a_rule(part: str) -> None:
    graph = module()
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    value = node.meta["val"]
    if part == "shape":
        value = value[:1]
    elif part == "dtype":
        value = value.float()
    before = {n.name: n.meta.get("val") for n in graph.graph.nodes}
    if part == "nothing":
        verify(graph, before, [("was", value, node)])
        return
    with pytest.raises(VerifyError, match="its readers now read"):
        verify(graph, before, [("was", value, node)])

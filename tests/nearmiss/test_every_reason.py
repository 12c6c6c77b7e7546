"""Every reason code: one graph or setting that gives it, and one without the fault that does not.

A code without a case here fails, as does a reserved one that some check gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from build import Hand, aten, run, run_stored, stored
from check import examine, groups
from draw import spelled
from k3fuse.patterns.output_projection import OutputProjection
from k3fuse.patterns.sources.kimi_k3 import build
from k3fuse.rewriter import backend, safety, values
from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.reasons import HINTS, RESERVED, Code
from k3fuse.rewriter.report import Report, not_reached
from k3fuse.rewriter.site import Kernel, Replacement, Site
from k3fuse.rewriter.sources import SourceRequest
from k3fuse.rewriter.target import Target
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.routes import decide
from k3fuse_vllm.settings import Settings

ROOT = Path(__file__).parents[2]
# faulty: whether the fault is there. Returns the codes that were given.
Case = Callable[[bool], set[str]]
CASES: dict[Code, Case] = {}


def gives(code: Code) -> Callable[[Case], Case]:
    """This function gives the code with the fault and does not without."""

    def keep(function: Case) -> Case:
        CASES[code] = function
        return function

    return keep


def codes(report: Report) -> set[str]:
    return {r.code.value for s in report.sites for r in s.reasons}


# Modules around a family: family, healthy knobs, and the knobs that are wrong.
_GRAPHS: dict[Code, tuple[str, dict[str, Any], dict[str, Any]]] = {
    Code.OP_MISMATCH: ("opaque", {}, {"norm": False}),
    Code.ATTR_MISMATCH: ("router", {}, {"largest": False}),
    Code.DTYPE_MISMATCH: ("router", {}, {"logits": "narrow"}),
    Code.SHAPE_MISMATCH: ("router", {}, {"bias": "token"}),
    Code.STRIDE_OR_ALIGN: (
        "experts", {"square_shared": True, "shared": True}, {"down_linear": "untransposed"},
    ),
    Code.OPERAND_ORDER: ("router", {"groups": 0}, {"weights": "values"}),
    Code.INTERPOSED_OP: ("o_add_norm", {"linear": "linear"}, {"bias": True}),
    Code.ANCHOR_ABSENT: ("router", {}, {"weights": "pairs"}),
    Code.USER_ESCAPES: (
        "o_add_norm", {"between": "nothing"}, {"results": "partial too"},
    ),
    Code.GROUP_MISMATCH: ("experts", {"shared": True}, {"shared_group": "other"}),
}  # fmt: skip


def _of_a_graph(code: Code) -> Case:
    def given(faulty: bool) -> set[str]:
        family, healthy, wrong = _GRAPHS[code]
        world, other = groups()
        knobs = {**healthy, **(wrong if faulty else {})}
        if code is Code.GROUP_MISMATCH:
            knobs = {**knobs, "group": world}
            knobs = {k: other if v == "other" else v for k, v in knobs.items()}
        verdict = examine(spelled(family, knobs))
        assert verdict.outcome == ("refused" if faulty else "rewritten")
        return verdict.codes

    return given


CASES |= {code: _of_a_graph(code) for code in _GRAPHS}


def projection(write: str = "other") -> fx.GraphModule:
    """o-proj, add, norm by hand, with a write: "between" reads, into its "own" sum, or "other"."""
    h = Hand()
    x, w = h.input("x", 4, 32), h.input("w", 64, 32)
    residual, norm, other = h.input("r", 4, 64), h.input("n", 64), h.input("o", 4, 64)
    y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
    if write == "between":
        h.call(aten.add_.Tensor, residual, 1)
    total = h.call(aten.add.Tensor, y, residual)
    if write == "own":
        h.call(aten.add_.Tensor, total, 1)
    if write == "other":
        h.call(aten.add_.Tensor, other, 1)
    out = h.call(aten.rms_norm.default, total, [64], norm, 1e-5)
    return h.done(out, total)


@gives(Code.MUTATION_BETWEEN)
def _a_write_between_two_reads(faulty: bool) -> set[str]:
    return codes(run(projection("between" if faulty else "other")))


@gives(Code.ALIAS_RISK)
def _a_write_into_the_sites_own_storage(faulty: bool) -> set[str]:
    return codes(run(projection("own" if faulty else "other")))


@gives(Code.META_MISSING)
def _an_output_whose_fake_value_was_lost(faulty: bool) -> set[str]:
    h = Hand()
    x = h.input("x", 4, 4)
    y = h.call(aten.mul.Tensor, x, 2.0)
    view = h.view(y)
    if faulty:
        del y.meta["val"]
    return {r.code.value for r in safety.check(Site("a", "", y, (y,), {"x": x}, (y,), {}), view)}


@gives(Code.DISABLED_BY_USER)
def _a_disabled_pattern(faulty: bool) -> set[str]:
    return codes(run(projection(), disable=["output_projection"] if faulty else []))


@gives(Code.ARCH_UNSUPPORTED)
def _no_target_and_no_gpu(faulty: bool) -> set[str]:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return codes(run(projection(), target="none" if faulty else "reference"))


class _Planned(OutputProjection):
    available = False

    def kernel(self, *_: Any) -> Kernel | None:
        return Kernel("test", self.available, 1)


class _Built(_Planned):
    available = True


class _Wrong(OutputProjection):
    """The op is given another epsilon than the graph has."""

    def replacement(self, *args: Any) -> Replacement:
        planned = super().replacement(*args)
        return replace(planned, args=(*planned.args[:4], 3.0, *planned.args[5:]))


class _Second(OutputProjection):
    name = "second"
    priority = OutputProjection.priority + 1

    def find(self, view: Any) -> Iterator[Any]:
        for site in super().find(view):
            site.pattern = self.name
            yield site


@gives(Code.KERNEL_UNAVAILABLE)
def _a_kernel_that_is_planned_only(faulty: bool) -> set[str]:
    return codes(run(projection(), patterns=((_Planned if faulty else _Built)(),)))


@gives(Code.SHADOWED_BY)
def _two_patterns_of_one_site(faulty: bool) -> set[str]:
    both = (OutputProjection(), _Second()) if faulty else (OutputProjection(),)
    return codes(run(projection(), patterns=both, dry_run=True))


@gives(Code.VALUES_DIFFER)
def _an_op_that_computes_something_else(faulty: bool) -> set[str]:
    wrong = _Wrong() if faulty else OutputProjection()
    return codes(run(projection(), patterns=(wrong,), validate="values"))


@gives(Code.VALUES_UNCHECKED)
def _operands_too_large_to_run(faulty: bool) -> set[str]:
    with mock.patch.object(values, "MAX_BYTES", 100 if faulty else 1 << 20):
        return codes(run(projection(), validate="values"))


@gives(Code.RANK_DISAGREES)
def _another_rank_decided_otherwise(faulty: bool) -> set[str]:
    groups()
    options = Options.make({"target": "reference", "log": "off"})
    with mock.patch.object(backend, "agree", return_value=[1] if faulty else []):
        return codes(rewrite(projection(), options, consent=backend._ask_ranks))


@gives(Code.M_OUT_OF_RANGE)
def _a_step_of_65_tokens(faulty: bool) -> set[str]:
    request = SourceRequest(Target.parse("gb300:tp8"), 65 if faulty else 64, 1, "list")
    graph = build(request)[0]
    return codes(run(graph.module, "gb300:tp8", plan=True, groups=graph.groups))


@gives(Code.TP_UNSUPPORTED)
def _a_group_of_four(faulty: bool) -> set[str]:
    name = "layer0_tp8_m4_opaque"
    four = {"groups": dict.fromkeys(stored(name).meta["groups"], 4)} if faulty else {}
    return codes(run_stored(name, **four)[1])


@gives(Code.ENGINE_UNSUPPORTED)
def _pipeline_parallelism(faulty: bool) -> set[str]:
    facts = Facts(
        architecture="KimiK3ForConditionalGeneration", vllm="0.33.0", tp=8, full_graphs=True,
        capability=(10, 3), additional={"k3fuse": {}}, pp=2 if faulty else 1,
    )  # fmt: skip
    settings = Settings.of(facts)
    assert settings is not None
    return {r.code.value for r in decide(facts, settings).reasons}


@gives(Code.COMPILE_NOT_REACHED)
def _a_backend_that_was_never_called(faulty: bool) -> set[str]:
    report = not_reached("reference", {"router": 1}) if faulty else run(projection())
    return {word for note in report.notes for word in re.findall(r"[A-Z]+_[A-Z_]+", note)}


@pytest.mark.parametrize("code", [c for c in Code if c not in RESERVED])
def test_a_code_is_given_for_its_fault_and_not_without(code: Code) -> None:
    assert code in CASES, f"{code} has no case: add one here, with a control"
    assert code.value in CASES[code](True)
    assert CASES[code](False) == set()


def test_reserved_codes_are_given_by_nothing_and_all_others_by_something() -> None:
    text = "".join(
        p.read_text() for folder in ("rewriter", "patterns", "kernels")
        for p in (ROOT / folder).rglob("*.py") if p.name != "reasons.py"
    )  # fmt: skip
    given = set(re.findall(r"\bCode\.([A-Z_]+)", text))
    assert given == {c.value for c in Code if c not in RESERVED}
    assert set(HINTS) == set(Code)
    for code in Code:
        page = (ROOT / "docs" / "reasons" / f"{code}.md").read_text()
        assert ("Reserved:" in page) == (code in RESERVED), code

"""Hand-overs that are declined before anything is planned, and what each site is then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from k3fuse.patterns import symbols as s
from k3fuse.patterns.experts import Experts
from k3fuse.patterns.router import Router
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.site import Site
from test_hand_over import ALONE, JOINED, Spelling, calls, forms, judged

Change = Callable[[Site], Site]


def joined_as(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The router's form with the hand-over, changed."""
    real = Router.with_shared
    monkeypatch.setattr(Router, "with_shared", lambda *given: change(real(*given)))


def with_a_bias(form: Site) -> Site:
    return replace(form, values={**form.values, s.BIAS: s.YES})


def over_the_experts(form: Site, experts: list[Site]) -> Site:
    (taker,) = experts
    nodes, outputs = (*form.nodes, *taker.nodes), (*form.outputs, *taker.outputs)
    return replace(form, nodes=nodes, outputs=outputs)


def test_a_form_that_a_guard_refuses_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined_as(monkeypatch, with_a_bias)
    report, module = judged()
    assert forms(report) == ALONE
    assert set(calls(module)) == {"router", "experts"}
    notes = [site.parted[-1] for site in report.found]
    assert all("apart from" in note and "no bias" in note for note in notes), notes
    monkeypatch.undo()
    assert forms(judged()[0]) == JOINED  # the control


def test_forms_that_compute_a_node_twice_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Site] = []
    real = Experts._site

    def keep(*given: Any) -> Site:
        seen.append(made := real(*given))
        return made

    monkeypatch.setattr(Experts, "_site", keep)
    joined_as(monkeypatch, lambda form: over_the_experts(form, seen[-1:]))
    report, _ = judged()
    assert forms(report) == ALONE
    notes = [site.parted[-1] for site in report.found]
    assert all("belongs to another site" in note for note in notes), notes


def test_a_router_without_the_latent_row_hands_nothing_over() -> None:
    report, module = judged(Spelling(latent="of another row"))
    assert forms(report) == {"router": "router", "experts": ALONE["experts"]}
    assert calls(module)["router"].kwargs.get("quantize", False) is False
    assert len(calls(module)["experts"].args) == 17


@pytest.mark.parametrize("pattern", [Router, Experts])
def test_a_site_whose_call_cannot_be_made_is_refused_alone(
    pattern: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, site: Site, *_: Any) -> Any:
        raise Refusal(Reason(Code.STRIDE_OR_ALIGN, "not made here", (site.anchor.name,)))

    monkeypatch.setattr(pattern, "replacement", refuse)
    report, module = judged()
    (other,) = {"router", "experts"} - {pattern.name}
    assert forms(report) == {other: ALONE[other]}
    assert set(calls(module)) == {other}
    (site,) = [site for site in report.sites if site.pattern == pattern.name]
    assert [reason.sentence for reason in site.reasons] == ["not made here"]

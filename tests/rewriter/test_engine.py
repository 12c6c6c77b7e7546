"""The engine: switches, conflicts between patterns, hashes, the summary, what stays untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from torch import fx

from build import Hand, aten, identity, run, run_stored, stored
from k3fuse.rewriter.guards import Guard
from k3fuse.rewriter.options import OptionError, Options
from k3fuse.rewriter.pattern import Pattern, load_patterns
from k3fuse.rewriter.reasons import Code
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Replacement, Site
from k3fuse.rewriter.target import Target, TargetError
from k3fuse.rewriter.view import GraphView

# Needs the layer registry of an engine.
PATTERN = "experts_partials"
STACK = "stack5_tp8_m4_opaque"


def codes(report: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in report.sites:
        found.setdefault(site.pattern, set()).update(r.code.value for r in site.reasons)
    return found


# --- switches -----------------------------------------------------------------------------------


def test_a_disabled_pattern_is_refused_and_the_others_are_not() -> None:
    _, report = run_stored(STACK, disable=["router"])
    assert codes(report)["router"] == {"DISABLED_BY_USER"}
    assert {n: c.found for n, c in report.counts().items()} == {
        "attention_projection": 5, "output_projection": 5, "router": 0, "experts": 4,
        "experts_partials": 0, "attn_res": 6,
    }  # fmt: skip


def test_only_some_layers() -> None:
    _, report = run_stored(STACK, only_layers=[1, 3])
    assert {s.layer for s in report.found} == {1, 3}
    others = [s for s in report.sites if s.layer not in (1, 3)]
    assert others
    assert all([r.code for r in s.reasons] == [Code.DISABLED_BY_USER] for s in others)


def test_layers_without_names_are_counted_from_the_first() -> None:
    def layers(**how: Any) -> list[int | None]:
        h = Hand()
        x, residual = h.input("x", 4, 16), h.input("residual", 4, 32)
        for i in range(3):
            w, norm = h.input(f"w{i}", 32, 16 if i == 0 else 32), h.input(f"norm{i}", 32)
            y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
            residual = h.call(aten.add.Tensor, y, residual)
            x = h.call(aten.rms_norm.default, residual, [32], norm, 1e-5)
        report = run(h.done(x), **how)
        return [s.layer for s in report.sites if s.pattern == "output_projection"]

    assert layers() == [0, 1, 2]
    assert layers(first_layer=40) == [40, 41, 42]


def test_a_dry_run_finds_and_edits_nothing() -> None:
    file = stored(STACK)
    before = identity(file.module)
    report = run(file.module, "gb300:tp8", plan=True, dry_run=True, groups=file.meta["groups"])
    assert len(report.found) == 24
    assert identity(file.module) == before
    assert report.events == {}
    assert len(run_stored(STACK)[1].events) == 3  # the control: inserted, erased, replaced


def test_without_a_target_nothing_is_assumed() -> None:
    file, report = run_stored(STACK, target="none")
    assert {r.code for s in report.sites for r in s.reasons} == {Code.ARCH_UNSUPPORTED}
    assert not report.found
    assert len(report.sites) == 24
    assert file.module.graph is not None


@pytest.mark.parametrize(("target", "fits"), [("gb300:tp8", True), ("gb300:tp16", False)])
def test_a_target_of_another_rank_count_is_refused(target: str, fits: bool) -> None:
    """The sizes of either count are known, so only the comparison with the target refuses them."""
    _, report = run_stored(STACK, target=target)
    by_code = {r.code for s in report.sites for r in s.reasons}
    assert by_code == (set() if fits else {Code.GROUP_MISMATCH})
    # A mix alone reduces nothing: it is the same on every rank count.
    taken = {s.pattern for s in report.found}
    assert taken == (set(report.patterns) - {PATTERN} if fits else {"attn_res"})


# --- two patterns on the same nodes -------------------------------------------------------------


class _Sine(Pattern):
    """sin(x) -> sin(x), by a priority."""

    summary: ClassVar[str] = ""
    guards: ClassVar[tuple[Guard, ...]] = ()

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        for node in view.by_op.get("aten.sin", ()):
            yield Site(self.name, "", node, (node,), {"x": node.args[0]}, (node,), {})

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        # A second op of the same result stands for the fused one.
        args = (site.operands["x"],)
        return Replacement(aten.asin.default, args, {}, (Output(site.anchor, 0),))

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        return Kernel("test", True, 1)


class Wide(_Sine):
    name: ClassVar[str] = "wide"
    priority: ClassVar[int] = 2


class Narrow(_Sine):
    name: ClassVar[str] = "narrow"
    priority: ClassVar[int] = 1


def sines() -> fx.GraphModule:
    h = Hand()
    x = h.input("x", 4, 4)
    return h.done(h.call(aten.neg.default, h.call(aten.sin.default, x)))


@pytest.mark.parametrize("order", [(Wide, Narrow), (Narrow, Wide)])
def test_the_higher_priority_keeps_contested_nodes(order: tuple[type[Pattern], ...]) -> None:
    report = run(sines(), patterns=tuple(p() for p in order), dry_run=True)
    outcome = {s.pattern: s for s in report.sites}
    assert outcome["wide"].outcome == "found"
    (reason,) = outcome["narrow"].reasons
    assert reason.code is Code.SHADOWED_BY
    assert "wide" in reason.sentence
    alone = run(sines(), patterns=(Narrow(),), dry_run=True)
    assert [s.outcome for s in alone.sites] == ["found"]


class Entry:
    """An entry point of two packages at once."""

    def __init__(self, value: str, *found: type[Pattern]) -> None:
        self.name, self.value, self.found = "test", value, found

    def load(self) -> tuple[type[Pattern], ...]:
        return self.found


@pytest.mark.parametrize("other", ["package:PATTERNS", "copy:PATTERNS"])
def test_two_patterns_of_one_name_are_an_error(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry point that two records of an installation name is one."""
    import k3fuse.rewriter.pattern as pattern

    entries = [Entry("package:PATTERNS", Wide), Entry(other, Wide)]
    monkeypatch.setattr(pattern, "entry_points", lambda group: entries)
    if other == "package:PATTERNS":
        assert [p.name for p in load_patterns()] == ["wide"]
    else:
        with pytest.raises(RuntimeError, match="'wide' is registered twice"):
            load_patterns()


def test_the_engine_knows_no_pattern_by_name() -> None:
    report = run(sines(), patterns=())
    assert (report.sites, report.near, report.patterns) == ([], [], ())


# --- hash, summary, JSON ------------------------------------------------------------------------


def test_the_site_hash_is_stable_and_tells_one_site_apart() -> None:
    first, second = (run_stored(STACK)[1] for _ in range(2))
    assert first.site_hash() == second.site_hash()
    fewer = run_stored(STACK, only_layers=[0, 1, 2, 3])[1]
    assert len(first.found) > len(fewer.found)
    other_m = run_stored("stack5_tp8_m64_opaque")[1]
    assert len({first.site_hash(), fewer.site_hash(), other_m.site_hash()}) == 3


@pytest.mark.parametrize(
    "how", [{}, {"disable": ["router", "experts"], "only_layers": [1]}, {"target": "none"}]
)
def test_the_summary_has_at_most_twelve_lines(how: dict[str, Any]) -> None:
    _, report = run_stored(STACK, **how)
    for explain in (0, 3, 6, 50):
        lines = report.summary(explain=explain).splitlines()
        assert len(lines) <= 12
    text = report.summary()
    assert all(name in text for name in report.patterns)
    assert f"{report.nodes_before} -> {report.nodes_after} nodes" in text


def test_the_summary_names_the_most_frequent_reason() -> None:
    _, report = run_stored(STACK, target="none")
    assert "6 x ARCH_UNSUPPORTED  attn_res" in report.summary(explain=6)


def test_the_document_has_the_keys_of_the_command_contract() -> None:
    _, report = run_stored(STACK)
    document = report.to_json()
    assert {
        "schema", "target", "m", "patterns", "sites", "launches", "nodes", "seconds",
    } <= set(document)  # fmt: skip
    for counts in document["patterns"].values():
        assert set(counts) == {"expected", "found", "near", "refused"}
    for site in document["sites"]:
        assert {"layer", "pattern", "outcome", "reason", "kernel"} <= set(site)
    assert set(document["launches"]) == {"kda_layer", "mla_layer"}
    assert document["nodes"] == {"before": report.nodes_before, "after": report.nodes_after}


def test_events_are_what_happened() -> None:
    file, report = run_stored(STACK)
    change = report.events["inserted"] - report.events["erased"]
    assert report.nodes_after - report.nodes_before == change
    assert report.nodes_after == len(file.module.graph.nodes)
    assert report.events["replaced"] >= len(report.found)
    new = [n for n in file.module.graph.nodes if "k3fuse" in n.meta]
    assert all(n.meta["k3fuse"]["replaced"] for n in new)
    assert {n.meta["k3fuse"]["pattern"] for n in new} == set(report.patterns) - {PATTERN}


def test_an_expectation_that_is_not_met_is_counted() -> None:
    _, report = run_stored(STACK, expect={"router": 6, "experts": 4}, disable=["experts"])
    assert report.missing() == {"router": 2, "experts": 4}


# --- options and targets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"targt": "x"}, "option 'targt' does not exist; use one of "),
        (
            {"inner": "nvfuser"},
            "option inner='nvfuser' is unknown; use one of inductor, ",
        ),
        ({"validate": "all"}, "option validate='all' is unknown"),
        ({"log": "loud"}, "option log='loud' is unknown"),
        ({"target": 8}, "option target=8 is no target"),
        ({"disable": "router"}, "option disable='router' is a string; use a list"),
        ({"plan": "yes"}, "option plan='yes' is no bool"),
        ({"batch_invariant": 1}, "option batch_invariant=1 is no bool"),
        ({"row_sharded": "mla"}, "option row_sharded='mla' is no bool"),
        ({"prefetch": "next"}, "option prefetch='next' is no bool"),
    ],
)
def test_a_wrong_option_names_itself_and_the_fix(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as error:
        Options.make(given)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("gb300", "is not of the form ARCH:tpN"),
        ("gb300:tp4", "tp4 is not covered"),
        ("h100:tp8", "architecture 'h100' is unknown"),
    ],
)
def test_a_wrong_target_names_what_is_known(text: str, part: str) -> None:
    with pytest.raises(TargetError) as error:
        Target.parse(text)
    assert part in str(error.value)
    assert "gb300:tp8, gb300:tp16, reference" in str(error.value)


def test_the_environment_fills_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3FUSE_TARGET", "gb300:tp16")
    monkeypatch.setenv("K3FUSE_DISABLE", "router, experts")
    monkeypatch.setenv("K3FUSE_ONLY_LAYERS", "0,3")
    monkeypatch.setenv("K3FUSE_PLAN", "1")
    options = Options.make({"plan": False})
    assert options.target == Target("gb300", 16)
    assert (options.disable, options.only_layers, options.plan) == (
        ("router", "experts"),
        (0, 3),
        False,
    )
    assert Options.make().plan is True
    assert Options.make().batch_invariant is False
    monkeypatch.setenv("K3FUSE_BATCH_INVARIANT", "1")
    monkeypatch.setenv("K3FUSE_ROW_SHARDED", "1")
    assert (Options.make().batch_invariant, Options.make().row_sharded) == (True, True)
    assert Options.make().prefetch is False
    monkeypatch.setenv("K3FUSE_PREFETCH", "1")
    assert Options.make().prefetch is True
    monkeypatch.setenv("K3FUSE_STRICT", "yes")
    with pytest.raises(OptionError, match="K3FUSE_STRICT='yes' is neither 0 nor 1"):
        Options.make()
    monkeypatch.setenv("K3FUSE_STRICT", "0")
    monkeypatch.setenv("K3FUSE_ONLY_LAYERS", "a")
    with pytest.raises(OptionError, match="is no list of integers"):
        Options.make()


def test_changed_options_are_those_that_differ() -> None:
    assert Options.make().changed() == {}
    assert Options.make({"plan": True, "log": "off"}).changed() == {"plan": True, "log": "off"}

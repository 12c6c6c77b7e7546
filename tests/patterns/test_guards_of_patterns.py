"""Every guard of every pattern: an input that it alone refuses, a control, and both mutations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import sympy

from build import run_stored
from expert_layer import as_loaded
from k3fuse.patterns.sources.kimi_k3 import build
from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.guards import Guard, failures, name
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import Pattern, load_patterns
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.sources import SourceRequest
from k3fuse.rewriter.target import Target

PATTERNS = {p.name: p for p in load_patterns()}
CASES = [(p.name, i) for p in PATTERNS.values() for i in range(len(p.guards))]

# What a symbol can be instead; pairs that must change together come from TOGETHER.
INSTEAD: dict[str, list[sympy.Basic]] = {
    "M": [sympy.Integer(65), sympy.Integer(0)],
    "TP": [sympy.Integer(4), sympy.Integer(1)],
    "num_blocks": [sympy.Integer(9)],
    "bias": [name("yes")],
    "row_all_reduced": [name("no")],
    "group_named": [name("no")],
    "weight_rows_contiguous": [name("no")],
    "groups": [name("several")],
    "scoring": [name("softmax")],
    "activation": [name("silu")],
    "shared_activation": [name("other")],
    "logits_dtype": [name("bfloat16")],
    "bias_dtype": [name("bfloat16")],
    "experts_dtype": [name("bfloat16")],
    "layout": [name("marlin")],
    "weights": [name("not packed")],
    "activations": [name("bf16")],
    "placed": [name("w2 is not there")],
    "betas": [name("4, none")],
    "renormalised": [name("no")],
    "scale": [name("2.5")],
    "expert_groups": [sympy.Integer(8)],
    "routing": [name("CustomRoutingRouter")],
    "features": [name("LoRA")],
    "input_ids": [name("given")],
    "mixed_tokens": [sympy.Integer(9)],
    "E_rank": [sympy.Integer(112)],
}
DTYPES = [name("float32"), name("float16"), name("mixed")]
# At TP4 the sizes of a rank are other ones; then only the group's size is wrong.
TOGETHER: dict[str, list[dict[str, int]]] = {
    "attention_projection": [{"TP": 4, "N": 4 * 12288 // 4 + 128 + 96 // 4}],
    "output_projection": [{"TP": 4, "K": 12288 // 4}],
    "experts": [{"TP": 4, "I": 3072 // 4}],
    "experts_partials": [
        {"TP": 4, "I": 3072 // 4},
        {"E": 384, "E_rank": 384},
        {"L": 4096, "row": 4096},
    ],
}


@functools.cache
def accepted() -> dict[str, list[Site]]:
    """Accepted sites of GB300, TP8, by pattern: Kimi K3's own model, and vLLM's graphs."""
    graph = build(SourceRequest(Target.parse("gb300:tp8"), 8, 4, "list"))[0]
    options = {"target": "gb300:tp8", "plan": True, "groups": graph.groups, "log": "off"}
    reports = [rewrite(graph.module, Options.make(options)), run_stored("stack5_tp8_m4_opaque")[1]]
    found: dict[str, list[Site]] = {}
    for report in reports:
        for site in report.found:
            found.setdefault(site.pattern, []).append(site)
    with pytest.MonkeyPatch.context() as patched:
        as_loaded(patched)
        # Only found: what replaces the site needs vLLM.
        report = run_stored("stack5_tp8_m4_opaque", dry_run=True)[1]
    found["experts_partials"] = [s for s in report.found if s.pattern == "experts_partials"]
    return found


def changes(pattern: str, guard: Guard) -> Iterator[dict[sympy.Symbol, sympy.Basic]]:
    """Small changes of the values that this guard reads."""
    by_name = {s.name: s for p in PATTERNS.values() for g in p.guards for s in g.symbols}
    symbols = [s for s in guard.symbols if s.name in by_name]
    for together in TOGETHER.get(pattern, []):
        yield {by_name[k]: sympy.Integer(v) for k, v in together.items() if k in by_name}
    for symbol in symbols:
        default = DTYPES if symbol.name.endswith("dtype") else [sympy.Integer(5)]
        for value in INSTEAD.get(symbol.name, default):
            yield {symbol: value}
    pairs = [s for s in by_name.values() if s.name in ("x_dtype", "w_dtype")]
    for value in DTYPES:
        yield dict.fromkeys(pairs, value)


def codes(
    guards: Any, values: Mapping[sympy.Symbol, sympy.Basic], kernel: bool = True
) -> list[str]:
    _, reasons = failures(guards, values, None, ("node",), kernel_scope=kernel, row_sharded=kernel)
    return [r.code.value for r in reasons]


def refused_alone(pattern: Pattern, guard: Guard) -> tuple[Site, dict[sympy.Symbol, sympy.Basic]]:
    """An accepted site and changed values that fail this guard and no other one."""
    others = [g for g in pattern.guards if g is not guard]
    for site, change in itertools.product(accepted()[pattern.name], changes(pattern.name, guard)):
        values = {**site.values, **{k: v for k, v in change.items() if k in site.values}}
        if codes([guard], values) and not codes(others, values):
            return site, values
    raise AssertionError(f"{pattern.name}: no input is refused by {guard.text!r} alone")


@pytest.mark.parametrize(("pattern", "index"), CASES)
def test_a_guard_refuses_alone_and_both_mutations_are_noticed(pattern: str, index: int) -> None:
    owner = PATTERNS[pattern]
    guard = owner.guards[index]
    site, altered = refused_alone(owner, guard)
    assert codes(owner.guards, site.values) == []  # the control
    assert codes(owner.guards, altered) == [guard.code.value]

    def mutated(relation: sympy.Basic) -> tuple[Guard, ...]:
        weak = dataclasses.replace(guard, relation=relation)
        return tuple(weak if g is guard else g for g in owner.guards)

    assert codes(mutated(sympy.true), altered) == []
    assert codes(mutated(sympy.false), site.values) == [guard.code.value]


@pytest.mark.parametrize(("pattern", "index"), CASES)
def test_a_missing_value_fails_the_guard(pattern: str, index: int) -> None:
    owner = PATTERNS[pattern]
    guard = owner.guards[index]
    values = accepted()[pattern][0].values
    for symbol in guard.symbols:
        without = {k: v for k, v in values.items() if k is not symbol}
        assert guard.code.value in codes(owner.guards, without)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scope_decides_what_a_reference_target_asks(pattern: str) -> None:
    owner = PATTERNS[pattern]
    for guard in owner.guards:
        _, altered = refused_alone(owner, guard)
        expected = [guard.code.value] if guard.scope == "always" else []
        assert codes(owner.guards, altered, kernel=False) == expected, guard.text


def test_every_pattern_has_sites_to_guard() -> None:
    assert set(accepted()) == set(PATTERNS)
    assert all(g.text and g.code for p in PATTERNS.values() for g in p.guards)
    forms = {(s.pattern, s.form) for sites in accepted().values() for s in sites}
    assert len(forms) >= 10, sorted(forms)

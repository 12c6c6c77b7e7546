"""The key: every factor changes it, hash seed and import order do not, two keys can be compared."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from click.testing import CliRunner

from build import Hand, aten, run
from k3fuse.rewriter import key as keys
from k3fuse.rewriter.backend import _JointPass
from k3fuse.rewriter.cli import main
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
from k3fuse.rewriter.report import Report

BASE = {"target": "gb300:tp8", "log": "off"}
ROOT = Path(__file__).parents[2]


def report(m: int = 4, dtype: torch.dtype = torch.bfloat16) -> Report:
    h = Hand()
    x, w = h.input("x", m, 16, dtype=dtype), h.input("w", 32, 16, dtype=dtype)
    residual, norm = h.input("residual", m, 32, dtype=dtype), h.input("norm", 32, dtype=dtype)
    y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
    total = h.call(aten.add.Tensor, y, residual)
    return run(h.done(h.call(aten.rms_norm.default, total, [32], norm, 1e-5), total))


def made(options: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
    chosen = Options.make({**BASE, **(options or {})})
    return keys.factors(chosen, more.get("patterns") or load_patterns(), more.get("report"))


def patterns_with(**change: Any) -> tuple[Any, ...]:
    """The loaded patterns, the first with an attribute changed."""
    first, *rest = load_patterns()
    return (type("Changed", (type(first),), change)(), *rest)


def guard_constant() -> tuple[Any, ...]:
    first = load_patterns()[0]
    weak = dataclasses.replace(first.guards[0], relation=sympy.true)
    return patterns_with(guards=(weak, *first.guards[1:]))


FACTORS: dict[str, Callable[[pytest.MonkeyPatch], dict[str, str]]] = {
    "target architecture": lambda _: made({"target": "reference"}),
    "ranks": lambda _: made({"target": "gb300:tp16"}),
    "inner compiler": lambda _: made({"inner": "eager"}),
    "plan": lambda _: made({"plan": True}),
    "dry run": lambda _: made({"dry_run": True}),
    "strict": lambda _: made({"strict": True}),
    "expected sites": lambda _: made({"expect": {"router": 1}}),
    "a disabled pattern": lambda _: made({"disable": ["router"]}),
    "layers": lambda _: made({"only_layers": [1]}),
    "first layer": lambda _: made({"first_layer": 3}),
    "validation": lambda _: made({"validate": "values"}),
    "one engine": lambda _: made({"batch_invariant": True}),
    "rows shared out": lambda _: made({"row_sharded": True}),
    "next weights": lambda _: made({"prefetch": True}),
    "group sizes": lambda _: made({"groups": {"tp:0": 8}}),
    "guard constant": lambda _: made(patterns=guard_constant()),
    "priority": lambda _: made(patterns=patterns_with(priority=999)),
    "a pattern less": lambda _: made(patterns=load_patterns()[1:]),
}  # fmt: skip


def environment(patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setenv("K3FUSE_EXTRA_SWITCH", "1")
    return made()


def source(patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setattr(keys, "source_digest", lambda folder: "other")
    return made()


def versions(patch: pytest.MonkeyPatch) -> dict[str, str]:
    real = keys._version
    patch.setattr(keys, "_version", lambda n: "9" if n == "nvidia-cutlass-dsl" else real(n))
    return made()


def capability(patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setattr(keys, "_capability", lambda: "(9, 0)")
    return made()


def rank(patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setattr(keys, "_rank", lambda: "1")
    return made()


FACTORS |= {
    "environment switch": environment, "source": source, "kernel compiler": versions,
    "GPU": capability, "rank": rank,
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_changes_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made()
    after = FACTORS[name](monkeypatch)
    assert keys.key(after) != keys.key(before)
    assert keys.differences(before, after)


def test_there_are_enough_factors_and_equal_ones_give_one_key() -> None:
    assert len(FACTORS) >= 15
    assert keys.key(made()) == keys.key(made())
    assert keys.key(dict(reversed(made().items()))) == keys.key(made())
    for silent in ({"log": "all"}, {"dump_dir": "/somewhere"}):
        assert keys.key(made(silent)) == keys.key(made())


@pytest.mark.parametrize(
    ("change", "factor"), [({"m": 5}, "graph.tokens"), ({"dtype": torch.float16}, "graph.values")]
)
def test_the_graphs_own_factors(change: dict[str, Any], factor: str) -> None:
    before, after = made(report=report()), made(report=report(**change))
    assert factor in keys.differences(before, after)
    assert made(report=report()) == before


def test_inductors_key_of_the_pass_follows() -> None:
    first, second = (_JointPass(Options.make({**BASE, "plan": p})) for p in (False, True))
    assert first.uuid() != second.uuid()
    assert first.uuid() == _JointPass(Options.make(BASE)).uuid()


_CHILD = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
from k3fuse.rewriter.key import factors, key
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import load_patterns
print(key(factors(Options.make({"target": "gb300:tp8"}), load_patterns())))
"""


def test_hash_seed_and_import_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = ("k3fuse.patterns.router,k3fuse.rewriter.backend", "sympy,k3fuse.kernels.tail.op")
    for name in [n for n in os.environ if n.startswith("K3FUSE_")]:
        monkeypatch.delenv(name)
    found = {
        subprocess.run(
            [sys.executable, "-c", _CHILD, order],
            env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True,
            cwd=ROOT,
        ).stdout.strip()
        for order, seed in zip(orders, ("1", "77"), strict=True)
    }  # fmt: skip
    assert found == {keys.key(made({"log": "summary"}))}


def test_the_command_prints_factors_and_differences(tmp_path: Path) -> None:
    files = []
    for name, options in (("a", {}), ("b", {"plan": True})):
        found = report()
        found.factors = made(options, report=found)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(found.to_json()))
    runner = CliRunner()
    alone = runner.invoke(main, ["key", str(files[0]), "--json"])
    assert len(json.loads(alone.output)["factors"]) >= 15
    both = runner.invoke(main, ["key", str(files[0]), str(files[1]), "--json"])
    assert json.loads(both.output)["differences"] == {"option.plan": ["False", "True"]}
    text = runner.invoke(main, ["key", str(files[0]), str(files[1])]).output
    assert "option.plan" in text
    assert "False -> True" in text
    same = runner.invoke(main, ["key", str(files[0]), str(files[0])]).output
    assert "no factor differs" in same
    files[0].write_text(json.dumps({**report().to_json(), "factors": {}}))
    assert runner.invoke(main, ["key", str(files[0])]).exit_code == 2

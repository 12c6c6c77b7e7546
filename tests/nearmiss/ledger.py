"""What a long run found: counts by family, kind and number of defects, and of which code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCHEMA = "k3fuse.nearmiss/3"
PROBLEMS = ("false accept", "crash", "wrong code", "missed control")
_OF_AN_OP = ("reference", "op", "check", "layouts")
# Of kernels/common: what references and ops compute and register with.
_COMMON = (
    "check", "collective", "composition", "dispatch", "encoding", "library", "microscaling",
    "numerics", "program", "tolerances",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is counted of one examined graph; it comes from another process as a tuple would."""

    number: int
    family: str
    outcome: str
    kinds: tuple[str, ...]
    compared: bool
    problem: str = ""


def code() -> dict[str, str]:
    """Digests of what a verdict depends on: sources, guards, how graphs are made, and torch."""
    from k3fuse.rewriter.pattern import load_patterns

    root = HERE.parents[1]
    guards = [
        (p.name, g.text, g.code.value, g.scope, g.proof) for p in load_patterns() for g in p.guards
    ]
    computed = [f for n in _OF_AN_OP for f in root.glob(f"kernels/*/{n}.py")]
    computed += [root / "kernels" / "common" / f"{n}.py" for n in _COMMON]
    runs = ("test_", "conftest", "run", "ledger")
    generator = [p for p in HERE.glob("*.py") if not p.name.startswith(runs)]
    generator += [HERE.parent / "tolerances.py", HERE.parent / "rewriter" / "build.py"]
    return {
        "rewriter": _files([*root.glob("rewriter/*.py"), *root.glob("rewriter/recognise/*.py")]),
        "patterns": _files(root.glob("patterns/*.py")),
        "references": _files(computed),
        "guards": _digest(json.dumps(guards).encode()),
        "generator": _files(generator),
        "torch": version("torch"),
    }


def _files(paths: Iterable[Path]) -> str:
    """Of names and contents: a file that moves is another digest."""
    return _digest(
        b"".join(f"{p.name} {_digest(p.read_bytes())}\n".encode() for p in sorted(paths))
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def new(seed: int) -> dict[str, Any]:
    """An empty ledger."""
    return {
        "schema": SCHEMA, "seed": seed, "code": code(), "next": 0, "graphs": 0, "unbuildable": 0,
        "rewritten": 0, "compared": 0, "seconds": 0.0, "by_family": {}, "by_kind": {},
        "defects": {}, "problems": dict.fromkeys(PROBLEMS, 0), "examples": [], "versions": {},
        "dates": [], "earlier": [],
    }  # fmt: skip


def stale(ledger: dict[str, Any]) -> list[str]:
    """Parts of the code that the ledger's figures are no longer about."""
    now, then = code(), ledger["code"]
    return sorted(part for part in now.keys() | then.keys() if now.get(part) != then.get(part))


def load(path: Path, seed: int, again: bool) -> dict[str, Any]:
    """The ledger to continue. Raises SystemExit where it is of another seed or of other code."""
    if not path.exists():
        return new(seed)
    ledger: dict[str, Any] = json.loads(path.read_text())
    if not str(ledger.get("schema")).startswith(SCHEMA.split("/")[0]):
        raise SystemExit(f"{path} is no ledger of schema {SCHEMA}; name another file")
    changed = stale(ledger)
    if again and (changed or ledger["seed"] != seed):
        kept = ("seed", "code", "graphs", "rewritten", "compared", "problems", "dates")
        old = [*ledger["earlier"], {k: ledger[k] for k in kept}]
        return {**new(seed), "earlier": old}
    if changed or ledger["seed"] != seed:
        why = f"of other code ({', '.join(changed)})" if changed else f"of seed {ledger['seed']}"
        raise SystemExit(f"{path} is {why}; name another file, or start anew with --again")
    return ledger


def write(ledger: dict[str, Any], path: Path) -> None:
    """Atomically, so that a killed run leaves the last whole state."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n")
    os.replace(beside, path)


def record(ledger: dict[str, Any], row: Row) -> None:
    """Count one examined graph. Raises ValueError out of turn: a graph would be left out."""
    if row.number != ledger["next"]:
        raise ValueError(f"graph {row.number} after {ledger['next'] - 1}; keep their order")
    ledger["next"] = row.number + 1
    if row.outcome == "unbuildable":
        ledger["unbuildable"] += 1
        return
    ledger["graphs"] += 1
    ledger["rewritten"] += row.outcome == "rewritten"
    ledger["compared"] += row.compared
    tables = [
        ("by_family", [row.family]),
        ("by_kind", row.kinds or ["none"]),
        ("defects", [str(len(row.kinds))]),
    ]
    for table, keys in tables:
        for key in keys:
            counts = ledger[table].setdefault(key, {})
            counts[row.outcome] = counts.get(row.outcome, 0) + 1
    if row.problem:
        ledger["problems"][row.problem.split(":")[0]] += 1
        if len(ledger["examples"]) < 200:
            ledger["examples"].append(f"{row.number}: {row.problem}")

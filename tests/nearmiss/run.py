"""Nightly: many near-miss graphs, in pieces, with a ledger.

    python tests/nearmiss/run.py --graphs 100000 --seed 1 --ledger ledger.json

Continues where the ledger stopped; --seconds ends a piece early. A ledger of other code is not
continued: --again starts anew in the same file and keeps the old figures under "earlier". --status
says whether the ledger is of this code. Exit code 1 where the property failed anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "rewriter")]

SCHEMA = "k3fuse.nearmiss/2"
PROBLEMS = ("false accept", "crash", "wrong code", "missed control")


def code() -> dict[str, str]:
    """Digests of what a graph's verdict depends on: sources, guards and the drawing of graphs."""
    import draw
    from k3fuse.rewriter.pattern import load_patterns

    root = HERE.parents[1]
    guards = [
        (p.name, g.text, g.code.value, g.scope, g.proof) for p in load_patterns() for g in p.guards
    ]
    drawn = [draw.SHARED, *sorted(d.name for d in draw.CATALOGUE), *draw.EDITS, *draw.FAMILIES]
    references = [f for n in ("reference", "op") for f in root.glob(f"kernels/*/{n}.py")]
    return {
        "rewriter": _files([*root.glob("rewriter/*.py"), *root.glob("rewriter/recognise/*.py")]),
        "patterns": _files(root.glob("patterns/*.py")),
        "references": _files(references),
        "guards": _digest(json.dumps(guards).encode()),
        "draw": _digest(json.dumps(drawn).encode()),
    }


def _files(paths: Iterable[Path]) -> str:
    return _digest(b"".join(_digest(p.read_bytes()).encode() for p in sorted(paths)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def new_ledger(seed: int) -> dict[str, Any]:
    """An empty ledger."""
    return {
        "schema": SCHEMA, "seed": seed, "code": code(), "next": 0, "graphs": 0, "unbuildable": 0,
        "rewritten": 0, "compared": 0, "seconds": 0.0, "by_family": {}, "by_kind": {},
        "defects": {}, "problems": dict.fromkeys(PROBLEMS, 0), "examples": [], "versions": {},
        "dates": [], "earlier": [],
    }  # fmt: skip


def stale(ledger: dict[str, Any]) -> list[str]:
    """Parts of the code that the ledger's figures are no longer about."""
    return [part for part, digest in code().items() if ledger["code"].get(part) != digest]


def load(path: Path, seed: int, again: bool) -> dict[str, Any]:
    """The ledger to continue. Raises SystemExit where it is of another seed or of other code."""
    if not path.exists():
        return new_ledger(seed)
    ledger: dict[str, Any] = json.loads(path.read_text())
    if ledger.get("schema") != SCHEMA:
        raise SystemExit(f"{path} is no ledger of schema {SCHEMA}; name another file")
    changed = stale(ledger)
    if again and (changed or ledger["seed"] != seed):
        kept = ("seed", "code", "graphs", "rewritten", "compared", "problems", "dates")
        old = [*ledger["earlier"], {k: ledger[k] for k in kept}]
        return {**new_ledger(seed), "earlier": old}
    if changed or ledger["seed"] != seed:
        why = f"of other code ({', '.join(changed)})" if changed else f"of seed {ledger['seed']}"
        raise SystemExit(f"{path} is {why}; name another file, or start anew with --again")
    return ledger


def write(ledger: dict[str, Any], path: Path) -> None:
    """Atomically, so that a killed run leaves the last whole state."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n")
    os.replace(beside, path)


def record(ledger: dict[str, Any], found: Any) -> None:
    """Count one examined graph."""
    ledger["next"] = found.number + 1
    outcome = found.verdict.outcome
    if outcome == "unbuildable":
        ledger["unbuildable"] += 1
        return
    graph = found.graph
    ledger["graphs"] += 1
    ledger["rewritten"] += outcome == "rewritten"
    ledger["compared"] += bool(found.verdict.found)
    count = str(len(found.declared) + len(graph.edits))
    kinds = [d.kind for d in found.declared] + list(graph.edits) or ["none"]
    tables = [("by_family", [graph.family]), ("by_kind", kinds), ("defects", [count])]
    for table, keys in tables:
        for key in keys:
            row = ledger[table].setdefault(key, {})
            row[outcome] = row.get(outcome, 0) + 1
    if found.problem:
        ledger["problems"][found.problem.split(":")[0]] += 1
        if len(ledger["examples"]) < 200:
            ledger["examples"].append(f"{found.number}: {found.problem} | {graph.text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--graphs", type=int, default=100_000, help="examine so many in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the piece then")
    parser.add_argument("--again", action="store_true", help="start anew where the code changed")
    parser.add_argument("--status", action="store_true", help="only say what the ledger is about")
    given = parser.parse_args()
    if given.status:
        ledger = json.loads(given.ledger.read_text())
        changed = stale(ledger)
        about = f"other code: {', '.join(changed)} changed" if changed else "this code"
        print(f"{ledger['graphs']} graphs of seed {ledger['seed']}, of {about}")
        return int(bool(changed))

    import torch

    from check import groups
    from draw import examined

    torch.set_num_threads(1)
    groups()
    ledger = load(given.ledger, given.seed, given.again)
    begin, used = time.monotonic(), time.process_time()
    today = datetime.date.today().isoformat()
    while ledger["graphs"] < given.graphs and time.monotonic() - begin < given.seconds:
        for number in range(ledger["next"], ledger["next"] + 64):
            if ledger["graphs"] < given.graphs:
                record(ledger, examined(given.seed, number))
        ledger["seconds"] = round(ledger["seconds"] + time.process_time() - used, 1)
        used = time.process_time()
        ledger["versions"] = {
            "k3fuse": version("k3fuse"), "torch": torch.__version__,
            "python": platform.python_version(),
        }  # fmt: skip
        ledger["dates"] = sorted({*ledger["dates"], today})
        write(ledger, given.ledger)
    outcomes: Counter[str] = Counter()
    for row in ledger["by_family"].values():
        outcomes.update(row)
    print(f"{ledger['graphs']} graphs of seed {given.seed}: {dict(outcomes)}")
    print(f"problems: {ledger['problems']}")
    for line in ledger["examples"][-20:]:
        print(line[:400])
    return int(any(ledger["problems"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""Nightly: many near-miss graphs, in pieces, with a ledger.

    python tests/nearmiss/run.py --graphs 100000 --seed 1 --ledger ledger.json

Continues where the ledger stopped; --seconds ends a piece early. Exit code 1 where the property
failed anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "rewriter")]

SCHEMA = "k3fuse.nearmiss/1"
PROBLEMS = ("false accept", "crash", "wrong code", "missed control")


def new_ledger(seed: int) -> dict[str, Any]:
    """An empty ledger."""
    return {
        "schema": SCHEMA, "seed": seed, "next": 0, "graphs": 0, "unbuildable": 0, "rewritten": 0,
        "compared": 0, "seconds": 0.0, "by_family": {}, "by_kind": {}, "defects": {},
        "problems": dict.fromkeys(PROBLEMS, 0), "examples": [], "versions": {}, "dates": [],
    }  # fmt: skip


def load(path: Path, seed: int) -> dict[str, Any]:
    """The ledger to continue. Raises SystemExit where it belongs to another seed."""
    if not path.exists():
        return new_ledger(seed)
    ledger: dict[str, Any] = json.loads(path.read_text())
    if ledger.get("schema") != SCHEMA or ledger.get("seed") != seed:
        raise SystemExit(f"{path} is no ledger of seed {seed}; name another file or that seed")
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
    given = parser.parse_args()

    import torch

    from check import groups
    from draw import examined

    torch.set_num_threads(1)
    groups()
    ledger = load(given.ledger, given.seed)
    begin, used = time.monotonic(), time.process_time()
    today = datetime.date.today().isoformat()
    while ledger["graphs"] < given.graphs and time.monotonic() - begin < given.seconds:
        for number in range(ledger["next"], ledger["next"] + 60):
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

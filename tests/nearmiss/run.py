"""Nightly: many near-miss graphs, in pieces, with a ledger.

    python tests/nearmiss/run.py --graphs 100000 --seed 1 --ledger ledger.json --processes 2

Continues where the ledger stopped; --seconds ends a piece early, and the ledger is written every
few seconds. The counts do not depend on the number of processes. A ledger of other code is not
continued: --again starts anew in the same file and keeps the old figures under "earlier". --status
says whether the ledger is of this code. Exit code 1 where the property failed anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "rewriter")]

import ledger as books  # noqa: E402 - by the path above

# Numbers that a process takes at once: whole shared modules, seconds of work.
CHUNK = 256


def ready() -> None:
    """Set a process up for graphs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from check import groups

    torch.set_num_threads(1)
    groups()


def chunk(seed: int, numbers: range) -> tuple[list[books.Row], float]:
    """Examine these graphs; also the processor seconds it took."""
    from draw import examined

    begin, rows = time.process_time(), []
    for number in numbers:
        found = examined(seed, number)
        problem = f"{found.problem} | {found.graph.text()}" if found.problem else ""
        kinds = (*(d.kind for d in found.declared), *found.graph.edits)
        rows.append(
            books.Row(
                number, found.graph.family, found.verdict.outcome, kinds,
                bool(found.verdict.found), problem,
            )
        )  # fmt: skip
    return rows, time.process_time() - begin


def _numbers(start: int) -> Iterator[range]:
    """From `start` on, cut where shared modules end."""
    while True:
        stop = (start // CHUNK + 1) * CHUNK
        yield range(start, stop)
        start = stop


def chunks(seed: int, start: int, processes: int) -> Iterator[tuple[list[books.Row], float]]:
    """Examined chunks in order, without end."""
    numbers = _numbers(start)
    if processes == 1:
        ready()
        for piece in numbers:
            yield chunk(seed, piece)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=ready)
    waiting: deque[Future[tuple[list[books.Row], float]]] = deque()
    try:
        while True:
            while len(waiting) < 2 * processes:
                waiting.append(pool.submit(chunk, seed, next(numbers)))
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def progress(ledger: dict[str, Any], begin: float, done: int, wanted: int) -> str:
    """One line: how far, how fast by the clock, what is left."""
    rate = max(done / max(time.monotonic() - begin, 1e-3), 1e-3)
    left = (wanted - ledger["graphs"]) / rate / 60
    failed = sum(ledger["problems"].values())
    return (
        f"{ledger['graphs']:,} of {wanted:,} graphs, {rate:.0f} a second, {failed} failed, "
        f"{left:.0f} minutes to go"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--graphs", type=int, default=100_000, help="examine so many in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the piece then")
    parser.add_argument("--processes", type=int, default=1, help="at once (default 1)")
    parser.add_argument("--again", action="store_true", help="start anew where the code changed")
    parser.add_argument("--status", action="store_true", help="only say what the ledger is about")
    given = parser.parse_args()
    if given.processes < 1:
        parser.error(f"--processes is {given.processes}; give 1 or more")
    if given.status:
        ledger = json.loads(given.ledger.read_text())
        changed = books.stale(ledger)
        about = f"other code: {', '.join(changed)} changed" if changed else "this code"
        print(f"{ledger['graphs']} graphs of seed {ledger['seed']}, of {about}")
        return int(bool(changed))
    ledger = books.load(given.ledger, given.seed, given.again)
    begin = said = time.monotonic()
    before = ledger["graphs"]
    today = datetime.date.today().isoformat()
    results = chunks(given.seed, ledger["next"], given.processes)
    while ledger["graphs"] < given.graphs and time.monotonic() - begin < given.seconds:
        rows, seconds = next(results)
        for row in rows:
            if ledger["graphs"] < given.graphs:
                books.record(ledger, row)
        ledger["seconds"] = round(ledger["seconds"] + seconds, 1)
        ledger["versions"] = {
            "k3fuse": version("k3fuse"), "torch": version("torch"),
            "python": platform.python_version(),
        }  # fmt: skip
        ledger["dates"] = sorted({*ledger["dates"], today})
        books.write(ledger, given.ledger)
        if time.monotonic() - said >= 20:
            said = time.monotonic()
            done = ledger["graphs"] - before
            print(progress(ledger, begin, done, given.graphs), file=sys.stderr, flush=True)
    results.close()  # type: ignore[attr-defined]
    outcomes: Counter[str] = Counter()
    for counts in ledger["by_family"].values():
        outcomes.update(counts)
    print(f"{ledger['graphs']} graphs of seed {given.seed}: {dict(outcomes)}")
    print(f"problems: {ledger['problems']}")
    for line in ledger["examples"][-20:]:
        print(line[:400])
    return int(any(ledger["problems"].values()))


if __name__ == "__main__":
    sys.exit(main())

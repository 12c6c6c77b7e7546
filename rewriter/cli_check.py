"""`k3fuse kernels check`: prove the kernels of an op on this machine, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from k3fuse.rewriter import console
from k3fuse.rewriter.cli import MISSING, OK, Failure, _cache, _one_line, _shared
from k3fuse.rewriter.target import Target

if TYPE_CHECKING:
    from k3fuse.kernels.check import CaseResult

SCHEMA = "k3fuse.kernels-check/1"


@click.command()
@click.argument("op")
@click.option("--target", default="gb300:tp8", show_default=True, help="ARCH:tpN.")
@click.option("--m", "m", type=click.IntRange(1), default=8, show_default=True, help="Tokens.")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Random schedules."
)
@_cache
@_shared
def check(
    op: str, target: str, m: int, seeds: int, cache: Path | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Prove the kernels of OP: numbers, protocol, races, resources.

    OP: a fused op, workbench_gemv, or package.module:function for cases of your own. Exit code 1
    where a gate fails or OP has no kernel yet.
    """
    from k3fuse.kernels.build.cache import Cache
    from k3fuse.kernels.check import CheckTarget, NoKernelError, cases_of, check_case

    document: dict[str, Any] = {
        "schema": SCHEMA, "op": op, "target": target, "m": m, "seeds": seeds, "passed": False,
        "reason": "", "kernels": [],
    }  # fmt: skip
    with _one_line():
        found = Target.parse(target)
        if not found.sm:
            raise Failure(f"--target {target!r} names no architecture; use for example gb300:tp8")
        wanted = CheckTarget(found.name, found.sm, found.tp)
        try:
            cases = cases_of(op, wanted, m)
        except NoKernelError as error:
            if as_json:
                console.emit({**document, "reason": str(error)}, output)
            raise Failure(str(error), MISSING) from None
        results = []
        with _bar() as say:
            for case in cases:
                results.append(
                    check_case(case, wanted, seeds=seeds, cache=Cache(cache), progress=say)
                )
    passed = all(r.passed for r in results)
    document["kernels"] = [row for result in results for row in result.to_json()]
    document["passed"] = passed
    parts: list[Any] = []
    for result in results:
        parts += [*([""] if parts else []), *_parts(result, f"{op} for {target}, M = {m}")]
    console.emit(document if as_json else parts, output)
    raise SystemExit(OK if passed else MISSING)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on standard error: a bar in a terminal, else one line a step."""
    screen = Console(stderr=True)
    if not screen.is_terminal:

        def line(text: str, done: int, total: int) -> None:
            screen.print(f"k3fuse: {done + 1}/{total} {text} ...", highlight=False, soft_wrap=True)

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("start")
        yield lambda text, done, total: progress.update(
            task, description=text, completed=done, total=total
        )


def _parts(result: CaseResult, title: str) -> list[Any]:
    """A table of the kernels, a table of the gates, a line with the verdict."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    names = ("registers", "spills", "shared", "warp instructions", "requested", "needed", "ratio")
    for name in names:
        table.add_column(name, justify="right")
    rows = result.to_json()
    counts = "warp_instructions", "bytes_requested", "bytes_needed"
    for row in rows:
        table.add_row(
            f"{row['op']}/{row['variant']}@{row['arch']}",
            *(_number(row[k]) for k in ("registers", "spill_bytes", "smem_bytes")),
            *_counted(*(row[k] for k in counts)),
        )
    if len(rows) > 1 and all(row[k] is not None for row in rows for k in counts):
        whole = (sum(row[k] for row in rows) for k in counts)
        table.add_row(f"{len(rows)} launches", "", "", "", *_counted(*whole))
    gates = Table(box=None, pad_edge=False)
    for name in ("gate", "verdict", "because"):
        gates.add_column(name)
    gates.add_column("seconds", justify="right")
    for gate in result.gates:
        gates.add_row(
            gate.name, "passed" if gate.passed else "FAILED", gate.detail, f"{gate.seconds:.1f}"
        )
    failed = [g.name for g in result.gates if not g.passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
    return [title, table, "", gates, "", verdict]


def _counted(instructions: int | None, requested: int | None, needed: int | None) -> list[str]:
    ratio = f"{requested / needed:.2f}" if requested and needed else "-"
    return [*(_number(value) for value in (instructions, requested, needed)), ratio]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"

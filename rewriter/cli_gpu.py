"""`k3fuse kernels gpu`: bits, graph replays and time of an op's kernels on a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from k3fuse.rewriter import console
from k3fuse.rewriter.cli import MISSING, OK, _cache, _one_line, _shared


@click.command()
@click.argument("op")
@click.option("--case", "names", multiple=True, help="Only the cases of this name; repeatable.")
@click.option(
    "--replays", type=click.IntRange(1), default=1000, show_default=True, help="Of CUDA graphs."
)
@_cache
@_shared
def gpu(
    op: str, names: tuple[str, ...], replays: int, cache: Path | None, as_json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Run the kernels of OP on this machine's GPU: compare bits, replay graphs, measure.

    One GPU stands in for all ranks. Prints Markdown with the device and the method, or JSON. Exit
    code 1 where a comparison fails, 2 where there is no GPU.
    """
    from k3fuse.kernels.check import gpu as runs
    from k3fuse.kernels.check.gpu_device import CudaDevice
    from k3fuse.kernels.check.registry import gpu_cases_of

    with _one_line(), console.progress(quiet=as_json) as say:
        makers = gpu_cases_of(op, names)
        device = CudaDevice(cache)
        outcomes = [
            runs.run_case(make(device), device, replays=replays, say=say)
            for make in makers.values()
        ]
    document = runs.document(op, device, outcomes)
    console.emit(document if as_json else runs.markdown(document), output)
    raise SystemExit(OK if document["passed"] else MISSING)

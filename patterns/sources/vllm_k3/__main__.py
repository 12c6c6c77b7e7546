"""`python -m k3fuse.patterns.sources.vllm_k3`: see `--help`."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import click
import torch

from k3fuse.patterns.sources.vllm_k3 import capture, environment, layers
from k3fuse.patterns.sources.vllm_k3.capture import Captured, Job
from k3fuse.patterns.sources.vllm_k3.environment import CaptureError


def _numbers(text: str, option: str, low: int, high: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError as err:
        raise click.BadParameter(f"{text!r} is no comma-separated list of numbers") from err
    if any(not low <= n <= high for n in numbers):
        raise click.BadParameter(f"{option} takes numbers from {low} to {high}, got {text!r}")
    return numbers


def _tokens(text: str) -> list[int | None]:
    """ "1,8,dynamic" -> [1, 8, None]."""
    parts = [part for part in text.split(",") if part]
    fixed = _numbers(",".join(p for p in parts if p != "dynamic"), "--m", 1, 4096)
    return [*fixed, *([None] if "dynamic" in parts else [])]


@click.command()
@click.option(
    "--vllm",
    "wheel",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="folder of the unpacked vLLM 0.33.0 wheel",
)
@click.option("--tp", default=8, show_default=True, help="size of the tensor-parallel group")
@click.option("--layers", "indices", default="", help="decoder layers, such as 0,1,3,12,91,92")
@click.option("--m", "tokens", default="1,4,8,64,dynamic", show_default=True, help="tokens a step")
@click.option(
    "--core",
    default="plain,opaque",
    show_default=True,
    help="attention bodies in the graph (plain), or each in one operator (opaque)",
)
@click.option("--final-attn-res", is_flag=True, help="also the AttnRes after the last layer")
@click.option("--stack", type=int, metavar="N", help="also the whole model, cut to N layers")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="DIR")
def main(
    wheel: Path,
    tp: int,
    indices: str,
    tokens: str,
    core: str,
    final_attn_res: bool,
    stack: int | None,
    output: Path,
) -> None:
    """Capture Kimi K3 decode graphs from vLLM's own modules and write them to DIR."""
    chosen = _numbers(indices, "--layers", 0, layers.LAYERS - 1)
    sizes, cores = _tokens(tokens), [c for c in core.split(",") if c]
    if not chosen and not final_attn_res and not stack:
        raise click.UsageError("nothing to capture: give --layers, --final-attn-res or --stack")
    warnings.simplefilter("ignore")  # Dynamo's and Triton's notes about code that is vLLM's
    try:
        version = environment.prepare(wheel, tp)
        run = _Run(tp, output, {"vllm": version, "torch": torch.__version__})
        run.layers(chosen, sizes, cores, final_attn_res)
        if stack:
            run.stack(stack, sizes, cores)
    except CaptureError as err:
        raise click.ClickException(str(err)) from err
    if run.skipped:
        click.echo(f"{len(run.skipped)} not captured", err=True)
        sys.exit(1)


class _Run:
    """All captures of one process: one group size, one output folder."""

    def __init__(self, tp: int, output: Path, versions: dict[str, str]) -> None:
        self._tp, self._output, self._versions = tp, output, versions
        self._grouped = False
        self.skipped: list[str] = []

    def layers(
        self, indices: list[int], sizes: list[int | None], cores: list[str], final: bool
    ) -> None:
        """Single layers, and the tail of the model."""
        if not indices and not final:
            return
        with layers.engine(self._tp) as config:
            self._start()
            modules = layers.build_layers(config, indices)
            for index in indices:
                for job in self._jobs(f"layer{index}", (index,), sizes, cores):
                    self._one(job, lambda j: capture.capture_layer(modules, j))
            if final:
                tail = layers.build_tail(config)
                for job in self._jobs("final", (layers.LAYERS - 1,), sizes, ["plain"]):
                    self._one(job, lambda j: capture.capture_tail(tail, j))

    def stack(self, count: int, sizes: list[int | None], cores: list[str]) -> None:
        """The whole model with `count` layers."""
        with layers.engine(self._tp, count) as config:
            self._start()
            modules = layers.build_model(config)
            for job in self._jobs(f"stack{count}", tuple(range(count)), sizes, cores):
                self._one(job, lambda j: capture.capture_stack(modules, j))

    def _start(self) -> None:
        if not self._grouped:
            layers.init_groups(self._tp)
            layers.make_traceable()
            self._grouped = True

    def _jobs(
        self, name: str, indices: tuple[int, ...], sizes: list[int | None], cores: list[str]
    ) -> list[Job]:
        return [Job(name, indices, m, core, self._tp) for core in cores for m in sizes]

    def _one(self, job: Job, step: capture.Step) -> None:
        start = time.perf_counter()
        try:
            with layers.attention_core(job.core):
                captured: Captured = step(job)
        except CaptureError as err:
            self.skipped.append(job.file)
            click.echo(f"skipped {err}", err=True)
            return
        path = capture.write(captured, job, self._output, self._versions)
        nodes = len(captured.graph.graph.nodes)
        seconds = time.perf_counter() - start
        click.echo(f"{path.name}: {nodes} nodes, {path.stat().st_size} bytes, {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""`k3fuse bench rewrite`: how long the rewrite takes, against what torch does on the same graph."""

from __future__ import annotations

import copy
import gc
import os
import platform
import time
import warnings
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter import sources
from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.target import Target

# Layers with every form: KDA and MLA, dense and MoE, with and without a block write.
_WARM_UP = 4


def machine() -> str:
    """CPU model, cores, Python and torch versions: what a figure was measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        model = names[0] if names else model
    except OSError:
        pass
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {os.cpu_count()} cores, {versions}"


def measure(
    layer_counts: list[int], target: str, compile_up_to: int, progress: sources.Progress
) -> dict[str, Any]:
    """Rows of layers, nodes, rewrite times, microseconds_per_node and Inductor's times.

    A rewrite of a few layers runs first, so that imports and traced templates are not counted as
    growth; its own time is `first_rewrite_seconds`. compile_seconds is Inductor's compile of the
    same (unrewritten) graph, measured up to `compile_up_to` layers, else None.
    """
    parsed = Target.parse(target)
    first, _ = _rewrite(_graph(parsed, _WARM_UP, progress), parsed)
    rows = []
    for layers in layer_counts:
        graph = _graph(parsed, layers, progress)
        nodes = len(graph.module.graph.nodes)
        stock = _copied(graph.module)
        progress(f"rewrite, {layers} layers")
        seconds, processor = _rewrite(graph, parsed)
        graph.module = stock
        progress(f"Inductor's pattern passes, {layers} layers")
        inductor = _inductor_passes(stock)
        compiled = None
        if layers <= compile_up_to:
            progress(f"Inductor's compile, {layers} layers")
            compiled = _compile(graph)
        rows.append(
            {
                "layers": layers,
                "nodes": nodes,
                "rewrite_seconds": round(seconds, 3),
                "rewrite_cpu_seconds": round(processor, 3),
                "microseconds_per_node": round(1e6 * seconds / nodes, 1),
                "inductor_pattern_seconds": round(inductor, 3),
                "compile_seconds": None if compiled is None else round(compiled, 1),
            }
        )
    return {
        "schema": "k3fuse.bench/1",
        "target": target,
        "machine": machine(),
        "first_rewrite_seconds": round(first, 3),
        "rows": rows,
    }


def _graph(target: Target, layers: int, progress: sources.Progress) -> sources.SourceGraph:
    return sources.load("kimi-k3", sources.SourceRequest(target, 8, layers, "", progress))[0]


def _rewrite(graph: sources.SourceGraph, target: Target) -> tuple[float, float]:
    """Wall and processor seconds of one rewrite; they differ where the machine is shared."""
    options = Options.make({"target": target, "plan": True, "groups": graph.groups, "log": "off"})
    gc.collect()
    start, processor = time.perf_counter(), time.process_time()
    rewrite(graph.module, options, source=graph.name, recompile=False)
    return time.perf_counter() - start, time.process_time() - processor


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():
        # torch's own pytree warns of its own pickle of a leaf.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(module)


def _inductor_passes(module: fx.GraphModule) -> float:
    """Inductor's own joint and post-grad pattern passes over a copy of the graph."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    copied = _copied(module)
    start = time.perf_counter()
    with torch._inductor.virtualized.V.set_fake_mode(_inputs(module)[0].fake_mode):
        joint_graph_passes(copied)
        post_grad_passes(copied, is_inference=True)
    return time.perf_counter() - start


def _compile(graph: sources.SourceGraph) -> float:
    """Inductor's compile, its caches off; the group has to exist while collectives are lowered."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    copied, inputs = _copied(graph.module), _inputs(graph.module)
    ranks = next(iter(graph.groups.values()))
    with (
        sources.fake_group(ranks),
        config.patch(force_disable_caches=True),
        inputs[0].fake_mode,
        torch.no_grad(),
    ):
        start = time.perf_counter()
        compile_fx(copied, inputs)
        return time.perf_counter() - start

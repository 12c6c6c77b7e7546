"""Tiny FX graphs with fake values: written by hand, traced at two levels, or stored ones loaded."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.graph_file import GraphFile, load_graph
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.view import GraphView

aten = torch.ops.aten
prims = torch.ops.prims
BF16, FP32 = torch.bfloat16, torch.float32
LEVELS = ("aot", "inductor")
DATA = Path(__file__).parents[1] / "data" / "vllm_k3"


class Hand:
    """A graph written call by call; every node gets its fake value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def input(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> fx.Node:
        with self.mode:
            return self.given(name, torch.empty(shape, dtype=dtype))

    def given(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        node.meta["stack_trace"] = (
            f'  File "model.py", line {len(self.graph.nodes)}, in forward\n    y = f(x)\n'
        )
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        import operator

        return self.call(operator.getitem, node, index)

    def done(self, *outputs: fx.Node) -> fx.GraphModule:
        out = self.graph.output(tuple(outputs))
        out.meta["val"] = tuple(n.meta["val"] for n in outputs)
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        module.graph.lint()
        return module

    def view(self, *outputs: fx.Node, **groups: int) -> GraphView:
        return GraphView(self.done(*outputs).graph, groups)


def decompositions(level: str) -> dict[Any, Any]:
    """Inductor's table, or none as AOTAutograd has it for a plain backend."""
    if level == "aot":
        return {}
    # Some decompositions read torch._inductor.lowering without importing it.
    importlib.import_module("torch._inductor.lowering")
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def trace(function: Callable[..., Any], *args: Any, level: str = "aot") -> fx.GraphModule:
    """The functional ATen graph of `function` for inference; tensors become fake."""
    with torch.no_grad():
        traced = make_fx(
            torch.func.functionalize(function),
            decomposition_table=decompositions(level),
            tracing_mode="fake",
        )(*args)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def compiled_graphs(
    function: Callable[..., Any],
    *args: Any,
    level: str = "aot",
    fullgraph: bool = True,
    keep_writes: bool = False,
) -> list[fx.GraphModule]:
    """Graphs that torch.compile hands to an AOTAutograd inference compiler at this level.

    keep_writes: writes into inputs are copies at the graph's end, as Inductor has them; without,
    they are further outputs.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(fx.GraphModule(graph, graph.graph))
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    backend = aot_autograd(
        fw_compiler=keep,
        inference_compiler=keep,
        decompositions=decompositions(level),
        keep_inference_input_mutations=keep_writes,
    )
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=fullgraph)(*args)
    torch._dynamo.reset()
    return graphs


def found(module: fx.GraphModule | GraphView, concept: Any) -> list[Any]:
    """Every instance of a concept."""
    view = module if isinstance(module, GraphView) else GraphView(module.graph)
    return list(view.each(concept))


def refused(module: fx.GraphModule | GraphView, concept: Any) -> list[str]:
    """Codes of the anchors that started to fit a concept and failed."""
    view = module if isinstance(module, GraphView) else GraphView(module.graph)
    return [refusal.reason.code.value for _, refusal in view.misses(concept)]


def names(nodes: Sequence[fx.Node]) -> list[str]:
    return [n.name for n in nodes]


def ops(module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def rows(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Seeded values of unit spread."""
    generator = torch.Generator().manual_seed(seed + 7919 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def run(
    module: fx.GraphModule, target: str = "reference", patterns: Any = None, **options: Any
) -> Report:
    """Rewrite in place, quietly."""
    chosen = Options.make({"target": target, "log": "off", **options})
    return rewrite(module, chosen, source="test", patterns=patterns)


def identity(module: fx.GraphModule) -> tuple[str, list[Any]]:
    """The graph's text and each node's identity with its metadata, shallow, by key and id."""
    text = "\n".join(n.format_node() or f"{n.name} = {n.args}" for n in module.graph.nodes)
    return text + module.code, [
        (id(n), n.name, id(n.meta), tuple((k, id(v)) for k, v in n.meta.items()))
        for n in module.graph.nodes
    ]


# --- stored graphs and stock ops ----------------------------------------------------------------


def stored(name: str) -> GraphFile:
    """A fresh copy of a stored vLLM graph, by its stem."""
    return load_graph(DATA / f"{name}.json")


def run_stored(name: str, **options: Any) -> tuple[GraphFile, Report]:
    """Rewrite a stored graph for the target it was captured for, as a plan by default."""
    file = stored(name)
    layers = file.meta.get("layers") or [0]
    given = {"plan": True, "groups": file.meta["groups"], "first_layer": layers[0], **options}  # type: ignore[index]
    return file, run(file.module, given.pop("target", f"gb300:tp{file.meta['tp']}"), **given)


_STOCK = {
    "vllm": ["moe_forward(Tensor hidden_states, Tensor router_logits, Any layer_name) -> Tensor"],
    "vllm_ir": [
        "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon)"
        " -> (Tensor, Tensor)"
    ],
    "_C": [
        "shm_allreduce(Tensor(a!) data, int handle) -> ()",
        "silu_and_mul(Tensor(a!) result, Tensor input) -> ()",
        "situ_and_mul(Tensor(a!) out, Tensor input, float beta, float linear_beta) -> ()",
    ],
}
_LIBRARIES: list[torch.library.Library] = []


@functools.cache
def stock_ops() -> None:
    """vLLM's ops that the tests need: those of a stored graph, and a few it does not hold."""
    stored("layer0_tp8_m4_plain")
    stored("layer1_tp8_m4_opaque")
    for namespace, schemas in _STOCK.items():
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        _LIBRARIES.append(library)
        for schema in schemas:
            name = schema.split("(")[0]
            if hasattr(getattr(torch.ops, namespace), name):
                continue
            library.define(schema)
            if "-> ()" in schema:
                fake: Callable[..., Any] = _nothing
            elif "(Tensor, Tensor)" in schema:
                fake = _two
            else:
                fake = _one
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _one(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _two(x: Tensor, other: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(other)

"""From knobs to a traced graph, and copies of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from build import decompositions
from parts import Family, Inputs, Knobs

LEVELS = ("aot", "aot", "inductor", "dynamic")


class Unbuildable(Exception):  # noqa: N818 - a finding, not an error
    """Defects that contradict each other: the module does not run, so there is no graph."""


def build(family: Family, knobs: Knobs, seed: int, level: str) -> tuple[fx.GraphModule, Inputs]:
    """Run the family once to make its inputs, then trace it; functional, dead code removed."""
    inputs = Inputs(seed, knobs["dtype"])
    try:
        with torch.no_grad():
            family.build(knobs, inputs)
            return _trace(family, knobs, inputs, level), inputs
    except (
        RuntimeError,
        IndexError,
        TypeError,
        ValueError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise Unbuildable(f"{type(error).__name__}: {error}") from error


def _trace(family: Family, knobs: Knobs, inputs: Inputs, level: str) -> fx.GraphModule:
    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return family.build(knobs, inputs.given(tensors))

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = []
    for name, tensor in inputs.made.items():
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if level == "dynamic" and name in inputs.rowlike:
            sizes[0] = DimDynamic.DUCK
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    table = decompositions("inductor" if level == "inductor" else "aot")
    # The module's own code is never run, nor are torch's notes on each call read.
    tracer = make_fx(
        torch.func.functionalize(call), decomposition_table=table, tracing_mode="symbolic",
        _disable_torch_fn_metadata_mode=True,
    )  # fmt: skip
    with _use_lazy_graph_module(True):
        module = tracer(*fakes)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), inputs.made, strict=True):
        node._rename(name)
    module.graph.eliminate_dead_code()
    return module


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes and metadata of its own; fake values are shared."""
    graph = fx.Graph()
    to: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        to[node] = graph.node_copy(node, to.__getitem__)
    return _LazyGraphModule(module, graph)


def symbols(module: fx.GraphModule) -> tuple[int, ...]:
    """How much is known of the symbolic sizes: guards and replacements of the shape environment."""
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return (len(mode.shape_env.guards), len(mode.shape_env.replacements))
    return ()

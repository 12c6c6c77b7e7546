"""Graphs to compose: functions traced through AOTAutograd, and a small mutable op to trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified

from k3fuse.kernels.common.composition import Composition

_LIBRARY: Any = torch.library.Library("k3fuse_test", "FRAGMENT")  # type: ignore[no-untyped-call]


def _accumulate_(out: Tensor, bank: Tensor, x: Tensor, slot: int, scale: float) -> None:
    bank[:, slot].copy_(x)
    out.copy_(x * scale + bank.sum(1))


@cache
def define_mutable_op() -> None:
    """k3fuse_test::accumulate_ (once a process): `x` into a bank slot, a mix into `out`."""
    _LIBRARY.define(
        "accumulate_(Tensor(a!) out, Tensor(b!) bank, Tensor x, int slot, float scale) -> ()"
    )
    _LIBRARY.impl("accumulate_", _accumulate_, "CompositeExplicitAutograd")
    torch.library.register_fake("k3fuse_test::accumulate_", lambda *_: None, lib=_LIBRARY)


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    dynamic: bool | None = True,
    decompositions: Any = None,
) -> fx.Graph:
    """The functional graph that a compiler backend sees."""
    graphs: list[fx.Graph] = []

    def backend(gm: fx.GraphModule, example: Sequence[Any]) -> Any:
        def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            graphs.append(gm.graph)
            return gm.forward

        return aot_module_simplified(
            gm, example, fw_compiler=compiler, decompositions=decompositions
        )

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """Tensor placeholders, the row of tokens first (weights have 8 rows, and that size is static).

    The sizes beside them are bound from their shapes.
    """

    def is_weight(node: fx.Node) -> bool:
        rows = node.meta["val"].shape[0]
        return isinstance(rows, int) and rows == 8

    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    return sorted((n for n in nodes if isinstance(n.meta["val"], Tensor)), key=is_weight)


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.output_node().args[0] if isinstance(n, fx.Node)]  # type: ignore[union-attr]


def compose(graph: fx.Graph) -> Composition:
    return Composition.from_nodes(calls_of(graph), inputs_of(graph), outputs_of(graph))

"""Copies a site out of a graph: from named inputs to named outputs, as a graph of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.canonical import shape_of
from k3fuse.rewriter.view import GraphView

# An output: a node, or (node, i) for an element of a tuple that nothing reads yet.
OutputSpec = fx.Node | tuple[fx.Node, int]


class ExtractError(ValueError):
    """The nodes read something that is neither inside nor an input."""


@dataclass
class Subgraph:
    """The copy; `nodes` leaves out placeholders and output."""

    graph: fx.Graph
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    outputs: list[fx.Node]


def view_sizes(shape: Sequence[Any]) -> list[int]:
    """Sizes for a view op; one symbolic size becomes -1. Raises ExtractError for more."""
    sizes = [s if isinstance(s, int) else -1 for s in shape]
    if sizes.count(-1) > 1:
        raise ExtractError(f"shape {tuple(shape)} has more than one symbolic size")
    return sizes


def extract(
    view: GraphView,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[OutputSpec],
    shapes: Sequence[tuple[Any, ...]] | None = None,
) -> Subgraph:
    """Copy `nodes` (graph order). A value that is another reshape of an input is rebuilt from it.

    shapes: shape each output must have; a view is added where the node has another one.
    Nodes that hold sizes (SymInt) may be read from outside; they are copied by reference.
    Raises ExtractError naming the node that reads something else.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    roots: dict[Any, fx.Node] = {}
    made: list[fx.Node] = []
    placeholders = []
    for i, node in enumerate(inputs):
        placeholder = graph.placeholder(f"i{i}")
        placeholder.meta["val"] = node.meta.get("val")
        placeholders.append(placeholder)
        env.setdefault(node, placeholder)
        roots.setdefault(view.strip(node), placeholder)
    inside = set(nodes)

    def reshaped(source: fx.Node, like: fx.Node) -> fx.Node:
        copy = graph.call_function(torch.ops.aten.reshape.default, (source, view_sizes(shape_of(like))))
        copy.meta["val"] = like.meta.get("val")
        made.append(copy)
        return copy

    def lookup(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        root = view.strip(node)
        if root in roots:
            env[node] = reshaped(roots[root], node)
            return env[node]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return node  # a size; the encoder writes it as an expression
        raise ExtractError(f"{node.name} is read by the site but is neither inside nor an operand")

    def copy(node: fx.Node) -> None:
        if node in env:
            return
        for source in node.all_input_nodes:
            if source in inside and source not in env and source not in inputs:
                copy(source)
        made_node = graph.node_copy(node, lookup)
        env[node] = made_node
        made.append(made_node)

    for node in nodes:
        if node not in env:
            copy(node)
    results = []
    for i, spec in enumerate(outputs):
        if isinstance(spec, tuple):
            result = graph.call_function(operator.getitem, (env[spec[0]], spec[1]))
            made.append(result)
        else:
            result = lookup(spec)
            if shapes is not None and shape_of(spec) != tuple(shapes[i]):
                like = result
                result = graph.call_function(
                    torch.ops.aten.reshape.default, (like, view_sizes(shapes[i]))
                )
                made.append(result)
        results.append(result)
    return Subgraph(graph, placeholders, made, results)

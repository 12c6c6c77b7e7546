"""Copies a site out of a graph: from named inputs to named outputs, as a graph of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.canonical import shape_of
from k3fuse.rewriter.site import Reshaped
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


class _Copier:
    """Copies a site's nodes into a graph of their own, values of the inputs through reshapes."""

    def __init__(
        self, view: GraphView, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node | Reshaped]
    ) -> None:
        self.view = view
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.roots: dict[Any, fx.Node] = {}
        self.made: list[fx.Node] = []
        self.placeholders: list[fx.Node] = []
        self.inside = set(nodes) - {i for i in inputs if isinstance(i, fx.Node)}
        for i, item in enumerate(inputs):
            placeholder = self.graph.placeholder(f"i{i}")
            self.placeholders.append(placeholder)
            node = item.node if isinstance(item, Reshaped) else item
            value = node.meta.get("val")
            if isinstance(item, Reshaped):
                value = value.reshape(item.sizes)  # type: ignore[union-attr]
            else:
                self.env.setdefault(node, placeholder)
            placeholder.meta["val"] = value
            self.roots.setdefault(view.strip(node), placeholder)

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add one call."""
        made = self.graph.call_function(target, args)
        self.made.append(made)
        return made

    def reshaped(self, source: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
        """Add a reshape."""
        return self.call(torch.ops.aten.reshape.default, source, view_sizes(shape))

    def lookup(self, node: fx.Node) -> fx.Node:
        """Return the copy of a value, rebuilt where it is another reshape of an input."""
        if node in self.env:
            return self.env[node]
        root = self.view.strip(node)
        source = self.roots.get(root, self.env.get(root))
        if source is not None:  # another reshape of an input, or of a value copied before
            made = self.env[node] = self.reshaped(source, shape_of(node))
            made.meta["val"] = node.meta.get("val")
            return made
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return node  # a size; the encoder writes it as an expression
        raise ExtractError(f"{node.name} is read by the site but is neither inside nor an operand")

    def copy(self, node: fx.Node) -> None:
        """Copy a node, and first what it reads inside the site."""
        if node in self.env:
            return
        for source in node.all_input_nodes:
            if source in self.inside:
                self.copy(source)
        made = self.env[node] = self.graph.node_copy(node, self.lookup)
        self.made.append(made)


def extract(
    view: GraphView,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node | Reshaped],
    outputs: Sequence[OutputSpec],
    shapes: Sequence[tuple[Any, ...]] | None = None,
) -> Subgraph:
    """Copy `nodes` (graph order). A value that is another reshape of an input is rebuilt from it.

    shapes: shape each output must have; a view is added where the node has another one.
    Nodes that hold sizes (SymInt) may be read from outside; they are copied by reference.
    Raises ExtractError naming the node that reads something else.
    """
    copier = _Copier(view, nodes, inputs)
    for node in nodes:
        copier.copy(node)
    results = []
    for i, spec in enumerate(outputs):
        if isinstance(spec, tuple):
            result = copier.call(operator.getitem, copier.env[spec[0]], spec[1])
        else:
            result = copier.lookup(spec)
            if shapes is not None and shape_of(spec) != tuple(shapes[i]):
                result = copier.reshaped(result, tuple(shapes[i]))
        results.append(result)
    return Subgraph(copier.graph, copier.placeholders, copier.made, results)


def signature(
    view: GraphView,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node | Reshaped],
    outputs: Sequence[OutputSpec],
    shapes: Sequence[tuple[Any, ...]] | None = None,
) -> tuple[Any, ...]:
    """Hashable description of what `extract` would copy: equal keys give equal subgraphs."""
    places: dict[Any, Any] = {}
    described: list[Any] = []
    for i, item in enumerate(inputs):
        node = item.node if isinstance(item, Reshaped) else item
        described.append((_value(node), item.sizes if isinstance(item, Reshaped) else None))
        places.setdefault(node, ("input", i))
        places.setdefault(("root", view.strip(node)), ("root", i))
    for i, node in enumerate(nodes):
        places.setdefault(node, ("node", i))
        places.setdefault(("root", node), ("root node", i))

    def place(node: fx.Node) -> Any:
        if node in places:
            return places[node]
        root = places.get(("root", view.strip(node)))
        return (root, _value(node)) if root is not None else ("outside", _value(node))

    def freeze(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return place(value)
        if isinstance(value, (list, tuple)):
            return tuple(freeze(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, freeze(v)) for k, v in value.items())
        # A bool equals an int and 1 equals 1.0: the type is part of the value.
        return (type(value), str(value))

    body = [(n.target, freeze(n.args), freeze(n.kwargs)) for n in nodes]
    ends = [(place(o[0]), o[1]) if isinstance(o, tuple) else place(o) for o in outputs]
    return (tuple(described), tuple(body), tuple(ends), str(shapes))


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(value)
    return (str(tuple(value.shape)), str(value.stride()), value.dtype, value.device)

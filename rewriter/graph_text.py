"""Graphs as short text: one node a line, SSA form, shape and dtype first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.canonical import target_name

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.float8_e4m3fn: "f8e4m3",
}


def value_text(value: Any) -> str:
    """bf16[8, 7168], Sym(s0), or a tuple of those."""
    if isinstance(value, torch.Tensor):
        dims = ", ".join(str(s) for s in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{dims}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(value_text(v) for v in value) + ")"
    return f"Sym({value})" if isinstance(value, (torch.SymInt, int)) else "?"


def _argument(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return f"%{names.get(value, value.name)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(v, names) for v in value) + "]"
    if isinstance(value, str):
        # A composition is long; its length and digest say whether two sites carry the same one.
        return json.dumps(value) if len(value) < 60 else f"<text {len(value)} chars>"
    return str(value)


def node_line(node: fx.Node, names: Mapping[fx.Node, str] | None = None) -> str:
    """One line of a node. names: names to write instead of the graph's own."""
    names = names or {}
    if node.op == "output":
        return f"return {_argument(node.args[0], names)}"
    name, value = names.get(node, node.name), value_text(node.meta.get("val"))
    if node.op != "call_function":
        return f"%{name}: {value} = {node.op} {node.target}"
    args = [_argument(a, names) for a in node.args]
    args += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return f"%{name}: {value} = {target_name(node.target)}({', '.join(args)})"


def node_lines(nodes: Iterable[fx.Node]) -> list[str]:
    """Lines of several nodes."""
    return [node_line(n) for n in nodes]


def graph_text(graph: fx.Graph) -> str:
    """Return the whole graph, ends with a newline."""
    return "\n".join(node_lines(graph.nodes)) + "\n"

"""Pieces of a graph for pictures and diffs: a site's nodes before and after.

Names are local to the piece and layer numbers are left out, so that equal sites of 93 layers give
one and the same piece, which a report stores once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from k3fuse.rewriter.canonical import target_name
from k3fuse.rewriter.graph_text import node_line, value_text

_LAYER = re.compile(r"(layers?[._])\d+(?=[._]|$)")
_COUNTER = re.compile(r"_\d+$")
_KEY = re.compile(r"""^\[\d+\]|[\[\]'"]""")

# Frames of these files are machinery, not the model.
_MACHINERY = ("/torch/", "/k3fuse/rewriter/", "/sources/", "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n\s*(.+)')


@dataclass
class Draft:
    """Records of a piece's nodes, with the nodes themselves as long as they may still change."""

    nodes: tuple[fx.Node, ...]
    records: list[dict[str, Any]]


class Pieces:
    """The pieces of one report, each kept once under a key made from its content."""

    def __init__(self) -> None:
        self.store: dict[str, dict[str, Any]] = {}

    def keep(self, draft: Draft, changed: Collection[fx.Node] = ()) -> str:
        """Store a draft and return its key. changed: nodes that the rewrite takes away or adds."""
        for node, record in zip(draft.nodes, draft.records, strict=False):
            if node in changed:
                record["changed"] = True
        piece = {"nodes": draft.records}
        key = hashlib.sha256(json.dumps(piece, sort_keys=True).encode()).hexdigest()[:12]
        self.store.setdefault(key, piece)
        return key


def draft(nodes: Iterable[fx.Node]) -> Draft:
    """Records of nodes in graph order, then of what they read from outside.

    A record: name (local), op ("input" for what stands outside), value (dtype and shape), inputs
    (names), text (the node's line; label for an input), readers (how many nodes outside read it).
    """
    inside = tuple(nodes)
    member = set(inside)
    names = _names(inside, member)
    records = []
    for node in inside:
        record: dict[str, Any] = {
            "name": names[node],
            "op": _op(node),
            "value": _value(node),
            "inputs": [names[n] for n in node.all_input_nodes],
            "text": node_line(node, names),
        }
        if readers := sum(1 for user in node.users if user not in member):
            record["readers"] = readers
        records.append(record)
    records += [
        {"name": name, "op": "input", "value": _value(node), "inputs": [], "text": label(node)}
        for node, name in names.items()
        if node not in member
    ]
    return Draft(inside, records)


def around(node: fx.Node) -> tuple[fx.Node, ...]:
    """A node with its computed operands and its readers, in graph order: where a near miss is."""
    near = [n for n in node.all_input_nodes if n.op == "call_function"]
    return (*near, node, *(n for n in node.users if n.op == "call_function"))


def label(node: fx.Node) -> str:
    """What people call an input: its parameter's path without the layer number, else its op."""
    origin = str(node.meta.get("origin") or _KEY.sub("", str(node.meta.get("input_name", ""))))
    if node.op in ("placeholder", "get_attr"):
        return _LAYER.sub(r"\1N", origin or _COUNTER.sub("", node.name))
    return _op(node)


def frames(node: fx.Node, depth: int = 4) -> list[str]:
    """The model's lines that made a node, innermost last: "file.py:12 code"."""
    if stored := node.meta.get("source"):
        return [str(stored)]
    trace = str(node.meta.get("stack_trace") or "")
    lines = [
        f"{'/'.join(path.split('/')[-2:])}:{line} {code.strip()}"
        for path, line, code in _FRAME.findall(trace)
        if not any(part in path for part in _MACHINERY)
    ]
    return lines[-depth:]


def model_lines(nodes: Iterable[fx.Node], most: int = 12) -> list[str]:
    """Innermost model lines of several nodes, each once, in graph order."""
    found = (lines[-1] for node in nodes if (lines := frames(node)))
    return list(dict.fromkeys(found))[:most]


def _op(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    name = target_name(node.target)
    wrapped: Any = node.args[0] if node.args else None
    if name.startswith("auto_functionalized") and callable(wrapped):
        return target_name(wrapped)
    return name


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _names(inside: tuple[fx.Node, ...], member: set[fx.Node]) -> Mapping[fx.Node, str]:
    """Local names: the graph's without counter and layer number, counted anew."""
    names: dict[fx.Node, str] = {}
    used: dict[str, int] = {}
    for node in [*inside, *(n for m in inside for n in m.all_input_nodes if n not in member)]:
        if node in names:
            continue
        outside = node.op in ("placeholder", "get_attr")
        stem = label(node).replace(".", "_") if outside else _COUNTER.sub("", node.name)
        count = used[stem] = used.get(stem, 0) + 1
        names[node] = stem if count == 1 else f"{stem}_{count}"
    return names

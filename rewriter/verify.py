"""Checks after a rewrite: the IR's rules as code, and that surviving nodes did not move."""

from __future__ import annotations

from typing import Any

from torch import fx


class VerifyError(RuntimeError):
    """The rewritten graph breaks a rule; the caller keeps the original."""


def snapshot(graph: fx.Graph) -> dict[str, Any]:
    """Fake value of every node, by name: the objects themselves, which no edit may exchange."""
    return {n.name: n.meta.get("val") for n in graph.nodes}


def verify(module: fx.GraphModule, before: dict[str, Any]) -> None:
    """Raise VerifyError where a rule is broken.

    Rules: the graph lints; every node that survived has the value it had; every inserted node says
    which pattern and nodes it stands for; the output has as many values as before.
    """
    graph = module.graph
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the graph does not lint: {error}") from error
    for node in graph.nodes:
        if node.name in before:
            if "k3fuse" not in node.meta and node.meta.get("val") is not before[node.name]:
                raise VerifyError(
                    f"{node.name} had {before[node.name]}, has {node.meta.get('val')}"
                )
        elif "k3fuse" not in node.meta:
            raise VerifyError(f"{node.name} was inserted without naming what it replaces")
        elif node.meta.get("val") is None:
            raise VerifyError(f"{node.name} was inserted without a fake value")
        for source in node.all_input_nodes:
            if source.graph is not graph:
                raise VerifyError(f"{node.name} reads {source.name} of another graph")

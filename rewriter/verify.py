"""Checks after a rewrite: the IR's rules as code, and that surviving nodes did not move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx


class VerifyError(RuntimeError):
    """The rewritten graph breaks a rule; the caller keeps the original."""


def snapshot(graph: fx.Graph) -> dict[str, Any]:
    """Fake value of every node, by name: the objects themselves, which no edit may exchange."""
    return {n.name: n.meta.get("val") for n in graph.nodes}


def verify(
    module: fx.GraphModule,
    before: dict[str, Any],
    exchanged: Iterable[tuple[str, Any, fx.Node]] = (),
) -> None:
    """Raise VerifyError where a rule is broken.

    Rules: the graph lints; every node that survived has the value it had; every inserted node says
    which pattern and nodes it stands for; what readers read instead of a replaced value has its
    shape, dtype, strides and device, so that propagating fake values gives every survivor the
    value it has.
    exchanged: (name, value before, node that is read now) of every replaced value.
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
    for name, old, node in exchanged:
        if not node._erased and (was := _look(old)) != (now := _look(node.meta.get("val"))):
            raise VerifyError(f"{name} was {was}, its readers now read {now} ({node.name})")


def _look(value: Any) -> Any:
    """What a reader can see of a value before it runs."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(str(s) for s in value.shape)
    # Strides of sizes of 1 mean nothing. A symbol is not asked: that would be a guard, and a graph
    # of its own for one token.
    strides = tuple(
        str(step)
        for step, size in zip(value.stride(), value.shape, strict=True)
        if not (isinstance(size, int) and size == 1)
    )
    return (shape, strides, value.dtype, value.device)

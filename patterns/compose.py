"""The composition text of a site: what its op runs outside the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from k3fuse.kernels.common.composition import Composition, CompositionError
from k3fuse.kernels.common.dispatch import operands
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.site import Made, Output, Replacement, Reshaped, Site
from k3fuse.rewriter.subgraph import ExtractError, OutputSpec, extract, signature, view_sizes
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, shape_of


def replacement(
    site: Site,
    view: GraphView,
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    *,
    results: Sequence[OutputSpec],
    shapes: Sequence[tuple[Any, ...]],
    outputs: Sequence[Output],
    target: Target,
    group: str | None,
    more: Mapping[str, Any] | None = None,
) -> Replacement:
    """Build the op call with its composition.

    args: positional arguments by the op's schema. results: for each result of the op the site's
    node that holds it; shapes: the shape the op gives it. group: None for ops that take none. more:
    further keyword arguments.
    Raises Refusal (META_MISSING or OP_MISMATCH) where the site cannot be written as text.
    """
    kwargs: dict[str, Any] = {"target": target.name}
    if group is not None:
        kwargs["group"] = group
    # What another site's op makes is not in the graph that the composition is a piece of.
    inputs: list[fx.Node | Reshaped] = [a for a in operands(op, args) if not isinstance(a, Made)]
    try:
        # 93 layers have a handful of distinct sites, and writing one costs as much as matching it.
        known: dict[Any, str] = view.notes.setdefault("compositions", {})
        key = signature(view, site.nodes, inputs, results, shapes)
        text = known.get(key, "")
        if not text:
            part = extract(view, site.nodes, inputs, results, shapes)
            text = known[key] = Composition.from_nodes(part.nodes, part.inputs, part.outputs).text
    except (ExtractError, CompositionError, RuntimeError) as error:
        raise Refusal(
            Reason(
                Code.OP_MISMATCH,
                f"{site.anchor.name}: the site cannot be kept as a run-time fallback: {error}",
                (site.anchor.name,),
            )
        ) from error
    kwargs["composition"] = text
    kwargs |= more or {}
    return Replacement(op, args, kwargs, tuple(outputs))


def as_rows(view: GraphView, node: fx.Node, shape: tuple[Any, ...]) -> fx.Node | Reshaped:
    """Return an operand as rows of `shape`: itself, a reshape the graph already has, or a new one.

    Raises Refusal (SHAPE_MISMATCH) where more than one size is symbolic.
    """
    if shape_of(node) == shape:
        return node
    existing = view.with_shape(node, shape)
    if existing is not None:
        return existing
    try:
        return Reshaped(node, tuple(view_sizes(shape)))
    except ExtractError as error:
        raise Refusal(Reason(Code.SHAPE_MISMATCH, f"{node.name}: {error}", (node.name,))) from error

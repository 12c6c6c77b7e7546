"""The composition text of a site: what its op runs outside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from k3fuse.kernels.common.composition import Composition, CompositionError
from k3fuse.kernels.common.dispatch import operands
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.site import Output, Replacement, Site
from k3fuse.rewriter.subgraph import ExtractError, OutputSpec, extract
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView


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
) -> Replacement:
    """Build the op call with its composition.

    args: positional arguments by the op's schema. results: for each result of the op the site's
    node that holds it; shapes: the shape the op gives it. group: None for ops that take none.
    Raises Refusal (META_MISSING or OP_MISMATCH) where the site cannot be written as text.
    """
    kwargs: dict[str, Any] = {"target": target.name}
    if group is not None:
        kwargs["group"] = group
    inputs: list[fx.Node] = operands(op, args)
    try:
        part = extract(view, site.nodes, inputs, results, shapes)
        text = Composition.from_nodes(part.nodes, part.inputs, part.outputs).text
    except (ExtractError, CompositionError) as error:
        raise Refusal(
            Reason(
                Code.OP_MISMATCH,
                f"{site.anchor.name}: the site cannot be kept as a run-time fallback: {error}",
                (site.anchor.name,),
            )
        ) from error
    kwargs["composition"] = text
    return Replacement(op, args, kwargs, tuple(outputs))

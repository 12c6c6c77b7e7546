"""Gated activations: SiTU and SiLU pairs, as one op or decomposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional as F

from k3fuse.rewriter.recognise.functionalized import FunctionalizedCall
from k3fuse.rewriter.template import Captured, Template, TemplateMatch, match_template, tokens_of
from k3fuse.rewriter.view import GraphView, dtype_of, op_of, shape_of


def situ_wide(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda) in FP32, one rounding."""
    g, u = gate.float(), up.float()
    gated = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (gated * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def situ_left(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """The same product written left to right."""
    g, u = gate.float(), up.float()
    out = beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    return out.to(gate.dtype)


def situ_wide_kept(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """SiTU of FP32 operands, result kept in FP32."""
    gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gated * (linear_beta * torch.tanh(up / linear_beta))


def silu_pair(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(g) * u in the operands' dtype."""
    return F.silu(gate) * up


_BETAS = (Captured("beta", 4.0009765625), Captured("linear_beta", 25.0009765625))
SITU_FORMS = (
    Template("situ", situ_wide, ("gate", "up"), _BETAS),
    Template("situ, left to right", situ_left, ("gate", "up"), _BETAS),
    Template("situ, FP32", situ_wide_kept, ("gate", "up"), _BETAS),
)
SILU_FORMS = (Template("silu pair", silu_pair, ("gate", "up")),)


@dataclass(frozen=True)
class GatedActivation:
    """out = act(gate) * up. gate and up are values, or both None with `merged` = [gate | up].

    kind: "situ" or "silu"; beta, linear_beta: SiTU's, 0 for SiLU.
    """

    anchors: ClassVar[tuple[str, ...]] = (
        "aten.mul",
        "getitem",
        "aten._to_copy",
        "prims.convert_element_type",
    )

    gate: fx.Node | None
    up: fx.Node | None
    merged: fx.Node | None
    kind: str
    beta: float
    linear_beta: float
    out: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> GatedActivation | None:
        """Read a gated activation off its result."""
        if op_of(node) == "getitem" and isinstance(node.args[0], fx.Node):
            return _custom(view, node)
        spelled = view.canon(node)
        if spelled.op not in ("aten.mul", "cast") or not shape_of(node):
            return None
        rounded = spelled.op == "cast"
        product = view.strip(spelled.inputs[0]) if rounded else node
        if not isinstance(product, fx.Node) or view.canon(product).op != "aten.mul":
            return None
        if _has_operation(view, product, _TANH, 6):
            return _decomposed(view, node, SITU_FORMS)
        # SiLU pairs end in a product in the operands' dtype; silu itself may be decomposed.
        if rounded or not _has_operation(view, product, _SILU, 5):
            return None
        return _decomposed(view, node, SILU_FORMS)


_TANH = frozenset({"aten.tanh"})
_SILU = frozenset({"aten.silu", "aten.sigmoid", "aten.exp"})
_ON_THE_WAY = frozenset({"aten.mul", "aten.div", "aten.add", "aten.neg", "aten.sigmoid", "cast"})


def _has_operation(view: GraphView, node: Any, ops: frozenset[str], depth: int) -> bool:
    """Whether one of `ops` is at most `depth` elementwise steps above: a cheap first test."""
    node = view.strip(node)
    if not isinstance(node, fx.Node) or depth == 0:
        return False
    spelled = view.canon(node)
    if spelled.op in ops:
        return True
    if spelled.op not in _ON_THE_WAY:
        return False
    return any(_has_operation(view, i, ops, depth - 1) for i in spelled.inputs)


def _decomposed(
    view: GraphView, node: fx.Node, forms: tuple[Template, ...]
) -> GatedActivation | None:
    shape, tokens = shape_of(node), tokens_of(shape_of(node))
    kind = "situ" if forms is SITU_FORMS else "silu"
    for form in forms:
        found = match_template(view, form, node, {"gate": node, "up": node}, tokens=tokens)
        if isinstance(found, TemplateMatch):
            gate, up = found.bindings["gate"], found.bindings["up"]
            if shape_of(gate) != shape or dtype_of(gate) != dtype_of(node):
                continue
            beta = found.numbers.get("beta", 0.0)
            linear = found.numbers.get("linear_beta", 0.0)
            return GatedActivation(gate, up, None, kind, beta, linear, node, found.nodes(view))
    return None


def _custom(view: GraphView, node: fx.Node) -> GatedActivation | None:
    source = node.args[0]
    call = view.find(FunctionalizedCall, source)
    if call is None or not call.name.endswith(("situ_and_mul", "silu_and_mul")):
        return None
    if call.results.get("out", call.results.get("result")) is not node:
        return None
    kind = "situ" if "situ" in call.name else "silu"
    return GatedActivation(
        None, None, call.args["input"], kind, float(call.args.get("beta", 0.0)),
        float(call.args.get("linear_beta", 0.0)), node, call.nodes,
    )  # fmt: skip

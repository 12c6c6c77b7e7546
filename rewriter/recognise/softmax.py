"""Softmax in FP32: one op, or written out as greatest, difference, exp, sum and quotient.

Inductor writes it out, and puts the greatest and the sum into one op on a GPU; models that write it
out themselves take the greatest by `max` or `amax`. All round alike but for the order of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.view import GraphView, bound_args, dtype_of, op_of, shape_of

_ONE_OP = ("aten.softmax", "aten._softmax")
# Inductor's greatest and sum of exponentials in one (torch._inductor.inductor_prims).
_ONLINE = "prims.prepare_softmax_online"


@dataclass(frozen=True)
class Softmax:
    """out = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis, in FP32.

    x: what it reads, as the place of use has it; nodes: all it is made of, the last is `out`.
    """

    anchors: ClassVar[tuple[str, ...]] = (*_ONE_OP, "aten.div", "aten.mul")

    x: fx.Node
    out: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> Softmax | None:
        """Read a softmax off the op, or off the quotient that ends it.

        A quotient is one where exp is above; then everything else has to be as it should, too.
        """
        spelled = view.canon(node)
        if spelled.op == "aten.softmax":
            if spelled.attr("dim") not in (-1, (-1,)):
                raise _refuse(
                    node, Code.ATTR_MISMATCH, "is over another axis than the last", -1,
                    spelled.attr("dim"),
                )  # fmt: skip
            return cls(spelled.inputs[0], node, (node,))
        if spelled.op == "aten.mul":
            _not_by_reciprocal(view, node)
        return _written_out(view, node) if spelled.op == "aten.div" else None


def _refuse(node: fx.Node, code: Code, what: str, expected: object, actual: object) -> Refusal:
    sentence = f"{node.name}: the softmax {what}"
    return Refusal(Reason(code, sentence, (node.name,), str(expected), str(actual)))


def _not_by_reciprocal(view: GraphView, node: fx.Node) -> None:
    """Refuse exp(...) * (1 / sum): it rounds twice where the quotient rounds once."""
    kinds = [op_of(i) for i in map(view.strip, view.canon(node).inputs) if isinstance(i, fx.Node)]
    if sorted(kinds) == ["aten.exp", "aten.reciprocal"]:
        what = "multiplies by a reciprocal, which rounds twice"
        raise _refuse(node, Code.OP_MISMATCH, what, "aten.div", "aten.mul")


def _written_out(view: GraphView, node: fx.Node) -> Softmax | None:
    operands = view.canon(node).inputs
    if len(operands) != 2 or not all(isinstance(i, fx.Node) for i in operands):
        return None  # by a number, or by a symbolic size
    above, below = operands
    top = view.strip(above)
    rounded = top
    while isinstance(top, fx.Node) and view.canon(top).op == "cast":
        top = view.strip(view.canon(top).inputs[0])
    if not isinstance(top, fx.Node):
        return None
    if op_of(top) == "aten.exp2":
        raise _refuse(top, Code.OP_MISMATCH, "is to base 2", "aten.exp", "aten.exp2")
    if op_of(top) != "aten.exp":
        return None
    if rounded is not top:
        what = "divides rounded exponentials"
        raise _refuse(rounded, Code.DTYPE_MISMATCH, what, torch.float32, dtype_of(rounded))
    shifted = view.strip(view.canon(top).inputs[0])
    if not isinstance(shifted, fx.Node) or view.canon(shifted).op != "aten.sub":
        # exp(x) / sum exp(x) is infinite over infinite from x = 89 on, the op takes the greatest
        # off.
        what = "does not take the greatest off right before exp, so it overflows from 89 on"
        found = view.canon(shifted).op if isinstance(shifted, fx.Node) else shifted
        raise _refuse(top, Code.OP_MISMATCH, what, "aten.sub", found)
    x, most = view.canon(shifted).inputs
    if not isinstance(x, fx.Node) or not isinstance(most, fx.Node):
        what = "takes a number off, not the greatest"
        raise _refuse(shifted, Code.OP_MISMATCH, what, "aten.amax", most)
    pair = _online(view, x, most, below)
    nodes = [*pair] if pair else [
        *_greatest(view, shifted, x, most), *_sum(view, node, above, below),
    ]  # fmt: skip
    column = (*shape_of(x)[:-1], 1)
    for one, wanted in ((most, column), (below, column), (above, shape_of(x))):
        if shape_of(one) != wanted:
            what = "is used in another shape"
            raise _refuse(one, Code.SHAPE_MISMATCH, what, wanted, shape_of(one))
    inner = view.canon(top).inputs[0]
    nodes += [*view.path(above, top), top, *view.path(inner, shifted), shifted, node]
    narrow = next((n for n in (x, *nodes) if dtype_of(n) not in (torch.float32, None)), None)
    if narrow is not None:
        what = "is not made in FP32"
        raise _refuse(narrow, Code.DTYPE_MISMATCH, what, torch.float32, dtype_of(narrow))
    return Softmax(x, node, tuple(sorted(set(nodes), key=view.index.__getitem__)))


def _online(view: GraphView, x: fx.Node, most: fx.Node, below: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of greatest and sum where one op makes both; () where two do."""
    parts = [view.strip(most), view.strip(below)]
    source = parts[0].args[0] if op_of(parts[0]) == "getitem" else None
    if not isinstance(source, fx.Node) or op_of(source) != _ONLINE:
        return ()
    for index, part in enumerate(parts):
        if op_of(part) != "getitem" or part.args != (source, index):
            what = f"does not use {source.name}'s greatest and sum"
            raise _refuse(part, Code.OP_MISMATCH, what, ("greatest", "sum")[index], op_of(part))
    _over_experts(view, source, x, source.args[0], source.args[1])
    return (source, *parts, *view.path(most, parts[0]), *view.path(below, parts[1]))


def _over_experts(view: GraphView, node: fx.Node, x: fx.Node, of: object, dim: object) -> None:
    """Refuse a reduction of something else than `x`, or along another axis than the last."""
    if not isinstance(of, fx.Node) or not view.same(of, x) or shape_of(of) != shape_of(x):
        name = of.name if isinstance(of, fx.Node) else of
        raise _refuse(node, Code.OP_MISMATCH, "reduces another value", x.name, name)
    dims = tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    if dims not in ((-1,), (len(shape_of(x)) - 1,)):
        raise _refuse(node, Code.ATTR_MISMATCH, "is over another axis than the last", -1, dim)


def _greatest(view: GraphView, shifted: fx.Node, x: fx.Node, most: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of max(x) over the last axis."""
    found = view.strip(most)
    source = found.args[0] if op_of(found) == "getitem" else found
    kind = op_of(source) if isinstance(source, fx.Node) else ""
    by_max = kind == "aten.max" and "dim" in bound_args(source) and found.args[1:] == (0,)
    if not isinstance(source, fx.Node) or not (kind == "aten.amax" or by_max):
        what = "takes off what is no greatest"
        raise _refuse(shifted, Code.OP_MISMATCH, what, "aten.amax", op_of(found))
    args = bound_args(source)
    _over_experts(view, source, x, args["self"], args["dim"])
    return (source, found, *view.path(most, found))


def _sum(view: GraphView, node: fx.Node, above: fx.Node, below: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of the sum of exponentials over the last axis."""
    total = view.strip(below)
    if op_of(total) != "aten.sum":
        what = "is divided by something else than the sum"
        raise _refuse(node, Code.OP_MISMATCH, what, "aten.sum", op_of(total))
    args = bound_args(total)
    _over_experts(view, total, above, args["self"], args.get("dim"))
    return (total, *view.path(below, total))

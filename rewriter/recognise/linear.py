"""Linear: y = x W^T (+ b), whatever op spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from k3fuse.rewriter.view import Canonical, GraphView, bound_args, dtype_of, op_of, shape_of


@dataclass(frozen=True)
class Linear:
    """A matrix product of rows with a weight that is an input of the graph.

    x: [M, K] rows as the op reads them (before a widening cast); weight: [N, K] as stored.
    bias: [N] or None; out: the node that holds [M, N]; dtype: of the operands in memory;
    out_dtype: of the result. transposed: False where the weight is stored [K, N].
    """

    anchors: ClassVar[tuple[str, ...]] = (
        "aten.mm",
        "aten.addmm",
        "aten.linear",
        "aten.bmm",
        "aten.matmul",
    )

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    out: fx.Node
    transposed: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype
    nodes: tuple[fx.Node, ...]

    @property
    def n(self) -> object:
        """Output features."""
        return shape_of(self.weight)[0 if self.transposed else 1]

    @property
    def k(self) -> object:
        """Input features."""
        return shape_of(self.weight)[1 if self.transposed else 0]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> Linear | None:
        """Read a linear off its product node; None where neither operand is a weight."""
        kind = op_of(node)
        if kind not in cls.anchors:
            return None
        args = bound_args(node)
        bias = None
        if kind == "aten.addmm":
            if args.get("beta", 1) != 1 or args.get("alpha", 1) != 1:
                return None
            x, w, bias = args["mat1"], args["mat2"], args["self"]
        elif kind == "aten.linear":
            x, w, bias = args["input"], args["weight"], args.get("bias")
        elif kind == "aten.matmul":
            x, w = args["self"], args["other"]
        else:
            x, w = args["self"], args["mat2"]
        if not isinstance(x, fx.Node) or not isinstance(w, fx.Node) or not view.is_weight(w):
            return None
        if kind == "aten.bmm" and not (shape_of(node) and shape_of(node)[0] == 1):
            return None
        weight, passed, transposed = _stored(view, w, already=kind == "aten.linear")
        x, weight, widened = _narrow(view, x, weight)
        if len(shape_of(weight)) != 2:
            return None
        dtype, weight_dtype, out_dtype = dtype_of(x), dtype_of(weight), dtype_of(node)
        if dtype is None or weight_dtype is None or out_dtype is None:
            return None
        nodes = (*passed, *widened, node)
        return cls(x, weight, bias, node, transposed, dtype, weight_dtype, out_dtype, nodes)


def _stored(
    view: GraphView, w: fx.Node, *, already: bool
) -> tuple[fx.Node, tuple[fx.Node, ...], bool]:
    """Follow the weight operand to its stored form; whether that is [N, K]."""
    passed: list[fx.Node] = []
    transposed = already
    while w.op == "call_function":
        spelled = view.canon(w)
        if spelled.op == "permute" and _swaps_rows_and_columns(spelled):
            transposed = not transposed
        elif spelled.op != "reshape":
            break
        elif (
            len(shape_of(spelled.inputs[0])) == 2
            and len(shape_of(w)) == 2
            and (shape_of(spelled.inputs[0]) != shape_of(w))
        ):
            break  # a reshape that mixes rows and columns is no view of the same matrix
        passed.append(w)
        w = spelled.inputs[0]
    return w, tuple(passed), transposed


def _swaps_rows_and_columns(spelled: Canonical) -> bool:
    """A matrix transposed, alone or as the only one of a batch; several would be blocks of one."""
    order, shape = spelled.attr("order"), shape_of(spelled.inputs[0])
    return bool(order == (1, 0) or (order == (0, 2, 1) and shape[0] == 1))


def _narrow(
    view: GraphView, x: fx.Node, weight: fx.Node
) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]]:
    """Undo a widening of both operands to FP32.

    Products of two BF16 values are exact in FP32, so FP32 operands widened from BF16 are the same
    sum as a BF16 product with an FP32 result.
    """
    wide_x, wide_w = view.strip(x), view.strip(weight)
    if not (isinstance(wide_x, fx.Node) and isinstance(wide_w, fx.Node)):
        return x, weight, ()
    cast_x, cast_w = view.canon(wide_x), view.canon(wide_w)
    if cast_x.op != "cast" or cast_w.op != "cast" or dtype_of(wide_x) != torch.float32:
        return x, weight, ()
    source_x, source_w = cast_x.inputs[0], cast_w.inputs[0]
    if dtype_of(source_x) != dtype_of(source_w) or dtype_of(source_x) != torch.bfloat16:
        return x, weight, ()
    stored, passed, straight = _stored(view, source_w, already=True)
    if not straight or shape_of(stored) != shape_of(weight):
        stored, passed = source_w, ()
    return source_x, stored, (*view.path(x, wide_x), wide_x, wide_w, *passed)

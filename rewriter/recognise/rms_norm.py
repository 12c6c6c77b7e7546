"""RMSNorm and add + RMSNorm, decomposed or as one op, with their rounding points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from k3fuse.rewriter.canonical import without_leading_ones
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.view import GraphView, bound_args, dtype_of, op_of, shape_of

_ONE_OP = ("aten.rms_norm", "aten._fused_rms_norm", "vllm_ir.rms_norm")


@dataclass(frozen=True)
class RmsNorm:
    """out = x * rsqrt(mean(x^2, -1) + eps) * weight, in FP32.

    x: what is normalised, FP32 or its narrow source; round_before_weight: the normalised row is
    rounded to `out`'s dtype and the product with the weight happens in that dtype.
    """

    anchors: ClassVar[tuple[str, ...]] = ("aten.rsqrt", *_ONE_OP)

    x: fx.Node
    weight: fx.Node | None
    eps: float
    out: fx.Node
    round_before_weight: bool
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> RmsNorm | None:
        """Read a norm off its rsqrt, or off the op that is the whole norm."""
        if op_of(node) in _ONE_OP:
            return _one_op(view, node)
        if op_of(node) == "aten.rsqrt":
            return _decomposed(view, node)
        return None


def _one_op(view: GraphView, node: fx.Node) -> RmsNorm | None:
    args = bound_args(node)
    x = args.get("input", args.get("x"))
    if not isinstance(x, fx.Node):
        return None
    weight, eps = args.get("weight"), args.get("eps", args.get("epsilon"))
    dims = args.get("normalized_shape")
    if dims is not None and len(dims) != 1:
        raise _refuse(node, Code.ATTR_MISMATCH, "the norm spans more than the last axis", "1", dims)
    if args.get("variance_size_override", args.get("variance_size")) is not None:
        raise _refuse(node, Code.ATTR_MISMATCH, "the variance spans a part of the row", None, "set")
    out, nodes = node, [node]
    if op_of(node) == "aten._fused_rms_norm":
        first = next((u for u in node.users if u.args[1] == 0), None)
        if first is None:
            return None
        out = first
        nodes.append(first)
    if eps is None:
        eps = torch.finfo(dtype_of(x) or torch.float32).eps
    # aten's op rounds once, after the weight; vLLM's IR op rounds the row, then multiplies.
    before = op_of(node) == "vllm_ir.rms_norm"
    return RmsNorm(x, _weight(view, weight), float(eps), out, before, tuple(nodes))


def _weight(view: GraphView, weight: Any) -> fx.Node | None:
    return weight if isinstance(weight, fx.Node) else None


def _refuse(node: fx.Node, code: Code, what: str, expected: object, actual: object) -> Refusal:
    return Refusal(Reason(code, f"{node.name}: {what}", (node.name,), str(expected), str(actual)))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _decomposed(view: GraphView, rsqrt: fx.Node) -> RmsNorm | None:
    """rsqrt(mean(square(f), -1) + eps), f * that, then the weight before or behind the rounding."""
    shifted = view.strip(rsqrt.args[0])
    if not isinstance(shifted, fx.Node) or view.canon(shifted).op != "aten.add":
        return None
    a, b = view.canon(shifted).inputs
    eps = _number(b) if _number(b) is not None else _number(a)
    mean = view.strip(a if isinstance(a, fx.Node) else b)
    if eps is None or not isinstance(mean, fx.Node) or view.canon(mean).op != "aten.mean":
        return None
    square = view.strip(view.canon(mean).inputs[0])
    if not isinstance(square, fx.Node) or view.canon(square).op != "aten.square":
        return None
    wide = view.canon(square).inputs[0]
    scaled = next((u for u in view.users(rsqrt) if _is_product_of(view, u, wide, rsqrt)), None)
    if scaled is None:
        return None
    if view.canon(mean).attr("dim") != (-1,):
        raise _refuse(
            mean,
            Code.ATTR_MISMATCH,
            "the mean is not over the last axis",
            -1,
            view.canon(mean).attr("dim"),
        )
    factor = next(i for i in view.canon(scaled).inputs if view.same(i, rsqrt))
    if shape_of(factor)[-1:] != (1,) or not _same_rows(scaled, square):
        return None  # broadcast along another axis: no factor a row
    core = [square, mean, shifted, rsqrt, scaled]
    narrow = next((n for n in core if dtype_of(n) != torch.float32), None)
    if narrow is not None:
        raise _refuse(
            narrow,
            Code.DTYPE_MISMATCH,
            "the norm is not computed in FP32",
            "float32",
            dtype_of(narrow),
        )
    return _with_weight(view, view.strip(wide), eps, core, scaled)


def _same_rows(a: fx.Node, b: fx.Node) -> bool:
    """Equal shapes up to leading sizes of 1: another grouping of the elements has other rows."""
    return without_leading_ones(shape_of(a)) == without_leading_ones(shape_of(b))


def _is_product_of(view: GraphView, node: fx.Node, a: Any, b: fx.Node) -> bool:
    spelled = view.canon(node)
    if spelled.op != "aten.mul" or len(spelled.inputs) != 2:
        return False
    x, y = spelled.inputs
    return (view.same(x, a) and view.same(y, b)) or (view.same(x, b) and view.same(y, a))


def _other(view: GraphView, product: fx.Node, known: fx.Node) -> Any:
    x, y = view.canon(product).inputs
    return y if view.same(x, known) else x


def _is_row_weight(view: GraphView, value: Any, width: Any) -> bool:
    """A [width] vector from the graph's inputs, possibly widened; never another activation."""
    if not isinstance(value, fx.Node) or not view.is_weight(value):
        return False
    shape = shape_of(value)
    return bool(shape) and shape[-1] == width and all(s == 1 for s in shape[:-1])


def _narrow_weight(view: GraphView, value: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    stripped = view.strip(value)
    if isinstance(stripped, fx.Node) and widens(view, stripped):
        source = view.canon(stripped).inputs[0]
        return source, [*view.path(value, stripped), stripped]
    return value, []


def widens(view: GraphView, node: fx.Node) -> bool:
    """Whether a node casts to FP32 from a dtype that FP32 holds exactly; any other cast rounds."""
    spelled = view.canon(node)
    if spelled.op != "cast" or dtype_of(node) != torch.float32:
        return False
    source = spelled.inputs[0]
    return isinstance(source, fx.Node) and dtype_of(source) in (torch.bfloat16, torch.float16)


def _with_weight(
    view: GraphView, wide: fx.Node, eps: float, core: list[fx.Node], scaled: fx.Node
) -> RmsNorm:
    """Find the weight product and the rounding; the widest form that fits wins."""
    width = shape_of(scaled)[-1]
    source, lead = _narrow_source(view, wide)
    users = view.users(scaled)
    for user in users:
        spelled = view.canon(user)
        if spelled.op == "cast":  # rounded first
            for product in view.users(user):
                if view.canon(product).op == "aten.mul" and dtype_of(product) == dtype_of(user):
                    weight = _other(view, product, user)
                    if _is_row_weight(view, weight, width):
                        nodes = (*lead, *core, user, product)
                        return RmsNorm(source, weight, eps, product, True, nodes)
        if spelled.op == "aten.mul":
            weight = _other(view, user, scaled)
            if not _is_row_weight(view, weight, width):
                continue
            narrow, widened = _narrow_weight(view, weight)
            rounded = next((u for u in view.users(user) if view.canon(u).op == "cast"), None)
            if rounded is not None:
                nodes = (*lead, *widened, *core, user, rounded)
                return RmsNorm(source, narrow, eps, rounded, False, nodes)
            return RmsNorm(source, narrow, eps, user, False, (*lead, *widened, *core, user))
    rounded = next((u for u in users if view.canon(u).op == "cast"), None)
    if rounded is not None:
        return RmsNorm(source, None, eps, rounded, False, (*lead, *core, rounded))
    return RmsNorm(source, None, eps, scaled, False, (*lead, *core))


def _narrow_source(view: GraphView, wide: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    if widens(view, wide):
        return view.canon(wide).inputs[0], [wide]
    return wide, []


@dataclass(frozen=True)
class AddRmsNorm:
    """sum = a + b; out = RMSNorm(sum).

    a, b: narrow addends (the sum is commutative); sum: the node that holds the narrow sum, or None;
    round_sum: the norm reads the rounded sum (else the FP32 sum).
    """

    anchors: ClassVar[tuple[str, ...]] = ("aten.rsqrt", *_ONE_OP, "vllm_ir.fused_add_rms_norm")

    a: fx.Node
    b: fx.Node
    sum: fx.Node | None
    weight: fx.Node | None
    eps: float
    out: fx.Node
    round_sum: bool
    round_before_weight: bool
    nodes: tuple[fx.Node, ...]

    @property
    def rounding(self) -> str:
        """The rounding flags in the op's spelling."""
        flags = [("round_sum", self.round_sum), ("round_before_weight", self.round_before_weight)]
        return "+".join(name for name, on in flags if on)

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> AddRmsNorm | None:
        """Read add + norm off the norm's anchor."""
        if op_of(node) == "vllm_ir.fused_add_rms_norm":
            return _fused_add(node)
        norm = view.find(RmsNorm, node)
        if norm is None:
            return None
        add = view.strip(norm.x)
        if not isinstance(add, fx.Node) or view.canon(add).op != "aten.add":
            return None
        a, b = view.canon(add).inputs
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or shape_of(a) != shape_of(b):
            return None
        if shape_of(norm.out)[-1:] != shape_of(add)[-1:]:
            return None  # a norm of parts of the row
        if dtype_of(add) != torch.float32:
            nodes = (add, *norm.nodes)
            return cls(
                a, b, add, norm.weight, norm.eps, norm.out, True, norm.round_before_weight, nodes
            )
        narrow_a, lead_a = _narrow_source(view, view.strip(a))
        narrow_b, lead_b = _narrow_source(view, view.strip(b))
        if not lead_a or not lead_b:
            return None
        stored = next((u for u in view.users(add) if view.canon(u).op == "cast"), None)
        nodes = (*lead_a, *lead_b, add, *norm.nodes, *([stored] if stored is not None else []))
        return cls(
            narrow_a, narrow_b, stored, norm.weight, norm.eps, norm.out, False,
            norm.round_before_weight, nodes,
        )  # fmt: skip


def _fused_add(node: fx.Node) -> AddRmsNorm | None:
    args = bound_args(node)
    x, residual = args.get("x"), args.get("x_residual", args.get("residual"))
    if x is None or residual is None:
        values = list(args.values())
        x, residual = values[0], values[1]
    parts = {u.args[1]: u for u in node.users}
    weight, eps = args.get("weight"), args.get("epsilon", args.get("eps"))
    if 0 not in parts or not isinstance(x, fx.Node) or not isinstance(residual, fx.Node):
        return None
    if eps is None:
        return None
    nodes = (node, *parts.values())
    # vLLM's IR op adds in FP32 and stores the narrow sum beside it.
    return AddRmsNorm(x, residual, parts.get(1), weight, float(eps), parts[0], False, True, nodes)

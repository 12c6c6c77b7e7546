"""One spelling for each node: overloads, defaults and view-like ops are folded away.

`canonical(node)` gives an operation name, its tensor or number operands, and its attributes with
defaults filled in, so that `add.Tensor` and `add.Scalar`, `_to_copy` and `convert_element_type`,
`split` and `slice`, or a packet and its default overload read alike.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

Operand = Any  # fx.Node, int, float, bool, None, or a tuple of operands

# Same elements in the same order: only the shape differs, or nothing at all.
RESHAPE = frozenset(
    {
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.unsqueeze",
        "aten.squeeze",
        "aten.flatten",
        "aten.alias",
        "aten.detach",
        "aten.clone",
        "aten.contiguous",
        "aten.lift_fresh_copy",
        "aten._reshape_copy",
        "aten.view_copy",
    }
)
# Say nothing about the value.
_IGNORED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit"}
)
COMMUTATIVE = frozenset({"aten.add", "aten.mul", "aten.maximum", "aten.minimum"})
_RENAMED = {
    "aten._to_copy": "cast",
    "aten.to": "cast",
    "prims.convert_element_type": "cast",
    "aten.square": "aten.square",
    "aten._softmax": "aten.softmax",
}
_OPERAND_NAMES = frozenset({"self", "other", "exponent", "input", "value", "src"})


@dataclass(frozen=True)
class Canonical:
    """One node in its canonical spelling."""

    op: str
    inputs: tuple[Operand, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, key: str, default: Any = None) -> Any:
        """Return one attribute."""
        for k, v in self.attrs:
            if k == key:
                return v
        return default


@lru_cache(maxsize=4096)
def target_name(target: Any) -> str:
    """Return "namespace.op" without the overload; "getitem"; or a higher-order op's name."""
    if isinstance(target, OpOverload):
        return str(target.overloadpacket).replace("::", ".")
    if isinstance(target, OpOverloadPacket):
        return str(target).replace("::", ".")
    if isinstance(target, HigherOrderOperator):
        return str(target.name())  # type: ignore[no-untyped-call]
    if target is operator.getitem:
        return "getitem"
    return getattr(target, "__name__", str(target))


def op_of(node: fx.Node) -> str:
    """Return the operation name of a node, or its kind ("placeholder", "output", ...)."""
    return target_name(node.target) if node.op == "call_function" else node.op


def overload(node: fx.Node) -> OpOverload | None:
    """Return the overload a node calls; a packet resolves to the first that takes its arguments."""
    target = node.target
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        found: list[OpOverload] = [getattr(target, n) for n in names]
        return next((o for o in found if _takes(o, node)), found[0])
    return None


def _takes(target: OpOverload, node: fx.Node) -> bool:
    """Whether a node's arguments fit a schema: count, names, and tensors where tensors belong."""
    schema = target._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    if len(node.args) > len(positional) or not set(node.kwargs) <= {a.name for a in schema}:
        return False
    given = {a.name: v for a, v in zip(positional, node.args, strict=False)} | node.kwargs
    for argument in schema:
        if argument.name not in given:
            if not argument.has_default_value():
                return False
        elif (
            isinstance(argument.type, torch.TensorType)
            and not isinstance(given[argument.name], (fx.Node, int, float))
        ) or (
            isinstance(argument.type, torch.ListType)
            and not isinstance(given[argument.name], (list, tuple))
        ):
            return False
    return True


@lru_cache(maxsize=4096)
def _schema_args(target: OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    return tuple(
        (a.name, a.has_default_value(), a.default_value if a.has_default_value() else None)
        for a in target._schema.arguments
    )


def bound_args(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by schema name with defaults filled in (empty without schema)."""
    target = overload(node)
    if target is None:
        return {}
    bound: dict[str, Any] = {}
    for position, (arg, has_default, default) in enumerate(_schema_args(target)):
        if position < len(node.args):
            bound[arg] = node.args[position]
        elif arg in node.kwargs:
            bound[arg] = node.kwargs[arg]
        elif has_default:
            bound[arg] = default
    return bound


def value_of(node: fx.Node) -> Any:
    """Return meta["val"] (a fake tensor, SymInt, or tuple), or None."""
    return node.meta.get("val")


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Return sizes as ints or sympy expressions; () where the value is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    if not value._has_symbolic_sizes_strides:
        return tuple(value.shape)
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else int(s) for s in value.shape)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype, or None where the value is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def without_leading_ones(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape from its first size other than 1 on; the rest groups elements alike."""
    first = next((i for i, s in enumerate(shape) if s != 1), len(shape))
    return shape[first:]


def rank_of(node: Any) -> int:
    """Return the number of dimensions (0 for what is no tensor)."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _negative(dim: Any, rank: int) -> Any:
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


def _static(value: Any) -> Any:
    if isinstance(value, fx.Node):
        inner = value.meta.get("val")
        return inner.node.expr if isinstance(inner, torch.SymInt) else inner
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return value


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return _static(value)


def _slice(base: fx.Node, dim: Any, start: Any, stop: Any) -> Canonical:
    attrs = (("dim", _negative(dim, rank_of(base))), ("start", start), ("stop", stop))
    return Canonical("slice", (base,), attrs)


def _canonical_slice(node: fx.Node, args: dict[str, Any]) -> Canonical:
    base = args["self"]
    dim, size = args["dim"], shape_of(base)[args["dim"]] if shape_of(base) else None
    start, stop, step = _static(args["start"]), _static(args["end"]), args["step"]
    start = 0 if start is None else start
    if isinstance(size, int):
        start = max(start + size, 0) if isinstance(start, int) and start < 0 else start
        stop = size if stop is None or (isinstance(stop, int) and stop > size) else stop
        stop = stop + size if isinstance(stop, int) and stop < 0 else stop
    elif stop is None or (isinstance(stop, int) and stop >= 2**62):
        stop = size
    if step != 1:
        return Canonical("aten.slice", (base,), (("dim", dim), ("start", start), ("step", step)))
    if start == 0 and stop == size:
        return Canonical("reshape", (base,))
    return _slice(base, dim, start, stop)


def _canonical_getitem(node: fx.Node) -> Canonical:
    source, index = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return Canonical("getitem", (source,), (("index", index),))
    kind = op_of(source)
    if kind in ("aten.split_with_sizes", "aten.split", "aten.chunk"):
        args = bound_args(source)
        base, dim = args["self"], args["dim"]
        pieces = source.meta.get("val")
        if isinstance(base, fx.Node) and isinstance(pieces, (list, tuple)):
            sizes = [_static(piece.shape[dim]) for piece in pieces]
            start = sum(sizes[:index], start=sympy.Integer(0))
            start = int(start) if start.is_number else start
            return _slice(base, dim, start, start + sizes[index])
    return Canonical("getitem", (source,), (("index", index),))


def _canonical_permute(node: fx.Node, kind: str, args: dict[str, Any]) -> Canonical:
    base = args["self"]
    rank = rank_of(base)
    order = list(range(rank))
    if kind == "aten.permute":
        order = [d % rank for d in args["dims"]]
    elif kind in ("aten.transpose", "aten.swapaxes"):
        a, b = args["dim0"] % max(rank, 1), args["dim1"] % max(rank, 1)
        order[a], order[b] = order[b], order[a]
    elif rank == 2:  # aten.t
        order = [1, 0]
    if order == list(range(rank)):
        return Canonical("reshape", (base,))
    return Canonical("permute", (base,), (("order", tuple(order)),))


def _same_value(node: fx.Node, kind: str, args: dict[str, Any]) -> Canonical | None:
    """Nodes that hold their input's elements in order: reshapes, no-op casts, expands, copies."""
    base = args.get("self", args.get("a"))
    if not isinstance(base, fx.Node):
        return None
    if kind == "aten.view" and "dtype" in args:
        return Canonical("reshape", (base,)) if dtype_of(base) == dtype_of(node) else None
    if kind in RESHAPE:
        return Canonical("reshape", (base,))
    if kind == "aten.expand" and shape_of(base) == shape_of(node):
        return Canonical("reshape", (base,))
    if kind == "aten.copy":
        source = args["src"]
        if isinstance(source, fx.Node) and shape_of(source) == shape_of(node):
            same = dtype_of(source) == dtype_of(node)
            return Canonical("reshape" if same else "cast", (source,), _cast_attrs(node, same))
    if _RENAMED.get(kind) == "cast":
        same = dtype_of(base) == dtype_of(node)
        return Canonical("reshape" if same else "cast", (base,), _cast_attrs(node, same))
    return None


def _cast_attrs(node: fx.Node, same: bool) -> tuple[tuple[str, Any], ...]:
    return () if same else (("dtype", dtype_of(node)),)


def canonical(node: fx.Node) -> Canonical:
    """Return the canonical spelling of any node (uncached; GraphView caches it)."""
    if node.op != "call_function":
        return Canonical(node.op, ())
    kind = target_name(node.target)
    if kind == "getitem":
        return _canonical_getitem(node)
    args = bound_args(node)
    if not args:
        return Canonical(kind, tuple(node.args), tuple(sorted(node.kwargs.items())))
    same = _same_value(node, kind, args)
    if same is not None:
        return same
    if kind == "aten.slice":
        return _canonical_slice(node, args)
    if kind in ("aten.permute", "aten.transpose", "aten.t", "aten.swapaxes"):
        return _canonical_permute(node, kind, args)
    if kind == "aten.pow" and args.get("exponent") in (2, 2.0):
        return Canonical("aten.square", (args["self"],))
    if kind == "aten.mul" and args["self"] is args["other"]:
        return Canonical("aten.square", (args["self"],))
    if kind in ("aten.add", "aten.sub"):
        # a + 2 b is no sum of two rows: it gets a name of its own.
        scaled = "" if args.get("alpha", 1) == 1 else f" alpha={args['alpha']}"
        return Canonical(kind + scaled, (args["self"], args["other"]))
    if kind == "aten.div" and args.get("rounding_mode") is not None:
        return Canonical(f"{kind} {args['rounding_mode']}", (args["self"], args["other"]))
    return _generic(node, kind, args)


def _generic(node: fx.Node, kind: str, args: dict[str, Any]) -> Canonical:
    inputs: list[Operand] = []
    attrs: list[tuple[str, Any]] = []
    first = [v[0] if isinstance(v, (list, tuple)) and v else v for v in args.values()]
    rank = next((rank_of(v) for v in first if rank_of(v)), 0)
    for key, value in args.items():
        if key in _IGNORED:
            continue
        is_list = isinstance(value, (list, tuple)) and any(rank_of(v) for v in value)
        if rank_of(value) or (isinstance(value, fx.Node) and dtype_of(value) is not None):
            inputs.append(value)
        elif is_list:
            inputs.append(tuple(value))
        elif key in _OPERAND_NAMES and isinstance(value, (int, float)):
            inputs.append(value)
        elif key in ("dim", "dims") and value is not None:
            dims = value if isinstance(value, (list, tuple)) else [value]
            shift = rank + 1 if kind == "aten.stack" else rank
            attrs.append(("dim", tuple(sorted(_negative(d, shift) for d in dims))))
        else:
            attrs.append((key, _freeze(value)))
    return Canonical(
        _RENAMED.get(kind, kind), tuple(inputs), tuple(sorted(attrs, key=lambda a: a[0]))
    )

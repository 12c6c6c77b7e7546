"""JSON spelling of FX node arguments and call targets.

Shared by the composition texts of the fused ops and by the graph files of the rewriter, so that
one argument is written the same way in both. A scalar (int, bool, str, None, finite float) and a
list are themselves; everything else is an object of exactly one key:

    {"node": "mm"}            another node, named by the caller's `ref`
    {"float": "inf"}          a float that JSON has no literal for: "inf", "-inf", "nan"
    {"dtype": "bfloat16"}     {"device": "cuda"}
    {"memory_format": "contiguous_format"}               {"layout": "strided"}
    {"sym": "8*s0"}           an integer expression over shape symbols
    {"op": "aten.mm.default"} an operator given as an argument
    {"tuple": [...]}          {"slice": [start, stop, step]}  {"dict": {"key": value}}
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx as fx

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}
_LAYOUTS = {
    str(f).removeprefix("torch."): f
    for f in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged)
}
# Python functions that stand as call targets in traced graphs, by the prefix they are written with.
# Not attrgetter, methodcaller or call: a text must not reach beyond arithmetic and indexing.
_OPERATORS = frozenset(
    [
        "getitem",
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "neg",
        "pos",
        "abs",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
        "xor",
        "not_",
        "invert",
        "lshift",
        "rshift",
        "index",
        "is_",
        "is_not",
        "contains",
        "truth",
        "matmul",
    ]
)
_PLAIN_MODULES: dict[str, Any] = {"operator": operator, "math": math, "builtins": builtins}
_PLAIN_BUILTINS = frozenset({"max", "min", "abs", "pow", "round"})


class EncodingError(ValueError):
    """An argument or target that has no JSON spelling, or a JSON value that spells none."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: object) -> torch.dtype:
    """Inverse of `dtype_name`; EncodingError for a name that this torch does not have."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise EncodingError(f"unknown dtype {name!r}; use a torch dtype name such as 'bfloat16'")
    return found


def target_name(target: object) -> str:
    """Text of a call target: "aten.mm.default", "higher_order.cond", "operator.getitem"."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target._name}"
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    if callable(target) and name:
        if module == "_operator" and getattr(operator, name, None) is target:
            return f"operator.{name}"
        if module == "math" and getattr(math, name, None) is target:
            return f"math.{name}"
        if name in _PLAIN_BUILTINS and getattr(builtins, name) is target:
            return f"builtins.{name}"
        if name.startswith("sym_") and getattr(torch, name, None) is target:
            return f"torch.{name}"
    raise EncodingError(
        f"call target {target!r} has no text; only operator overloads, higher-order operators, "
        "operator.*, math.* and torch.sym_* do. Capture the graph after AOTAutograd"
    )


def target_from_name(name: object) -> Callable[..., Any]:
    """Inverse of `target_name`; EncodingError names an operator that is not registered here."""
    parts = name.split(".") if isinstance(name, str) else []
    found: object = None
    if len(parts) == 2 and parts[0] == "higher_order":
        found = _higher_order(parts[1])
    elif len(parts) == 2 and parts[0] == "torch" and parts[1].startswith("sym_"):
        found = getattr(torch, parts[1], None)
    elif len(parts) == 2 and parts[0] in _PLAIN_MODULES:
        allowed = {"builtins": _PLAIN_BUILTINS, "operator": _OPERATORS}.get(parts[0])
        if (allowed is None or parts[1] in allowed) and not parts[1].startswith("_"):
            found = getattr(_PLAIN_MODULES[parts[0]], parts[1], None)
    elif len(parts) == 3:
        packet = getattr(getattr(torch.ops, parts[0], None), parts[1], None)
        found = getattr(packet, parts[2], None) if packet is not None else None
        found = found if isinstance(found, torch._ops.OpOverload) else None
    if not callable(found):
        raise EncodingError(
            f"unknown operator {name!r}; import the package that registers it, or store its schema"
        )
    return found


def _higher_order(name: str) -> object:
    if not hasattr(torch.ops.higher_order, name):
        # These register themselves on import only, and torch does not import all of them at start.
        for module in ("auto_functionalize", "triton_kernel_wrap"):
            importlib.import_module(f"torch._higher_order_ops.{module}")
    return getattr(torch.ops.higher_order, name, None)


def encode(
    arg: object,
    ref: Callable[[fx.Node], Json],
    sym: Callable[[Any], str] | None = None,
    device: Callable[[torch.device], str] = str,
) -> Json:
    """JSON of one argument.

    `ref` spells a node, usually as {"node": name}; `sym` spells a symbolic integer's expression and
    defaults to its text, and so does `device` for a device. Raises EncodingError for anything that
    the module docstring does not list.
    """
    if isinstance(arg, fx.Node):
        return ref(arg)
    if arg is None or isinstance(arg, bool | int | str):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": str(arg)}
    if isinstance(arg, torch.SymInt):
        return {"sym": sym(arg) if sym else str(arg.node.expr)}
    if isinstance(arg, tuple):
        return {"tuple": [encode(a, ref, sym, device) for a in arg]}
    if isinstance(arg, list):
        return [encode(a, ref, sym, device) for a in arg]
    if isinstance(arg, slice):
        return {"slice": [encode(a, ref, sym, device) for a in (arg.start, arg.stop, arg.step)]}
    if isinstance(arg, Mapping):
        if not all(isinstance(k, str) for k in arg):
            raise EncodingError(f"dict argument with keys other than str: {sorted(map(str, arg))}")
        return {"dict": {k: encode(v, ref, sym, device) for k, v in arg.items()}}
    if isinstance(arg, torch.device):
        return {"device": device(arg)}
    return _encode_torch(arg)


def _encode_torch(arg: object) -> Json:
    if isinstance(arg, torch.dtype):
        return {"dtype": dtype_name(arg)}
    if isinstance(arg, torch.memory_format):
        return {"memory_format": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.layout):
        return {"layout": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return {"op": target_name(arg)}
    raise EncodingError(f"argument of type {type(arg).__name__} has no JSON spelling: {arg!r}")


def decode(
    value: Json,
    deref: Callable[[str], Any],
    sym: Callable[[str], Any] | None = None,
    device: Callable[[str], torch.device] = torch.device,
) -> Any:
    """Inverse of `encode`.

    `deref` gives the node (or value) of a name, `sym` the value of an expression text, `device` the
    device of a device text. Raises EncodingError for a malformed value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(v, deref, sym, device) for v in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise EncodingError(f"expected a scalar, a list or an object of one key, got {value!r}")
    ((kind, body),) = value.items()
    if kind == "sym":
        if sym is None or not isinstance(body, str):
            raise EncodingError(f"symbolic integer {body!r} where none can be resolved")
        return sym(body)
    if kind == "node" and isinstance(body, str):
        return deref(body)
    if kind == "device" and isinstance(body, str):
        try:
            return device(body)
        except RuntimeError as err:
            raise EncodingError(f"unknown device {body!r}") from err
    return _decode_object(kind, body, lambda v: decode(v, deref, sym, device))


def _decode_object(kind: str, body: Json, inner: Callable[[Json], Any]) -> Any:
    if kind == "tuple" and isinstance(body, Sequence) and not isinstance(body, str):
        return tuple(inner(v) for v in body)
    if kind == "slice" and isinstance(body, list) and len(body) == 3:
        return slice(*(inner(v) for v in body))
    if kind == "dict" and isinstance(body, dict):
        return {k: inner(v) for k, v in body.items()}
    if kind == "float" and body in ("inf", "-inf", "nan"):
        return float(str(body))
    if kind == "dtype":
        return dtype_from_name(body)
    if kind == "op":
        return target_from_name(body)
    if kind == "memory_format" and body in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[str(body)]
    if kind == "layout" and body in _LAYOUTS:
        return _LAYOUTS[str(body)]
    raise EncodingError(f"unknown spelling {{{kind!r}: {body!r}}}")

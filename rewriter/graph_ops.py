"""Operators of a stored graph that this process does not have.

A file carries the schema of every operator outside torch's own namespaces. Loading defines those
that are missing, without kernels, so that a graph captured in vLLM can be read and shape-propagated
where vLLM is not installed. When the package that owns such a namespace is imported afterwards, the
stand-ins are withdrawn first: two definitions of one operator are an error in torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.fx as fx

from k3fuse.kernels.common.encoding import EncodingError, Json

# Namespaces that every torch has.
_TORCH_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "_c10d_functional", "c10d", "c10d_functional", "inductor", "symm_mem"}
)
# Our own operators are never stood in for: they come from the pattern packages.
_OWN_NAMESPACE = "k3fuse"
_OWNERS = ("vllm",)
# Type kinds that a plain torch can parse in a schema.
_PLAIN_TYPES = (
    torch._C.TensorType,
    torch._C.IntType,
    torch._C.FloatType,
    torch._C.BoolType,
    torch._C.StringType,
    torch._C.NumberType,
    torch._C.DeviceObjType,
    torch._C.NoneType,
    torch._C.AnyType,
)

_libraries: dict[str, torch.library.Library] = {}


def describe_ops(graph: fx.Graph) -> dict[str, Json]:
    """Schema and shape rule of every operator outside torch, by its text such as "vllm.op.default".

    `like[i]` names the argument that result i has the shape and dtype of in every call of the graph
    (a contiguous result), or is null where no argument has.
    """
    calls: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            calls.setdefault(node.target, []).append(node)
        for arg in [*node.args, *node.kwargs.values()]:
            if isinstance(arg, torch._ops.OpOverload):  # auto_functionalized(op, ...)
                calls.setdefault(arg, [])
    return {
        str(op): {"schema": portable_schema(op), "like": _like(op, nodes)}
        for op, nodes in calls.items()
        if op.namespace not in _TORCH_NAMESPACES
    }


def portable_schema(op: torch._ops.OpOverload) -> str:
    """The operator's schema in a form that torch alone can define: without types of a package.

    vLLM passes layer names as objects of an opaque type of its own; a schema that names this type
    can only be defined after vLLM has registered it. `Any` takes the same values. A mutable
    argument declared as `Tensor!` prints as `Tensor($0! -> )`, which torch does not read back.
    """
    text = re.sub(r"\(\$(\d+)(!?) *-> *\)", r"(a\1\2)", str(op._schema))
    for arg in op._schema.arguments:
        inner = arg.type
        while isinstance(inner, torch._C.OptionalType | torch._C.ListType):
            inner = inner.getElementType()
        if not isinstance(inner, _PLAIN_TYPES):
            text = text.replace(f"{_type_text(arg.type)} {arg.name}", f"Any {arg.name}")
    return text


def _type_text(kind: Any) -> str:
    return str(getattr(kind, "annotation_str", kind))


def _like(op: torch._ops.OpOverload, nodes: Sequence[fx.Node]) -> list[Json]:
    rules: list[Json] = []
    for i in range(len(op._schema.returns)):
        names = [a.name for a in op._schema.arguments]
        fits = [n for n in names if nodes and all(_same(op, node, n, i) for node in nodes)]
        rules.append(fits[0] if fits else None)
    return rules


def _same(op: torch._ops.OpOverload, node: fx.Node, name: str, i: int) -> bool:
    arg, out = _argument(op, node.args, node.kwargs, name), node.meta.get("val")
    out = out[i] if isinstance(out, tuple | list) else out
    val = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    if not isinstance(out, torch.Tensor) or not isinstance(val, torch.Tensor):
        return False
    same = [str(s) for s in out.shape] == [str(s) for s in val.shape] and out.dtype == val.dtype
    return same and bool(out.is_contiguous())


def _argument(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Any:
    for position, arg in enumerate(op._schema.arguments):
        if arg.name == name:
            in_place = position < len(args) and not arg.kwarg_only
            return args[position] if in_place else kwargs.get(name)
    return None


def define_missing(ops: Mapping[str, Mapping[str, Any]]) -> None:
    """Define those of a file's `ops` that this process lacks; EncodingError if one cannot be."""
    missing = {name: spec for name, spec in ops.items() if not _exists(name)}
    if any(_is_own(n) for n in missing):
        for entry in importlib.metadata.entry_points(group="k3fuse.patterns"):
            entry.load()
        missing = {name: spec for name, spec in ops.items() if not _exists(name)}
    for name, spec in missing.items():
        namespace = name.split(".")[0]
        if _is_own(name):
            raise EncodingError(f"operator {name} is not in this k3fuse; use the one that wrote it")
        _watch_owners()
        _define(namespace, name, spec)


def _define(namespace: str, name: str, spec: Mapping[str, Any]) -> None:
    schema, like = spec.get("schema"), spec.get("like")
    if not isinstance(schema, str) or not isinstance(like, list):
        raise EncodingError(f"operator {name} needs a 'schema' text and a 'like' list")
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(  # type: ignore[no-untyped-call]
            namespace, "FRAGMENT"
        )
    try:
        library.define(schema.split("::", 1)[-1])  # type: ignore[no-untyped-call]
    except RuntimeError as err:
        reason = str(err).strip().splitlines()[0]
        raise EncodingError(f"operator {name}: bad schema {schema!r} ({reason})") from err
    if not _exists(name):
        raise EncodingError(f"operator {name}: its schema {schema!r} defines another name")
    op = getattr(getattr(getattr(torch.ops, namespace), name.split(".")[1]), name.split(".")[2])
    torch.library.register_fake(op._schema.name + _dot(op), _fake(op, like), lib=library)


def _dot(op: torch._ops.OpOverload) -> str:
    return f".{op._overloadname}" if op._overloadname != "default" else ""


def _fake(op: torch._ops.OpOverload, like: Sequence[str | None]) -> Callable[..., Any]:
    """Fake implementation: nothing for `-> ()`, otherwise results like the named arguments."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        results = []
        for rule in like:
            source = None if rule is None else _argument(op, args, kwargs, rule)
            if not isinstance(source, torch.Tensor):
                raise NotImplementedError(f"{op} is a stand-in without a shape rule for a result")
            results.append(source.new_empty(source.shape))
        if len(op._schema.returns) == 1:
            return results[0]
        return tuple(results) if results else None

    return fake


def _exists(name: str) -> bool:
    parts = name.split(".")
    if len(parts) != 3:
        raise EncodingError(f"operator name {name!r} is not namespace.name.overload")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    return packet is not None and parts[2] in packet.overloads()


def _is_own(name: str) -> bool:
    return name.split(".")[0] == _OWN_NAMESPACE


def release_ops() -> None:
    """Withdraw all stand-ins. Graphs that use them can still be read, but no longer run."""
    for namespace in list(_libraries):
        _libraries.pop(namespace)._destroy()  # type: ignore[no-untyped-call]


class _Owners(importlib.abc.MetaPathFinder):
    """Withdraws the stand-ins when a package that defines the real operators is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _OWNERS:
            release_ops()


def _watch_owners() -> None:
    if not any(isinstance(finder, _Owners) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Owners())

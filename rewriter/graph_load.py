"""Reading of graph files: text -> fx.GraphModule with fake tensors.

The values are FakeTensors on the stored devices; that needs no GPU and no CUDA build of torch.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from k3fuse.kernels.common.encoding import (
    EncodingError,
    Json,
    decode,
    dtype_from_name,
    target_from_name,
)
from k3fuse.rewriter.graph_file import SCHEMA, GraphFile, GraphFileError
from k3fuse.rewriter.graph_ops import define_missing

_REWRITE = "write it again with save_graph"
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.FloorDiv: sympy_functions.FloorDiv,
    ast.Mod: sympy_functions.PythonMod,
    ast.Div: operator.truediv,
}
_CALLS = ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "Max", "Min")
_POWERS = range(5)  # sizes have small powers; 9**9**9 would not end
_OPS = ("placeholder", "call_function", "get_attr", "output")
# These come into the text of the module's forward(), which Python runs: names, and nothing else.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ATTRIBUTE = re.compile(r"\w+(\.\w+)*", re.ASCII)


def parse_graph(text: str, name: str) -> GraphFile:
    """Build the graph of a file's text; `name` stands for the file in error messages."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as err:
        raise GraphFileError(
            f"{name}: line {err.lineno}: not complete JSON ({err.msg}), truncated?; {_REWRITE}"
        ) from err
    except (ValueError, RecursionError) as err:  # numbers or nesting beyond Python's limits
        raise GraphFileError(f"{name}: no graph file ({_first_line(err)}); {_REWRITE}") from err
    if not isinstance(data, dict) or "schema" not in data:
        raise GraphFileError(f"{name}: field 'schema' is missing; give a file of {SCHEMA!r}")
    if data["schema"] != SCHEMA:
        raise GraphFileError(
            f"{name}: field 'schema' is {data['schema']!r}, this k3fuse reads {SCHEMA!r}; "
            "use the k3fuse that wrote it, or capture the graph again"
        )
    try:
        return _Reader(data, name).read()
    except GraphFileError:
        raise
    except Exception as err:
        # Whatever else a damaged field leads to inside torch or sympy: one error for the caller.
        raise GraphFileError(f"{name}: not understood ({_first_line(err)}); {_REWRITE}") from err


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


class _SymbolEnv(ShapeEnv):
    """A ShapeEnv whose symbols keep the numbers of the file: source "s3" becomes s3."""

    def _generate_unique_id(self, source_name: str) -> int:
        return int(source_name[1:])


class _Reader:
    """One file on its way to a graph."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self._data = data
        self._name = name
        self._env = _SymbolEnv()
        # Constants of a graph (get_attr) are the caller's real tensors in a live graph.
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._symbols: dict[str, sympy.Expr] = {}
        self._symints: dict[str, int | torch.SymInt] = {}
        self._nodes: dict[str, fx.Node] = {}
        self._root = torch.nn.Module()

    def read(self) -> GraphFile:
        self._declare_symbols()
        try:
            define_missing(self._field("ops", dict))
        except EncodingError as err:
            raise self._error("field 'ops'", err) from err
        graph = fx.Graph()
        for index, entry in enumerate(self._field("nodes", list)):
            where = f"node {index}"
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise self._error(where, f"needs an object with a 'name'; {_REWRITE}")
            self._add_node(graph, entry, f"{where} {entry['name']!r}")
        if not any(n.op == "output" for n in graph.nodes):
            raise self._error("field 'nodes'", f"the graph has no output node; {_REWRITE}")
        module = fx.GraphModule(self._root, graph)
        meta = self._field("meta", dict)
        return GraphFile(module, dict(meta), self._env, self._mode)

    def _error(self, where: str, problem: object) -> GraphFileError:
        return GraphFileError(f"{self._name}: {where}: {problem}")

    def _field(self, key: str, kind: type) -> Any:
        value = self._data.get(key)
        if not isinstance(value, kind):
            raise self._error(f"field {key!r}", f"is missing or no {kind.__name__}; {_REWRITE}")
        return value

    # ---- symbols

    def _declare_symbols(self) -> None:
        hints = self._field("hints", dict)
        for name, bounds in self._field("symbols", dict).items():
            where = f"field 'symbols', {name!r}"
            known = name[:1] in ("s", "u") and name[1:].isdigit()
            if not known or not isinstance(bounds, list) or len(bounds) != 2:
                raise self._error(where, f"expected s<N> or u<N> with [low, high]; {_REWRITE}")
            low = -int_oo if bounds[0] is None else sympy.Integer(bounds[0])
            high = int_oo if bounds[1] is None else sympy.Integer(bounds[1])
            symbol = self._new_symbol(name, hints.get(name), where)
            self._symbols[name] = symbol
            self._env.var_to_range[symbol] = ValueRanges(low, high)

    def _new_symbol(self, name: str, hint: Any, where: str) -> sympy.Symbol:
        if name.startswith("u"):
            return self._env.create_unbacked_symint().node.expr
        if not isinstance(hint, int) or hint < 0:
            raise self._error(where, f"field 'hints' needs the traced size, got {hint!r}")
        return self._env.create_symbol(
            hint,
            source=ConstantSource(name),
            dynamic_dim=DimDynamic.DYNAMIC,
            do_not_specialize_zero_one=True,  # the file's range says what the graph assumed
        )

    def _symint(self, text: str) -> int | torch.SymInt:
        if text not in self._symints:
            expr = self._expression(text)
            if not expr.is_integer:
                raise EncodingError(f"expression {text!r} is no integer")
            self._symints[text] = self._env.create_symintnode(expr, hint=None)
        return self._symints[text]

    def _expression(self, text: str) -> sympy.Expr:
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as err:
            raise EncodingError(f"bad shape expression {text!r}") from err
        return self._evaluate(tree, text)

    def _evaluate(self, tree: ast.expr, text: str) -> sympy.Expr:
        """Only numbers, the file's symbols, arithmetic and torch's shape functions: no eval()."""
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
            return sympy.Integer(tree.value)
        if isinstance(tree, ast.Name):
            if tree.id not in self._symbols:
                raise EncodingError(f"unknown symbol {tree.id!r} in {text!r}; add it to 'symbols'")
            return self._symbols[tree.id]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._evaluate(tree.operand, text)
        if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
            sides = self._evaluate(tree.left, text), self._evaluate(tree.right, text)
            if isinstance(tree.op, ast.Pow) and sides[1] not in _POWERS:
                raise EncodingError(f"power {sides[1]} in {text!r} is not in 0 to 4")
            return _BINARY[type(tree.op)](*sides)
        call = tree.func if isinstance(tree, ast.Call) and not tree.keywords else None
        if isinstance(tree, ast.Call) and isinstance(call, ast.Name) and call.id in _CALLS:
            return getattr(sympy_functions, call.id)(*(self._evaluate(a, text) for a in tree.args))
        raise EncodingError(f"bad shape expression {text!r}")

    # ---- values

    def _value(self, value: Json) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "shape" in value:
            return self._tensor(value)
        if "tuple" in value and isinstance(value["tuple"], list):
            return tuple(self._value(v) for v in value["tuple"])
        if "dict" in value and isinstance(value["dict"], dict):
            return {k: self._value(v) for k, v in value["dict"].items()}
        return decode(value, self._no_node, self._symint)

    def _no_node(self, name: str) -> Any:
        raise EncodingError(f"a value cannot refer to node {name!r}")

    def _tensor(self, value: Mapping[str, Any]) -> torch.Tensor:
        shape, stride = (self._sizes(value.get(k), k) for k in ("shape", "stride"))
        if len(shape) != len(stride):
            raise EncodingError("field 'stride' has another length than 'shape'")
        dtype = dtype_from_name(value.get("dtype"))
        device = decode({"device": value.get("device")}, self._no_node)
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def _sizes(self, sizes: Any, key: str) -> list[int | torch.SymInt]:
        if not isinstance(sizes, list) or not all(type(s) in (int, str) for s in sizes):
            raise EncodingError(f"field {key!r} needs a list of sizes, got {sizes!r}")
        return [self._symint(s) if isinstance(s, str) else s for s in sizes]

    # ---- nodes

    def _add_node(self, graph: fx.Graph, entry: Mapping[str, Any], where: str) -> None:
        name, op, target = entry["name"], entry.get("op"), entry.get("target")
        if op not in _OPS or not isinstance(target, str):
            raise self._error(where, f"field 'op' is {op!r}, 'target' {target!r}; {_REWRITE}")
        if name in self._nodes:
            raise self._error(where, f"a second node of this name; {_REWRITE}")
        written = {"placeholder": _NAME, "get_attr": _ATTRIBUTE}.get(op)
        if written is not None and not written.fullmatch(target):
            raise self._error(where, f"field 'target' is {target!r}, which is no name; {_REWRITE}")
        for key in entry.get("kwargs", {}):
            if not _NAME.fullmatch(key):
                raise self._error(
                    where, f"field 'kwargs' has {key!r}, which is no name; {_REWRITE}"
                )
        field = "target"
        try:
            function = target_from_name(target) if op == "call_function" else target
            field = "args"
            args = tuple(self._arg(a) for a in entry.get("args", []))
            field = "kwargs"
            kwargs = {k: self._arg(v) for k, v in entry.get("kwargs", {}).items()}
            field = "val"
            meta = self._meta(entry)
        except (EncodingError, RuntimeError, TypeError, AttributeError) as err:
            reason = str(err).splitlines()[0]
            raise self._error(f"{where}, field {field!r}", reason) from err
        if op == "get_attr":
            self._attach(target, meta.get("val"), where)
        node = graph.create_node(op, function, args, kwargs, name)
        if node.name != name:
            node._rename(name)
        node.meta.update(meta)
        self._nodes[name] = node

    def _arg(self, value: Json) -> Any:
        return decode(value, self._node, self._symint)

    def _node(self, name: str) -> fx.Node:
        if name not in self._nodes:
            raise EncodingError(f"refers to node {name!r}, which is not defined above; {_REWRITE}")
        return self._nodes[name]

    def _meta(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if "val" in entry:
            val = entry["val"]
            if isinstance(val, dict) and "opaque" in val:
                meta["opaque"], meta["val"] = str(val["opaque"]), None
            else:
                meta["val"] = self._value(val)
        for key, name in (("origin", "origin"), ("kernel", "triton_kernel"), ("k3fuse", "k3fuse")):
            if key in entry:
                meta[name] = entry[key]
        if "module" in entry:
            meta["nn_module_stack"] = {entry["module"]: (entry["module"], "")}
        if "source" in entry:
            place, _, code = str(entry["source"]).partition(" ")
            file, _, line = place.rpartition(":")
            meta["stack_trace"] = f'  File "{file}", line {line}, in graph_file\n    {code}\n'
        return meta

    def _attach(self, target: str, val: Any, where: str) -> None:
        if not isinstance(val, torch.Tensor):
            raise self._error(where, f"get_attr needs a tensor 'val'; {_REWRITE}")
        owner = self._root
        *path, last = target.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(last, val)

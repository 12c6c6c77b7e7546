"""FX graphs as files: JSON, one node a line, stable byte for byte.

    {
    "schema": "k3fuse.graph/1",
    "meta": {"name": ..., "tp": 8, "m": 4, "groups": {"tp:0": 8}, ...},
    "symbols": {"s0": [2, null]},            value range of each shape symbol, null = unbounded
    "hints": {"s0": 4},                      the size it was traced with
    "ops": {"vllm.all_reduce.default": {"schema": "...", "like": ["tensor"]}},
    "nodes": [
    {"name": "mm", "op": "call_function", "target": "aten.mm.default", "args": [...], "val": {...}},
    ...
    ]
    }

A graph is stored as it stands after AOTAutograd: placeholders, call_function, get_attr of a
tensor, output. `val` is a tensor's dtype, shape, stride and device (no data), a symbolic integer, a
list or dict of these, or {"opaque": text} for an object that is no tensor (vLLM's LayerName
inputs). Symbols are renamed s0, s1, ... in the order in which they appear, so that a file does not
depend on how the ShapeEnv of the tracing process numbered them.

`ops` holds the schema of every operator outside torch (with its mutability), so that a graph of
vLLM loads where vLLM is not installed; `graph_ops` says how. Reading is in `graph_load`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k3fuse.kernels.common.encoding import EncodingError, Json, dtype_name, encode, target_name
from k3fuse.rewriter.graph_ops import describe_ops

SCHEMA = "k3fuse.graph/1"
_SOURCE_WIDTH = 100
_DISPATCH_FRAMES = ("__torch_function__", "__torch_dispatch__")


class GraphFileError(ValueError):
    """A graph that cannot be written, or a file that cannot be read: one line, with the fix."""


@dataclass
class GraphFile:
    """A loaded graph. `meta` is the header's free part; `shape_env` holds the file's symbols."""

    module: fx.GraphModule
    meta: dict[str, Json]
    shape_env: ShapeEnv | None = None
    fake_mode: FakeTensorMode | None = None


def save_graph(
    gm: fx.GraphModule,
    path: Path,
    meta: Mapping[str, Json],
    *,
    devices: Mapping[str, str] | None = None,
) -> None:
    """Write `gm` to `path`; arguments and errors as `graph_text`."""
    text = graph_text(gm, meta, devices=devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def graph_text(
    gm: fx.GraphModule, meta: Mapping[str, Json], *, devices: Mapping[str, str] | None = None
) -> str:
    """The file's text.

    `meta` needs no particular keys; usual are name, source, tp, m, groups, layers, torch and vllm.
    `devices` renames devices, {"meta": "cuda"} for graphs traced on the meta device. Raises
    GraphFileError naming the node for a target, argument or attribute that has no spelling.
    """
    return _Writer(gm, devices or {}).text(meta)


def load_graph(path: Path) -> GraphFile:
    """Read a graph file. Raises GraphFileError with the file, the line or node, and the fix."""
    from k3fuse.rewriter.graph_load import parse_graph

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise GraphFileError(f"{path}: cannot be read ({err}); give a graph file's path") from err
    return parse_graph(text, str(path))


def module_path(node: fx.Node) -> str:
    """Path of the module that called the node, such as "model.layers.3.self_attn", or ""."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    last = list(stack.values())[-1]
    path = str(last[0] if isinstance(last, tuple | list) else last)
    path = re.sub(r"_modules\[['\"]([^'\"]+)['\"]\]", r"\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return re.sub(r"^L?\.?(self|fn|mod)\b\.?", "", path).strip(".")


def source_line(node: fx.Node) -> str:
    """Innermost telling frame of the node's stack trace as "package/file.py:123 code", or ""."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in ([^\n]*)(?:\n[ \t]+([^\n]*))?', trace)
    # Tensor subclasses (parameters of vLLM) put a frame of their own below the caller's line.
    frames = [f for f in frames if f[2].strip() not in _DISPATCH_FRAMES] or frames
    if not frames:
        return ""
    file, line, _, code = frames[-1]
    return f"{_package_relative(file)}:{line} {code.strip()[:_SOURCE_WIDTH]}".rstrip()


def _package_relative(file: str) -> str:
    path = file.replace("\\", "/")
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.rsplit(marker, 1)[1]
    roots = sorted((p.rstrip("/") + "/" for p in sys.path if p), key=len, reverse=True)
    for root in roots:
        if path.startswith(root):
            return path[len(root) :]
    return path.rsplit("/", 1)[-1] if path.startswith("/") else path


class _Symbols:
    """Renames the shape symbols of a graph to s0, s1, ... (u0, ... unbacked) as they appear."""

    def __init__(self) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self.ranges: dict[str, Json] = {}
        self.hints: dict[str, Json] = {}

    def text(self, value: torch.SymInt) -> str:
        expr, env = value.node.expr, value.node.shape_env
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._renamed:
                self._add(symbol, env)
        # The same assumptions, so that the renamed expression prints like a freshly built one.
        return str(expr.xreplace(self._renamed))

    def _add(self, symbol: sympy.Symbol, env: ShapeEnv) -> None:
        # `backed_var_to_val` was named `var_to_val` before torch 2.12.
        values = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
        hint = values.get(symbol)
        prefix = "u" if hint is None else "s"
        name = f"{prefix}{sum(n.startswith(prefix) for n in self.ranges)}"
        self._renamed[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        bounds = env.var_to_range.get(symbol)
        self.ranges[name] = [_bound(bounds.lower), _bound(bounds.upper)] if bounds else [None, None]
        if hint is not None:
            self.hints[name] = int(hint)


def _bound(value: Any) -> int | None:
    return int(value) if getattr(value, "is_Integer", False) else None


class _Writer:
    """One graph on its way to text."""

    def __init__(self, gm: fx.GraphModule, devices: Mapping[str, str]) -> None:
        self._gm = gm
        self._devices = devices
        self._symbols = _Symbols()

    def text(self, meta: Mapping[str, Json]) -> str:
        nodes = [self._node(n) for n in self._gm.graph.nodes]  # first: this finds the symbols
        lines = ["{", f'"schema": {_dumps(SCHEMA)},', f'"meta": {_dumps(dict(meta))},']
        lines += [f'"symbols": {_dumps(self._symbols.ranges)},']
        lines += [f'"hints": {_dumps(self._symbols.hints)},']
        ops = describe_ops(self._gm.graph)
        body = ",\n".join(f"{_dumps(name)}: {_dumps(ops[name])}" for name in sorted(ops))
        lines += ['"ops": {' + (f"\n{body}\n" if body else "") + "},"]
        lines += ['"nodes": [', ",\n".join(_dumps(n) for n in nodes), "]", "}", ""]
        return "\n".join(lines)

    def _node(self, node: fx.Node) -> dict[str, Json]:
        out: dict[str, Json] = {"name": node.name, "op": node.op}
        try:
            out["target"] = self._target(node)
            val = node.meta["val"] if "val" in node.meta else self._constant(node)
            if node.op in ("call_function", "output"):
                out["args"] = [self._arg(a) for a in node.args]
                if node.kwargs:
                    out["kwargs"] = {k: self._arg(v) for k, v in node.kwargs.items()}
            if node.op == "placeholder" and node.args:
                raise EncodingError("placeholders with a default value are not supported")
            if node.meta.get("opaque") is not None:
                out["val"] = {"opaque": str(node.meta["opaque"])}
            elif "val" in node.meta or val is not None:
                out["val"] = self._val(val)
        except EncodingError as err:
            raise GraphFileError(f"graph node {node.name!r}: {err}") from err
        out.update(self._provenance(node))
        return out

    def _target(self, node: fx.Node) -> str:
        if node.op == "call_function":
            return target_name(node.target)
        if node.op not in ("placeholder", "get_attr", "output"):
            raise EncodingError(
                f"{node.op} nodes are not supported; capture the graph after AOTAutograd"
            )
        return str(node.target)

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that a get_attr node stands for."""
        if node.op != "get_attr":
            return None
        found: Any = self._gm
        for part in str(node.target).split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch.Tensor):
            raise EncodingError("get_attr of something that is no tensor; inline it first")
        return found

    def _arg(self, arg: Any) -> Json:
        return encode(arg, lambda n: {"node": n.name}, self._symbols.text, self._device)

    def _device(self, device: torch.device) -> str:
        return self._devices.get(str(device), str(device))

    def _val(self, val: Any) -> Json:
        if val is None or isinstance(val, bool | int | float | str):
            return encode(val, lambda n: None)
        if isinstance(val, torch.Tensor):
            device = str(val.device)
            device = "cuda" if device == "cuda:0" else device  # a fake tensor adds the index
            return {
                "dtype": dtype_name(val.dtype),
                "shape": [self._size(s) for s in val.shape],
                "stride": [self._size(s) for s in val.stride()],
                "device": self._devices.get(device, device),
            }
        if isinstance(val, torch.SymInt):
            size = self._size(val)
            return size if isinstance(size, int) else {"sym": size}
        if isinstance(val, tuple):
            return {"tuple": [self._val(v) for v in val]}
        if isinstance(val, list):
            return [self._val(v) for v in val]
        if isinstance(val, Mapping):
            return {"dict": {str(k): self._val(v) for k, v in val.items()}}
        return {"opaque": opaque_text(val)}

    def _size(self, size: int | torch.SymInt) -> Json:
        if isinstance(size, torch.SymInt):
            text = self._symbols.text(size)
            return int(text) if text.lstrip("-").isdigit() else text
        return int(size)

    def _provenance(self, node: fx.Node) -> dict[str, Json]:
        """Where the node comes from: the input it stands for, module, source line, kernel."""
        found = {
            "origin": node.meta.get("origin"),
            "kernel": node.meta.get("triton_kernel"),
            "module": module_path(node),
            "source": source_line(node),
            "k3fuse": node.meta.get("k3fuse"),
        }
        return {k: v for k, v in found.items() if v}


def opaque_text(val: Any) -> str:
    """Type name of an opaque graph value, with its `value` where that is a string."""
    real = getattr(val, "real_obj", val)
    value = getattr(real, "value", None)
    name = type(real).__name__
    return f"{name}({value!r})" if isinstance(value, str) else name


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as err:
        raise GraphFileError(f"meta is not JSON: {err}; use str, int, float, list, dict") from err

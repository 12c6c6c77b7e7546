"""A replaced subgraph as text.

A fused op carries the nodes that it replaced in one string argument. Outside its policy (a token
count that no kernel serves) it runs them, also in a process that never saw the graph and only
loaded a compiled artifact. The text is deterministic and free of the graph's own names, so two
equal sites carry equal texts. It is one JSON object:

    {"v": 1,
     "in": ["bfloat16[m0,7168]", ...],        dtype and shape of every input, as traced
     "sym": {"m0": [0, 0, 1, 0]},             symbol -> input, dim, a, b with size = a * symbol + b
     "nodes": [["aten.t.default", [{"node": "i1"}], {}], ...]
     "out": ["n3", ...]}

Inputs are i0, i1, ...; nodes n0, n1, ... in order. Sizes are integers or {"sym": text} over the
symbols; the device of input 0 is {"device": "input"}. `encoding.py` lists the other spellings,
`program.py` runs the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

import sympy
import torch
from torch import Tensor, fx

from k3fuse.kernels.common.encoding import (
    EncodingError,
    Json,
    dtype_name,
    encode,
    target_name,
)
from k3fuse.kernels.common.program import (
    INPUT_DEVICE,
    CompositionError,
    Program,
    Symbol,
    parse_program,
)

__all__ = ["VERSION", "Composition", "CompositionError"]

VERSION = 1
# The higher-order operators whose arguments are values; the others hold a graph or a table key.
_FUNCTIONAL_WRAPPERS = frozenset(
    {"higher_order.auto_functionalized", "higher_order.auto_functionalized_v2"}
)


class Composition:
    """A straight-line program of operator calls over tensor inputs."""

    def __init__(self, document: Mapping[str, Json]) -> None:
        self._text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        self._program: Program = parse_program(document)

    @classmethod
    def from_nodes(
        cls, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Composition:
        """The composition of `nodes` (topological order) from tensor `inputs` to `outputs`.

        Everything that the nodes read must be one of them, one of `inputs`, or a node that holds a
        size. Raises CompositionError naming the node otherwise.
        """
        document = _Writer(inputs).document(nodes, outputs)
        # Through the cache: a 93-layer graph has a handful of distinct texts.
        return _from_text(json.dumps(document, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_text(cls, text: str) -> Composition:
        """Inverse of `text`; results are cached. Raises CompositionError for a malformed text."""
        return _from_text(text)

    @property
    def text(self) -> str:
        """Compact JSON; equal for equal subgraphs, whatever their nodes were called."""
        return self._text

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs for `inputs`, in the order given to `from_nodes`.

        Outputs may alias inputs (a view at the end of the subgraph). Raises CompositionError if an
        input's dtype or shape is not what was traced, or an operator is not registered here.
        """
        return self._program.run(inputs)


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Composition:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as err:
        raise CompositionError(f"composition text is not JSON: {err}") from err
    if not isinstance(document, dict) or document.get("v") != VERSION:
        raise CompositionError(
            f"composition text is not of version {VERSION}: {text[:60]!r}; recompile the model"
        )
    return Composition(document)


def _value(node: fx.Node) -> object:
    return node.meta.get("val", node.meta.get("example_value"))


class _Writer:
    """Turns nodes into the document; holds the names and the symbols found on the inputs."""

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self._inputs = list(inputs)
        self._names: dict[fx.Node, str] = {}
        for i, node in enumerate(self._inputs):
            if not isinstance(_value(node), Tensor | None):
                raise CompositionError(
                    f"input {i} ({node.name}) is a {type(_value(node)).__name__}, not a tensor"
                )
            self._names.setdefault(node, f"i{i}")
        self._symbols: dict[str, Symbol] = {}
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        # Plain sizes first: where a dim is the symbol itself, no division is needed to recover it.
        for plain in (True, False):
            for i, node in enumerate(self._inputs):
                self._bind(i, node, plain)
        first = _value(self._inputs[0]) if self._inputs else None
        self._device = first.device if isinstance(first, Tensor) else None

    def _bind(self, i: int, node: fx.Node, plain: bool) -> None:
        value = _value(node)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            expr = _expr(size)
            new = sorted(expr.free_symbols - self._renamed.keys(), key=str)
            if len(new) != 1 or (plain and expr != new[0]):
                continue
            scale, offset = expr.coeff(new[0], 1), expr.coeff(new[0], 0)
            if not (scale.is_Integer and offset.is_Integer) or scale * new[0] + offset != expr:
                continue
            name = f"m{len(self._symbols)}"
            self._renamed[new[0]] = sympy.Symbol(name, integer=True, nonnegative=True)
            self._symbols[name] = Symbol(i, dim, int(scale), int(offset))

    def document(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[str, Json]:
        rows: list[Json] = []
        members = set(nodes)
        for node in nodes:
            if node in self._names:
                continue
            if self._size_text(node) is not None:
                continue  # a size: written as an expression where it is read
            rows.append(self._row(node, members))
            self._names[node] = f"n{len(rows) - 1}"
        missing = [n.name for n in outputs if n not in self._names]
        if missing:
            raise CompositionError(f"outputs {missing} are neither composed nodes nor inputs")
        return {
            "v": VERSION,
            "in": [self._signature(n) for n in self._inputs],
            "sym": {k: [s.input, s.dim, s.scale, s.offset] for k, s in self._symbols.items()},
            "nodes": rows,
            "out": [self._names[n] for n in outputs],
        }

    def _row(self, node: fx.Node, members: set[fx.Node]) -> Json:
        if node.op != "call_function":
            raise CompositionError(
                f"node {node.name} is a {node.op}; pass it as an input of the composition"
            )

        def ref(arg: fx.Node) -> Json:
            if arg in self._names:
                return {"node": self._names[arg]}
            size = self._size_text(arg)
            if size is not None:
                return int(size) if size.lstrip("-").isdigit() else {"sym": size}
            where = "comes later in the list" if arg in members else "is no input and no node of it"
            if isinstance(_value(arg), torch.SymInt):
                where = f"holds size {_expr(_value(arg))}: no dimension of an input gives it"
            raise CompositionError(f"node {node.name} reads {arg.name}, which {where}")

        try:
            target = target_name(node.target)
            _refuse_target(node, target)
            args = [encode(a, ref, self._sym, self._device_text) for a in node.args]
            kwargs = {
                k: encode(v, ref, self._sym, self._device_text) for k, v in node.kwargs.items()
            }
        except EncodingError as err:
            raise CompositionError(f"node {node.name}: {err}") from err
        return [target, args, kwargs]

    def _size_text(self, node: fx.Node) -> str | None:
        """Expression of a node that holds an integer known from the input shapes, else None."""
        value = _value(node)
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            return None
        expr = _expr(value)
        return self._expr_text(expr) if expr.free_symbols <= self._renamed.keys() else None

    def _expr_text(self, expr: sympy.Expr) -> str:
        return str(expr.xreplace(self._renamed))

    def _sym(self, size: torch.SymInt) -> str:
        expr = _expr(size)
        unknown = sorted(str(s) for s in expr.free_symbols - self._renamed.keys())
        if unknown:
            raise EncodingError(
                f"size {expr} reads {', '.join(unknown)}, which no dimension of an input gives"
            )
        return self._expr_text(expr)

    def _device_text(self, device: torch.device) -> str:
        mine = self._device
        if mine is not None and device.type == mine.type and device.index in (None, mine.index):
            return INPUT_DEVICE
        return str(device)

    def _signature(self, node: fx.Node) -> str:
        value = _value(node)
        if not isinstance(value, Tensor):
            return "?"
        sizes = [_expr(s) for s in value.shape]
        known = [e.free_symbols <= self._renamed.keys() for e in sizes]
        texts = [self._expr_text(e) if ok else "?" for e, ok in zip(sizes, known, strict=True)]
        return f"{dtype_name(value.dtype)}[{','.join(t.replace(' ', '') for t in texts)}]"


def _expr(size: object) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _refuse_target(node: fx.Node, target: str) -> None:
    """Raise for a call that a text cannot hold or that would write into an input."""
    if target.startswith("higher_order.") and target not in _FUNCTIONAL_WRAPPERS:
        raise CompositionError(
            f"node {node.name} calls {target}, whose arguments live outside the graph; "
            "leave it outside the site"
        )
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise CompositionError(
            f"node {node.name} calls {target}, which writes into its arguments; "
            "compose the graph while it is functional (auto_functionalized)"
        )

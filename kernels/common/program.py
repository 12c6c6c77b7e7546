"""Running a composition text: the parsed form and its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common.encoding import (
    EncodingError,
    Json,
    decode,
    dtype_name,
    target_from_name,
)
from k3fuse.kernels.common.expressions import Evaluator, ExpressionError, compile_expression

INPUT_DEVICE = "input"


class CompositionError(ValueError):
    """A subgraph that cannot be written as text, or a text that cannot be run as asked."""


@dataclass(frozen=True)
class Symbol:
    """`size of inputs[input] at dim == scale * symbol + offset`."""

    input: int
    dim: int
    scale: int
    offset: int

    def value(self, name: str, shape: Sequence[int]) -> int:
        """Value of the symbol for an input of `shape`."""
        value, rest = divmod(shape[self.dim] - self.offset, self.scale)
        if rest:
            raise CompositionError(
                f"input {self.input} has size {shape[self.dim]} at dim {self.dim}; the composition "
                f"was traced for sizes {self.scale}*{name}+{self.offset}"
            )
        return value


@dataclass(frozen=True)
class _Input:
    """What was traced for one input: dtype name and one evaluator a dim (None: not checked)."""

    text: str
    dtype: str
    sizes: tuple[Evaluator | None, ...]


@dataclass(frozen=True)
class _Call:
    name: str
    target: str
    args: list[Json]
    kwargs: dict[str, Json]
    operators: tuple[str, ...]  # operators among the arguments
    dead: tuple[str, ...]  # values that nothing reads after this call


@dataclass(frozen=True)
class Program:
    """Calls in order over named values; `run` binds the symbols from the input shapes first."""

    inputs: tuple[_Input | None, ...]
    symbols: dict[str, Symbol]
    calls: tuple[_Call, ...]
    outputs: tuple[str, ...]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs for `inputs`; raises CompositionError as `Composition.run` says."""
        values = self._bind(inputs)
        env: dict[str, Any] = {f"i{i}": t for i, t in enumerate(inputs)}

        def size(text: str) -> int:
            return int(compile_expression(text)(values))

        def device(text: str) -> torch.device:
            return inputs[0].device if text == INPUT_DEVICE else torch.device(text)

        for call in self.calls:
            function = _resolve(call.target)
            for operator in call.operators:
                _resolve(operator)
            try:
                args = [decode(a, env.__getitem__, size, device) for a in call.args]
                kwargs = {
                    k: decode(v, env.__getitem__, size, device) for k, v in call.kwargs.items()
                }
            except (EncodingError, ExpressionError) as err:
                raise CompositionError(f"{call.name} = {call.target}: {err}") from err
            env[call.name] = function(*args, **kwargs)
            for name in call.dead:
                del env[name]
        return [env[name] for name in self.outputs]

    def _bind(self, inputs: Sequence[Tensor]) -> dict[str, int]:
        if len(inputs) != len(self.inputs):
            raise CompositionError(
                f"composition takes {len(self.inputs)} inputs, got {len(inputs)}"
            )
        for i, (tensor, traced) in enumerate(zip(inputs, self.inputs, strict=True)):
            if traced is not None and (
                dtype_name(tensor.dtype) != traced.dtype or tensor.dim() != len(traced.sizes)
            ):
                raise _wrong_input(i, tensor, traced)
        values = {k: s.value(k, inputs[s.input].shape) for k, s in self.symbols.items()}
        for i, (tensor, traced) in enumerate(zip(inputs, self.inputs, strict=True)):
            if traced is not None and any(
                expected is not None and expected(values) != actual
                for expected, actual in zip(traced.sizes, tensor.shape, strict=True)
            ):
                raise _wrong_input(i, tensor, traced)
        return values


def _wrong_input(i: int, tensor: Tensor, traced: _Input) -> CompositionError:
    shape = ",".join(map(str, tensor.shape))
    return CompositionError(
        f"input {i} is {dtype_name(tensor.dtype)}[{shape}]; the composition was traced for "
        f"{traced.text}. Recompile for this shape, or mark the dimension dynamic"
    )


@lru_cache(maxsize=512)
def _resolve(target: str) -> Callable[..., Any]:
    try:
        return target_from_name(target)
    except EncodingError as err:
        namespace = target.split(".", maxsplit=1)[0]
        raise CompositionError(
            f"operator {target} is not registered in this process; import the package that "
            f"registers the namespace {namespace!r} before running the compiled model"
        ) from err


def parse_program(document: Mapping[str, Json]) -> Program:
    """Program of a composition document; CompositionError if it is malformed."""
    try:
        rows = [_parse_call(i, row) for i, row in enumerate(_list(document["nodes"]))]
        outputs = tuple(str(name) for name in _list(document["out"]))
        inputs = tuple(_parse_input(str(text)) for text in _list(document["in"]))
        symbols_json = document["sym"]
        if not isinstance(symbols_json, dict):
            raise TypeError("sym is no object")
        symbols = {k: Symbol(*map(_int, _list(v))) for k, v in symbols_json.items()}
    except (KeyError, TypeError, ValueError) as err:
        if isinstance(err, CompositionError):
            raise
        raise CompositionError(f"malformed composition text: {err}") from err
    if any(not 0 <= s.input < len(inputs) or s.scale == 0 for s in symbols.values()):
        raise CompositionError("malformed composition text: a symbol is bound to no input")
    return Program(inputs, symbols, _with_lifetimes(rows, len(inputs), outputs), outputs)


def _with_lifetimes(
    rows: Sequence[_Call], num_inputs: int, outputs: Sequence[str]
) -> tuple[_Call, ...]:
    defined = {f"i{i}" for i in range(num_inputs)}
    last: dict[str, int] = {}
    for i, row in enumerate(rows):
        reads = _bodies("node", [*row.args, *row.kwargs.values()])
        if not reads <= defined:
            raise CompositionError(
                f"malformed composition text: {row.name} reads {sorted(reads - defined)} too early"
            )
        last.update(dict.fromkeys([*reads, row.name], i))
        defined.add(row.name)
    if not set(outputs) <= defined:
        raise CompositionError(f"malformed composition text: no value for outputs {list(outputs)}")
    dead: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in outputs:
            dead.setdefault(i, []).append(name)
    return tuple(replace(row, dead=tuple(sorted(dead.get(i, ())))) for i, row in enumerate(rows))


def _bodies(kind: str, value: Json) -> set[str]:
    """What every {kind: body} within `value` holds."""
    if isinstance(value, list):
        return {name for v in value for name in _bodies(kind, v)}
    if isinstance(value, dict):
        if set(value) == {kind}:
            return {str(value[kind])}
        return {name for v in value.values() for name in _bodies(kind, v)}
    return set()


def _parse_call(i: int, row: Json) -> _Call:
    target, args, kwargs = _list(row)
    if not isinstance(target, str) or not isinstance(kwargs, dict):
        raise TypeError(f"node {i} is no [target, args, kwargs]")
    args = _list(args)
    operators = sorted(_bodies("op", [*args, *kwargs.values()]))
    return _Call(f"n{i}", target, args, kwargs, tuple(operators), ())


def _parse_input(text: str) -> _Input | None:
    if text == "?":
        return None
    dtype, _, rest = text.partition("[")
    if not rest.endswith("]"):
        raise ValueError(f"input {text!r} is no dtype[sizes]")
    sizes = _split(rest[:-1])
    return _Input(text, dtype, tuple(None if s == "?" else compile_expression(s) for s in sizes))


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses: "m0,Mod(m0,8)" -> ["m0", "Mod(m0,8)"]."""
    parts, depth = [""], 0
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts if text else []


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return value


def _int(value: Json) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r}")
    return value

"""Integer expressions over shape symbols, as text: evaluation without sympy.

The text is what sympy prints for a symbolic size: `12*m0`, `(m0//2)`, `Mod(m0, 8)`, `Max(1, m0)`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

Evaluator: TypeAlias = Callable[[Mapping[str, Any]], Any]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
# Function names that torch's size expressions print; sizes are non-negative, so the divisions that
# differ on negative operands agree here.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Max": max,
    "Min": min,
    "Identity": lambda a: a,
}


class ExpressionError(ValueError):
    """A text that is no integer expression over symbols, or a symbol without a value."""


@lru_cache(maxsize=4096)
def compile_expression(text: str) -> Evaluator:
    """Evaluator of `text`; it maps symbol values to the integer. Raises ExpressionError."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as err:
        raise ExpressionError(f"size expression {text!r} does not parse") from err
    return _build(tree.body, text)


def _build(tree: ast.expr, text: str) -> Evaluator:
    match tree:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return lambda _values: number
        case ast.Name(id=name):
            return lambda values: _symbol(values, name, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _build(operand, text)
            return lambda values: -inner(values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply, a, b = _BINARY[type(op)], _build(left, text), _build(right, text)
            return lambda values: apply(a(values), b(values))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            call, parts = _FUNCTIONS[name], [_build(a, text) for a in args]
            return lambda values: call(*(p(values) for p in parts))
    raise ExpressionError(
        f"size expression {text!r} uses {ast.unparse(tree)!r}; integers, symbols, + - * // % ** "
        f"and {', '.join(_FUNCTIONS)} are known"
    )


def _symbol(values: Mapping[str, Any], name: str, text: str) -> Any:
    if name not in values:
        raise ExpressionError(f"size expression {text!r} reads {name!r}, which has no value")
    return values[name]

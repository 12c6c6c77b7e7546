"""Guards: sympy relations over named symbols, evaluated against a graph's ShapeEnv.

The same object is used by the matcher, the report, the docs and the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k3fuse.rewriter.reasons import Code, Reason

# Values a symbol can take: an integer, a sympy expression over the graph's own symbols, or a name
# (a dtype, an activation), which is a sympy.Symbol too so that one relation language serves all.
Value = sympy.Basic

_NAME_PREFIX = "'"


def name(text: str) -> sympy.Symbol:
    """Return the atom that stands for a name such as a dtype or an activation."""
    return sympy.Symbol(_NAME_PREFIX + text)


def dtype_name(dtype: torch.dtype) -> sympy.Symbol:
    """Return the atom of a torch dtype, e.g. 'bfloat16."""
    return name(str(dtype).removeprefix("torch."))


def to_value(value: Any) -> Value:
    """Return an int, bool, float, SymInt, dtype, str or sympy expression as a guard value."""
    if isinstance(value, sympy.Basic):
        return value
    if isinstance(value, torch.SymInt):
        expr: sympy.Basic = value.node.expr
        return expr
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, str):
        return name(value)
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, float):
        return sympy.Float(value)
    raise TypeError(f"value {value!r} cannot be used in a guard; use int, SymInt, dtype or str")


def show(value: Any) -> str:
    """Text of a value or relation, names without their marker."""
    return str(value).replace(_NAME_PREFIX, "")


@dataclass(frozen=True)
class Guard:
    """One condition of a pattern.

    relation: sympy relation (or And/Or of relations) over the pattern's symbols.
    code: reason when it does not hold.
    scope: "always" holds for every target; "kernel" describes what the fused kernels of a hardware
        target cover, and is not asked of Target.reference().
    proof: "static" needs the relation proved; "reachable" passes a symbolic value whose range meets
        the relation, because the op decides at run time.
    why: half a sentence with the source of the number; shown in docs and reports.
    """

    relation: sympy.Basic
    code: Code
    why: str = ""
    scope: Literal["always", "kernel"] = "always"
    proof: Literal["static", "reachable"] = "static"
    hint: str = ""

    @cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Free symbols, names excluded, sorted by name."""
        free = self.relation.free_symbols
        return tuple(
            sorted((s for s in free if not s.name.startswith(_NAME_PREFIX)), key=lambda s: s.name)
        )

    @cached_property
    def text(self) -> str:
        """Return the relation as shown to people."""
        return show(self.relation)


def _bounds(expr: sympy.Basic, env: ShapeEnv | None) -> tuple[sympy.Basic, sympy.Basic]:
    if expr.is_number:
        return expr, expr
    if env is None:
        return sympy.Integer(0), sympy.oo
    bound = env.bound_sympy(expr)  # type: ignore[arg-type]
    return bound.lower, bound.upper


def _reachable(relation: sympy.Basic, env: ShapeEnv | None) -> bool:
    """Whether some value in range satisfies the relation (sound for And of simple bounds)."""
    if relation in (sympy.true, sympy.false):
        return bool(relation)
    if isinstance(relation, sympy.And):
        return all(_reachable(part, env) for part in relation.args)
    if isinstance(relation, sympy.Or):
        return any(_reachable(part, env) for part in relation.args)
    if isinstance(relation, sympy.core.relational.Relational):
        low, high = _bounds(relation.lhs - relation.rhs, env)
        if isinstance(relation, sympy.LessThan):
            return bool(low <= 0)
        if isinstance(relation, sympy.GreaterThan):
            return bool(high >= 0)
        if isinstance(relation, sympy.StrictLessThan):
            return bool(low < 0)
        if isinstance(relation, sympy.StrictGreaterThan):
            return bool(high > 0)
        if isinstance(relation, sympy.Equality):
            return bool(low <= 0) and bool(high >= 0)
    return False


def _proved(relation: sympy.Basic, env: ShapeEnv | None) -> bool:
    if relation in (sympy.true, sympy.false):
        return bool(relation)
    if isinstance(relation, sympy.And):
        return all(_proved(part, env) for part in relation.args)
    if isinstance(relation, sympy.Or):
        return any(_proved(part, env) for part in relation.args)
    if isinstance(relation, sympy.core.relational.Relational):
        if any(s.name.startswith(_NAME_PREFIX) for s in relation.free_symbols):
            return False  # two different names: Eq(a, b) stays unevaluated
        low, high = _bounds(relation.lhs - relation.rhs, env)
        if isinstance(relation, sympy.LessThan):
            return bool(high <= 0)
        if isinstance(relation, sympy.GreaterThan):
            return bool(low >= 0)
        if isinstance(relation, sympy.StrictLessThan):
            return bool(high < 0)
        if isinstance(relation, sympy.StrictGreaterThan):
            return bool(low > 0)
        if isinstance(relation, sympy.Equality):
            return bool(low == 0) and bool(high == 0)
    return False


@dataclass(frozen=True)
class GuardResult:
    """One evaluated guard, for the report: passed or not, with the values seen."""

    guard: Guard
    passed: bool
    actual: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, stable keys."""
        return {
            "guard": self.guard.text,
            "code": self.guard.code.value,
            "scope": self.guard.scope,
            "passed": self.passed,
            "actual": self.actual,
        }


def check(guard: Guard, values: Mapping[sympy.Symbol, Value], env: ShapeEnv | None) -> GuardResult:
    """Evaluate one guard. A symbol without a value fails it (nothing is assumed)."""
    actual = ", ".join(f"{s.name} = {show(values.get(s, 'unknown'))}" for s in guard.symbols)
    if any(s not in values for s in guard.symbols):
        return GuardResult(guard, False, actual)
    relation = guard.relation.subs(dict(values), simultaneous=True)
    holds = _reachable(relation, env) if guard.proof == "reachable" else _proved(relation, env)
    return GuardResult(guard, holds, actual)


def failures(
    guards: Iterable[Guard],
    values: Mapping[sympy.Symbol, Value],
    env: ShapeEnv | None,
    nodes: tuple[str, ...],
    *,
    kernel_scope: bool,
    seen: dict[Any, GuardResult] | None = None,
) -> tuple[list[GuardResult], list[Reason]]:
    """Evaluate all guards; return every result and a reason for each one that failed.

    kernel_scope: whether guards of scope "kernel" are asked (a hardware target) or not (reference).
    seen: results of this graph's earlier sites; equal values need not be evaluated again.
    """
    seen = {} if seen is None else seen
    results, reasons = [], []
    for guard in guards:
        if guard.scope == "kernel" and not kernel_scope:
            continue
        key = (guard, tuple(values.get(symbol) for symbol in guard.symbols))
        result = seen.get(key)
        if result is None:
            result = seen[key] = check(guard, values, env)
        results.append(result)
        if not result.passed:
            why = f" ({guard.why})" if guard.why else ""
            reasons.append(
                Reason(
                    guard.code,
                    f"needs {guard.text}{why}, but {result.actual}",
                    nodes,
                    expected=guard.text,
                    actual=result.actual,
                    hint=guard.hint,
                )
            )
    return results, reasons

"""Guards: sympy relations over named symbols, evaluated against a graph's ShapeEnv.

The same object is used by the matcher, the report, the docs and the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeAlias

import sympy
import torch
from sympy.printing.str import StrPrinter
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k3fuse.rewriter.reasons import Code, Reason

# Values a symbol can take: an integer, a sympy expression over the graph's own symbols, or a name
# (a dtype, an activation), which is a sympy.Symbol too so that one relation language serves all.
Value: TypeAlias = sympy.Basic

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


class _Printer(StrPrinter):  # type: ignore[misc]
    """Relations as people write them: K = 7168, 1 <= M and M <= 64, names without their marker."""

    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802 - sympy's dispatch
        return str(expr.name).removeprefix(_NAME_PREFIX)

    def _print_Relational(self, expr: sympy.core.relational.Relational) -> str:  # noqa: N802
        sign = "=" if isinstance(expr, sympy.Equality) else expr.rel_op
        return f"{self._print(expr.lhs)} {sign} {self._print(expr.rhs)}"

    def _print_And(self, expr: sympy.And) -> str:  # noqa: N802
        return self._join(expr, " and ")

    def _print_Or(self, expr: sympy.Or) -> str:  # noqa: N802
        return self._join(expr, " or ")

    def _join(self, expr: sympy.Basic, word: str) -> str:
        parts = sorted(expr.args, key=sympy.default_sort_key)
        texts = [self._print(p) for p in parts]
        compound = [isinstance(p, (sympy.And, sympy.Or)) for p in parts]
        return word.join(f"({t})" if c else t for t, c in zip(texts, compound, strict=True))


def show(value: Any) -> str:
    """Text of a value or relation, names without their marker."""
    return str(_Printer().doprint(value)) if isinstance(value, sympy.Basic) else str(value)


@dataclass(frozen=True)
class Guard:
    """One condition of a pattern.

    relation: sympy relation (or And/Or of relations) over the pattern's symbols.
    code: reason when it does not hold.
    scope: "always" holds for every target; "kernel" describes what the fused kernels of a hardware
        target cover, and is not asked of Target.reference(); "row_sharded" what they need where the
        option of that name is set, too.
    proof: "static" needs the relation proved; "reachable" passes a symbolic value whose range meets
        the relation, because the op decides at run time.
    why: half a sentence with the source of the number; shown in docs and reports.
    """

    relation: sympy.Basic
    code: Code
    why: str = ""
    scope: Literal["always", "kernel", "row_sharded"] = "always"
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
    bound = env.bound_sympy(expr)
    return bound.lower, bound.upper


def _holds_names(relation: sympy.Basic) -> bool:
    """Whether names are left: of two different ones, Eq(a, b) stays unevaluated. It never holds."""
    return any(_is_name(symbol) for symbol in relation.free_symbols)


def _reachable(relation: sympy.Basic, env: ShapeEnv | None) -> bool:
    """Whether some value in range satisfies the relation (sound for And of simple bounds)."""
    if relation in (sympy.true, sympy.false):
        return bool(relation)
    if isinstance(relation, sympy.And):
        return all(_reachable(part, env) for part in relation.args)
    if isinstance(relation, sympy.Or):
        return any(_reachable(part, env) for part in relation.args)
    if isinstance(relation, sympy.core.relational.Relational):
        if _holds_names(relation):
            return False
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
        if _holds_names(relation):
            return False
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


def _fast(expr: sympy.Basic, values: Mapping[sympy.Symbol, Value]) -> Any:
    """Evaluate on plain numbers and names; None where a symbolic size is involved.

    sympy's substitution takes milliseconds; a graph asks some thousand guards.
    """
    if isinstance(expr, sympy.Symbol):
        value = values.get(expr, expr)
        return int(value) if isinstance(value, sympy.Integer) else value
    if isinstance(expr, sympy.Rational):
        return Fraction(expr.p, expr.q)
    if isinstance(expr, sympy.core.relational.Relational):
        return _fast_relation(expr, values)
    parts = [_fast(part, values) for part in expr.args]
    if any(part is None for part in parts):
        return None
    if isinstance(expr, sympy.And):
        return all(parts)
    if isinstance(expr, sympy.Or):
        return any(parts)
    return _arithmetic(expr, parts) if all(isinstance(p, (int, Fraction)) for p in parts) else None


def _arithmetic(expr: sympy.Basic, parts: list[Any]) -> Any:
    if isinstance(expr, sympy.Add):
        return sum(parts)
    if isinstance(expr, sympy.Mul):
        return math.prod(parts)
    if isinstance(expr, sympy.Pow) and parts[1] == -1 and parts[0] != 0:
        return 1 / Fraction(parts[0])
    if isinstance(expr, sympy.ceiling):
        return math.ceil(parts[0])
    return None


def _fast_relation(
    expr: sympy.core.relational.Relational, values: Mapping[sympy.Symbol, Value]
) -> bool | None:
    left, right = _fast(expr.lhs, values), _fast(expr.rhs, values)
    names = [isinstance(side, sympy.Symbol) and _is_name(side) for side in (left, right)]
    if isinstance(expr, sympy.Equality) and all(names):
        return bool(left == right)
    if not all(isinstance(side, (int, Fraction)) for side in (left, right)):
        return None
    compare = {"==": left == right, "<=": left <= right, ">=": left >= right, "<": left < right}
    return compare.get(expr.rel_op)


def _is_name(symbol: sympy.Symbol) -> bool:
    return str(symbol.name).startswith(_NAME_PREFIX)


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
            "why": self.guard.why,
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
    fast = _fast(guard.relation, values)
    if fast is not None:
        return GuardResult(guard, fast, actual)
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
    row_sharded: bool = False,
    seen: dict[Any, GuardResult] | None = None,
) -> tuple[list[GuardResult], list[Reason]]:
    """Evaluate all guards; return every result and a reason for each one that failed.

    kernel_scope: whether guards of scope "kernel" are asked (a hardware target) or not (reference).
    row_sharded: whether those of scope "row_sharded" are.
    seen: results of this graph's earlier sites; equal values need not be evaluated again.
    """
    seen = {} if seen is None else seen
    results, reasons = [], []
    for guard in guards:
        if not {"kernel": kernel_scope, "row_sharded": row_sharded}.get(guard.scope, True):
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

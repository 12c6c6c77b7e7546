"""Guards: relations over static and symbolic values, names, and what is unknown."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from sympy import And, Eq, Ge, Gt, Le, Lt, Ne, Or
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from k3fuse.rewriter.guards import Guard, check, dtype_name, failures, name, show, to_value
from k3fuse.rewriter.reasons import Code

M, K = sympy.symbols("M K", integer=True, nonnegative=True)
D = sympy.Symbol("dtype")


def symbol(low: int, high: int) -> tuple[sympy.Basic, ShapeEnv]:
    """A graph symbol with this range, and its ShapeEnv."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    fake: Any = mode.from_tensor(torch.empty(max(low, 2) + 1), symbolic_context=context)
    expr = fake.shape[0].node.expr
    env.constrain_symbol_range(expr, low, high)
    return expr, env


@pytest.mark.parametrize(
    ("relation", "value", "holds"),
    [
        (Le(M, 64), 64, True),
        (Le(M, 64), 65, False),
        (Ge(M, 1), 1, True),
        (Ge(M, 1), 0, False),
        (Lt(M, 64), 64, False),
        (Gt(M, 64), 65, True),
        (Eq(M, 8), 8, True),
        (Eq(M, 8), 9, False),
        (Eq(M * 16, 128), 8, True),
        (And(Ge(M, 1), Le(M, 64)), 1, True),
        (And(Ge(M, 1), Le(M, 64)), 65, False),
        (Or(Eq(M, 8), Eq(M, 16)), 16, True),
        (Or(Eq(M, 8), Eq(M, 16)), 4, False),
        (Ne(M, 3), 4, True),
        (Ne(M, 3), 3, False),
    ],
)
@pytest.mark.parametrize("proof", ["static", "reachable"])
def test_a_static_value(relation: sympy.Basic, value: int, holds: bool, proof: str) -> None:
    guard = Guard(relation, Code.SHAPE_MISMATCH, proof=proof)  # type: ignore[arg-type]
    assert check(guard, {M: sympy.Integer(value)}, None).passed is holds


@pytest.mark.parametrize(
    ("relation", "low", "high", "proved", "reachable"),
    [
        (Le(M, 64), 2, 64, True, True),
        (Le(M, 64), 2, 65, False, True),
        (Le(M, 64), 65, 512, False, False),
        (Ge(M, 1), 2, 64, True, True),
        (Lt(M, 64), 64, 100, False, False),
        (Lt(M, 64), 2, 63, True, True),
        (Gt(M, 64), 2, 64, False, False),
        (Gt(M, 64), 2, 65, False, True),
        (Gt(M, 64), 65, 70, True, True),
        (Eq(M, 8), 2, 64, False, True),
        (Eq(M, 8), 9, 64, False, False),
        (Le(2 * M, 64), 2, 32, True, True),
        (Le(2 * M, 64), 33, 64, False, False),
        (And(Ge(M, 4), Le(M, 64)), 2, 512, False, True),
        (And(Ge(M, 4), Le(M, 64)), 65, 512, False, False),
        (Or(Eq(M, 8), Ge(M, 2)), 2, 64, True, True),
        (Or(Eq(M, 8), Eq(M, 16)), 17, 64, False, False),
        (Ne(M, 65), 2, 64, False, False),  # true, but no relation that is reasoned about
    ],
)
def test_a_symbolic_value(
    relation: sympy.Basic, low: int, high: int, proved: bool, reachable: bool
) -> None:
    expr, env = symbol(low, high)
    for proof, holds in (("static", proved), ("reachable", reachable)):
        guard = Guard(relation, Code.M_OUT_OF_RANGE, proof=proof)  # type: ignore[arg-type]
        assert check(guard, {M: expr}, env).passed is holds, proof


def test_without_a_shape_env_nothing_is_proved() -> None:
    expr, env = symbol(2, 64)
    guard = Guard(Le(M, 64), Code.M_OUT_OF_RANGE)
    assert check(guard, {M: expr}, env).passed
    assert not check(guard, {M: expr}, None).passed


@pytest.mark.parametrize("proof", ["static", "reachable"])
def test_names_and_dtypes(proof: str) -> None:
    guard = Guard(Eq(D, dtype_name(torch.bfloat16)), Code.DTYPE_MISMATCH, proof=proof)  # type: ignore[arg-type]
    assert check(guard, {D: to_value(torch.bfloat16)}, None).passed
    assert not check(guard, {D: to_value(torch.float32)}, None).passed
    assert not check(guard, {D: to_value("bfloat")}, None).passed
    either = Guard(Or(Eq(D, name("a")), Eq(D, name("b"))), Code.ATTR_MISMATCH, proof=proof)  # type: ignore[arg-type]
    assert [check(either, {D: name(x)}, None).passed for x in "abc"] == [True, True, False]


@pytest.mark.parametrize("proof", ["static", "reachable"])
def test_a_name_beside_a_symbolic_value(proof: str) -> None:
    expr, env = symbol(2, 64)
    guard = Guard(And(Eq(D, name("a")), Le(M, 64)), Code.ATTR_MISMATCH, proof=proof)  # type: ignore[arg-type]
    assert [check(guard, {D: name(x), M: expr}, env).passed for x in "ab"] == [True, False]


def test_arithmetic_beyond_the_fast_path() -> None:
    guard = Guard(Le(M**2, 100), Code.SHAPE_MISMATCH)
    assert [check(guard, {M: sympy.Integer(m)}, None).passed for m in (10, 11)] == [True, False]


@pytest.mark.parametrize("proof", ["static", "reachable"])
def test_an_unknown_symbol_fails(proof: str) -> None:
    guard = Guard(Or(Eq(M, 8), Le(K, 2)), Code.TP_UNSUPPORTED, proof=proof)  # type: ignore[arg-type]
    assert not check(guard, {M: sympy.Integer(8)}, None).passed
    result = check(guard, {}, None)
    assert not result.passed
    assert "unknown" in result.actual
    assert check(guard, {M: sympy.Integer(8), K: sympy.Integer(9)}, None).passed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (8, sympy.Integer(8)),
        (True, sympy.true),
        (0.5, sympy.Float(0.5)),
        ("situ", name("situ")),
        (torch.bfloat16, name("bfloat16")),
        (M, M),
    ],
)
def test_values(given: object, expected: sympy.Basic) -> None:
    assert to_value(given) == expected


def test_a_value_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be used in a guard"):
        to_value([8])


def test_a_symbolic_size_is_its_expression() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    fake: Any = mode.from_tensor(torch.empty(5), symbolic_context=context)
    size = fake.shape[0]
    assert to_value(size) == size.node.expr


def test_failures_give_code_sentence_expected_and_actual() -> None:
    guards = (
        Guard(Le(M, 64), Code.M_OUT_OF_RANGE, "a decode step", hint="lower the batch"),
        Guard(Eq(K, 7168), Code.SHAPE_MISMATCH, scope="kernel"),
    )
    values = {M: sympy.Integer(65), K: sympy.Integer(5)}
    results, reasons = failures(guards, values, None, ("mm",), kernel_scope=True)
    assert [r.passed for r in results] == [False, False]
    assert [r.code for r in reasons] == [Code.M_OUT_OF_RANGE, Code.SHAPE_MISMATCH]
    first = reasons[0]
    assert first.nodes == ("mm",)
    assert "M <= 64" in first.sentence
    assert "a decode step" in first.sentence
    assert first.actual == "M = 65"
    assert first.fix == "lower the batch"
    assert reasons[1].fix  # the code's own
    results, reasons = failures(guards, values, None, ("mm",), kernel_scope=False)
    assert [r.code for r in reasons] == [Code.M_OUT_OF_RANGE]
    assert len(results) == 1


def test_equal_values_are_evaluated_once() -> None:
    guard = Guard(Le(M, 64), Code.M_OUT_OF_RANGE)
    seen: dict[object, object] = {}
    for value in (8, 8, 65):
        failures([guard], {M: sympy.Integer(value)}, None, (), kernel_scope=True, seen=seen)  # type: ignore[arg-type]
    assert len(seen) == 2


def test_text_hides_the_marker_of_names() -> None:
    guard = Guard(Eq(D, name("bfloat16")), Code.DTYPE_MISMATCH)
    assert "'" not in guard.text
    assert "bfloat16" in guard.text
    assert guard.symbols == (D,)
    assert show(name("situ")) == "situ"
    json = check(guard, {D: name("float32")}, None).to_json()
    assert json["code"] == "DTYPE_MISMATCH"
    assert (json["passed"], json["actual"]) == (False, "dtype = float32")

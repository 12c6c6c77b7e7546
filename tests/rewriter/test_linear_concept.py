"""Linear: every spelling of y = x W^T, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx
from torch.nn import functional as F

from build import BF16, FP32, LEVELS, Hand, aten, found, prims, rows, trace
from k3fuse.rewriter.recognise.linear import Linear

M, K, N = 4, 8, 6
Spelling = Callable[[Hand, fx.Node, fx.Node], fx.Node]


def _bmm(h: Hand, x: fx.Node, w: fx.Node) -> fx.Node:
    batch = h.call(aten.unsqueeze.default, x, 0)
    weight = h.call(aten.permute.default, h.call(aten.unsqueeze.default, w, 0), [0, 2, 1])
    return h.call(aten.bmm.default, batch, weight)


SPELLINGS: dict[str, Spelling] = {
    "mm with t": lambda h, x, w: h.call(aten.mm.default, x, h.call(aten.t.default, w)),
    "mm with permute": lambda h, x, w: h.call(
        aten.mm.default, x, h.call(aten.permute.default, w, [1, 0])
    ),
    "mm with permute, negative axes": lambda h, x, w: h.call(
        aten.mm.default, x, h.call(aten.permute.default, w, [-1, -2])
    ),
    "mm with transpose": lambda h, x, w: h.call(
        aten.mm.default, x, h.call(aten.transpose.int, w, -2, -1)
    ),
    "mm packet": lambda h, x, w: h.call(aten.mm, x, h.call(aten.t, w)),
    "mm of an alias and a detach": lambda h, x, w: h.call(
        aten.mm.default,
        x,
        h.call(aten.alias.default, h.call(aten.t.default, h.call(aten.detach.default, w))),
    ),
    "linear": lambda h, x, w: h.call(aten.linear.default, x, w),
    "linear, None spelled out": lambda h, x, w: h.call(aten.linear.default, x, w, None),
    "matmul": lambda h, x, w: h.call(aten.matmul.default, x, h.call(aten.t.default, w)),
    "bmm, unit batch": _bmm,
    "mm with an FP32 result": lambda h, x, w: h.call(
        aten.mm.dtype, x, h.call(aten.t.default, w), FP32
    ),
}
INTERPOSED: dict[str, Callable[[Hand, fx.Node], fx.Node]] = {
    "view": lambda h, x: h.call(aten.view.default, x, [M, K]),
    "reshape": lambda h, x: h.call(aten.reshape.default, x, [M, K]),
    "unsafe view": lambda h, x: h.call(aten._unsafe_view.default, x, [M, K]),
    "squeeze": lambda h, x: h.call(aten.squeeze.dim, h.call(aten.unsqueeze.default, x, 1), 1),
    "alias": lambda h, x: h.call(aten.alias.default, x),
    "detach": lambda h, x: h.call(aten.detach.default, x),
    "clone": lambda h, x: h.call(aten.clone.default, x),
    "whole slice": lambda h, x: h.call(aten.slice.Tensor, x, 0, 0, 2**63 - 1),
    "cast to itself": lambda h, x: h.call(prims.convert_element_type.default, x, BF16),
    "copy to itself": lambda h, x: h.call(aten._to_copy.default, x, dtype=BF16),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_read(spelling: str) -> None:
    h = Hand()
    x, w = h.input("x", M, K), h.input("w", N, K)
    y = SPELLINGS[spelling](h, x, w)
    view = h.view(y)
    (linear,) = found(view, Linear)
    assert linear.weight is w
    assert view.strip(linear.x) is x
    assert (linear.n, linear.k, linear.bias, linear.transposed) == (N, K, None, True)
    assert linear.out is y
    assert linear.out_dtype == (FP32 if "FP32" in spelling else BF16)
    assert y in linear.nodes
    assert w not in linear.nodes


@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("interposed", INTERPOSED)
def test_what_means_nothing_is_looked_through(interposed: str, where: str) -> None:
    h = Hand()
    if where == "x":
        x, w = h.input("x", M, K), h.input("w", N, K)
        y = h.call(aten.mm.default, INTERPOSED[interposed](h, x), h.call(aten.t.default, w))
    else:
        x, w = h.input("left", N, K), h.input("right", M, K)
        y = h.call(aten.mm.default, x, h.call(aten.t.default, INTERPOSED[interposed](h, w)))
    view = h.view(y)
    (linear,) = found(view, Linear)
    assert view.strip(linear.x) is x
    assert linear.weight is w
    assert linear.k == K


def test_addmm_has_a_bias_and_its_factors_must_be_one() -> None:
    for factors, expected in (
        ({}, 1),
        ({"beta": 1, "alpha": 1}, 1),
        ({"alpha": 2}, 0),
        ({"beta": 0}, 0),
    ):
        h = Hand()
        x, w, b = h.input("x", M, K), h.input("w", N, K), h.input("b", N)
        y = h.call(aten.addmm.default, b, x, h.call(aten.t.default, w), **factors)
        linears = found(h.view(y), Linear)
        assert len(linears) == expected, factors
        assert [f.bias for f in linears] == [b] * expected


def test_linear_with_bias() -> None:
    h = Hand()
    x, w, b = h.input("x", M, K), h.input("w", N, K), h.input("b", N)
    (linear,) = found(h.view(h.call(aten.linear.default, x, w, b)), Linear)
    assert linear.bias is b


def test_a_weight_stored_the_other_way_round_is_said_so() -> None:
    h = Hand()
    x, w = h.input("x", M, K), h.input("w", K, N)
    (linear,) = found(h.view(h.call(aten.mm.default, x, w)), Linear)
    assert (linear.transposed, linear.n, linear.k) == (False, N, K)


def test_widened_operands_are_the_narrow_product_with_an_fp32_result() -> None:
    for cast in (aten._to_copy.default, prims.convert_element_type.default):
        h = Hand()
        x, w = h.input("x", M, K), h.input("w", N, K)

        def wide(node: fx.Node, h: Hand = h, cast: object = cast) -> fx.Node:
            if cast is aten._to_copy.default:
                return h.call(cast, node, dtype=FP32)
            return h.call(cast, node, FP32)

        y = h.call(aten.mm.default, wide(x), h.call(aten.t.default, wide(w)))
        (linear,) = found(h.view(y), Linear)
        assert (linear.x, linear.weight) == (x, w)
        assert (linear.dtype, linear.weight_dtype, linear.out_dtype) == (BF16, BF16, FP32)
        assert len(linear.nodes) == 4  # two casts, t, mm


def test_only_one_widened_operand_keeps_fp32() -> None:
    h = Hand()
    x, w = h.input("x", M, K, dtype=FP32), h.input("w", N, K)
    y = h.call(
        aten.mm.default, x, h.call(aten.t.default, h.call(aten._to_copy.default, w, dtype=FP32))
    )
    (linear,) = found(h.view(y), Linear)
    assert (linear.dtype, linear.weight_dtype) == (FP32, FP32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_traced_linear_is_read(level: str, bias: bool) -> None:
    args = [rows(M, K), rows(N, K), *([rows(N)] if bias else [])]
    (linear,) = found(trace(F.linear, *args, level=level), Linear)
    assert (linear.n, linear.k) == (N, K)
    assert (linear.bias is not None) == bias


# --- what is not a linear -----------------------------------------------------------------------


def test_a_product_of_two_activations_is_none() -> None:
    def computed(weight_is_input: bool) -> int:
        h = Hand()
        x, w = h.input("x", M, K), h.input("w", N, K)
        other = w if weight_is_input else h.call(aten.exp.default, w)
        return len(found(h.view(h.call(aten.mm.default, x, h.call(aten.t.default, other))), Linear))

    assert computed(weight_is_input=False) == 0
    assert computed(weight_is_input=True) == 1


@pytest.mark.parametrize(("batch", "expected"), [(1, 1), (2, 0)])
def test_a_batched_product_is_none(batch: int, expected: int) -> None:
    h = Hand()
    x, w = h.input("x", batch, M, K), h.input("w", batch, K, N)
    view = h.view(h.call(aten.bmm.default, x, w))
    linears = [f for f in found(view, Linear) if len(f.weight.meta["val"].shape) == 2]
    # A unit batch over a 3-dimensional weight is no [N, K] matrix in memory either.
    assert len(linears) == 0
    h = Hand()
    x = h.input("x", batch, M, K)
    w2 = h.input("w", N, K)
    wide = h.call(
        aten.expand.default,
        h.call(aten.unsqueeze.default, h.call(aten.t.default, w2), 0),
        [batch, K, N],
    )
    assert len(found(h.view(h.call(aten.bmm.default, x, wide)), Linear)) == expected


def test_a_reshape_that_mixes_rows_and_columns_is_another_matrix() -> None:
    def weight_of(mixed: bool) -> fx.Node | None:
        h = Hand()
        x, w = h.input("x", M, K), h.input("w", K, N)
        matrix = h.call(aten.view.default, w, [N, K]) if mixed else h.call(aten.t.default, w)
        (linear,) = found(
            h.view(h.call(aten.mm.default, x, h.call(aten.t.default, matrix))), Linear
        )
        return linear.weight if linear.weight is w else None

    assert weight_of(mixed=True) is None
    assert weight_of(mixed=False) is not None


def test_a_wrong_permute_is_another_matrix() -> None:
    """Axes (1, 0, 2) of a stored [1, N, K] are no transpose of its rows."""

    def stored_as_rows(order: list[int]) -> list[bool]:
        h = Hand()
        x, w = h.input("x", 1, M, 6), h.input("w", 6, 6)
        matrix = h.call(aten.permute.default, h.call(aten.unsqueeze.default, w, 0), order)
        matrix = h.call(aten.reshape.default, matrix, [1, 6, 6])
        linears = found(h.view(h.call(aten.bmm.default, x, matrix)), Linear)
        return [f.transposed for f in linears if f.weight is w]

    assert stored_as_rows([0, 2, 1]) == [True]
    assert stored_as_rows([1, 0, 2]) == []


@pytest.mark.parametrize("outer", [False, True])
def test_a_transpose_below_a_widening_is_not_forgotten(outer: bool) -> None:
    """A square weight: shapes cannot tell w from its transpose, only the axes can."""

    def reads(inner: bool) -> tuple[bool, bool]:
        h = Hand()
        x, w = h.input("x", M, K), h.input("w", K, K)
        narrow = h.call(aten.t.default, w) if inner else w
        matrix = h.call(aten._to_copy.default, narrow, dtype=FP32)
        matrix = h.call(aten.t.default, matrix) if outer else matrix
        y = h.call(aten.mm.default, h.call(aten._to_copy.default, x, dtype=FP32), matrix)
        (linear,) = found(h.view(y), Linear)
        return linear.weight is w, linear.transposed

    assert reads(inner=False) == (True, outer)
    weight_is_stored, transposed = reads(inner=True)
    assert not weight_is_stored or transposed != outer

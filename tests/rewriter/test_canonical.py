"""One spelling for each node: what reads alike, and what must not."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from build import BF16, FP32, Hand, aten, prims
from k3fuse.rewriter.canonical import Canonical, canonical, overload
from k3fuse.rewriter.view import GraphView

M, N = 4, 6
Make = Callable[[Hand, fx.Node], fx.Node]

# Spellings of a group read alike: same operation, inputs and attributes.
ALIKE: dict[str, list[Make]] = {
    "add a number": [
        lambda h, x: h.call(aten.add.Tensor, x, 1e-5),
        lambda h, x: h.call(aten.add.Scalar, x, 1e-5),
        lambda h, x: h.call(aten.add.Tensor, x, 1e-5, alpha=1),
        lambda h, x: h.call(aten.add, x, 1e-5),
    ],
    "square": [
        lambda h, x: h.call(aten.pow.Tensor_Scalar, x, 2),
        lambda h, x: h.call(aten.pow.Tensor_Scalar, x, 2.0),
        lambda h, x: h.call(aten.square.default, x),
        lambda h, x: h.call(aten.mul.Tensor, x, x),
    ],
    "widen": [
        lambda h, x: h.call(aten._to_copy.default, x, dtype=FP32),
        lambda h, x: h.call(prims.convert_element_type.default, x, FP32),
        lambda h, x: h.call(aten.to.dtype, x, FP32),
    ],
    "mean of each row": [
        lambda h, x: h.call(aten.mean.dim, x, [-1], True),
        lambda h, x: h.call(aten.mean.dim, x, [1], True),
        lambda h, x: h.call(aten.mean.dim, x, [1], keepdim=True, dtype=None),
        lambda h, x: h.call(aten.mean, x, [-1], True),
    ],
    "transpose": [
        lambda h, x: h.call(aten.t.default, x),
        lambda h, x: h.call(aten.permute.default, x, [1, 0]),
        lambda h, x: h.call(aten.permute.default, x, [-1, 0]),
        lambda h, x: h.call(aten.transpose.int, x, 0, 1),
        lambda h, x: h.call(aten.transpose.int, x, -1, -2),
    ],
    "second half": [
        lambda h, x: h.call(aten.slice.Tensor, x, 1, 3, 6),
        lambda h, x: h.call(aten.slice.Tensor, x, -1, 3, 2**63 - 1),
        lambda h, x: h.call(aten.slice.Tensor, x, 1, -3, 6),
        lambda h, x: h.item(h.call(aten.split.Tensor, x, 3, 1), 1),
        lambda h, x: h.item(h.call(aten.split_with_sizes.default, x, [3, 3], -1), 1),
    ],
    "nothing": [
        lambda h, x: h.call(aten.view.default, x, [M, N]),
        lambda h, x: h.call(aten.slice.Tensor, x, 0, 0, 100),
        lambda h, x: h.call(aten.permute.default, x, [0, 1]),
        lambda h, x: h.call(aten.expand.default, x, [M, N]),
        lambda h, x: h.call(aten._to_copy.default, x, dtype=BF16),
        lambda h, x: h.call(aten.clone.default, x, memory_format=torch.contiguous_format),
        lambda h, x: h.call(aten.view.dtype, x, BF16),
    ],
}  # fmt: skip
DIFFERENT: dict[str, Make] = {
    "twice the other": lambda h, x: h.call(aten.add.Tensor, x, 1e-5, alpha=2),
    "cube": lambda h, x: h.call(aten.pow.Tensor_Scalar, x, 3),
    "mean of each column": lambda h, x: h.call(aten.mean.dim, x, [0], True),
    "mean, axis dropped": lambda h, x: h.call(aten.mean.dim, x, [1]),
    "every other column": lambda h, x: h.call(aten.slice.Tensor, x, 1, 0, 6, 2),
    "first half": lambda h, x: h.call(aten.slice.Tensor, x, 1, 0, 3),
    "other bits": lambda h, x: h.call(aten.view.dtype, x, torch.int16),
    "rounded quotient": lambda h, x: h.call(aten.div.Tensor_mode, x, x, rounding_mode="floor"),
    "quotient": lambda h, x: h.call(aten.div.Tensor, x, x),
}


def read(make: Make) -> tuple[str, tuple[tuple[str, object], ...]]:
    h = Hand()
    node = make(h, h.input("x", M, N))
    spelled: Canonical = canonical(node)
    return spelled.op, spelled.attrs


@pytest.mark.parametrize("group", ALIKE)
def test_spellings_of_one_operation_read_alike(group: str) -> None:
    assert len({read(make) for make in ALIKE[group]}) == 1
    assert (read(ALIKE[group][0])[0] == "reshape") is (group == "nothing")


def test_different_operations_read_differently() -> None:
    groups = [read(makes[0]) for makes in ALIKE.values()]
    others = [read(make) for make in DIFFERENT.values()]
    assert len({*groups, *others}) == len(groups) + len(others)


def test_a_packet_is_its_default_overload() -> None:
    h = Hand()
    node = h.call(aten.mm, h.input("x", M, N), h.input("y", N, M))
    assert overload(node) is aten.mm.default
    assert canonical(node).op == "aten.mm"


def test_a_view_walks_to_the_maker_and_back() -> None:
    h = Hand()
    x = h.input("x", M, N)
    y = h.call(aten.relu.default, x)
    flat = h.call(aten.view.default, y, [M * N])
    again = h.call(aten.view.default, flat, [N, M])
    user = h.call(aten.neg.default, again)
    view = GraphView(h.done(user).graph)
    assert view.strip(again) is y
    assert view.path(again, y) == [again, flat]
    assert view.users(y) == [user]
    assert view.with_shape(again, (M * N,)) is flat
    assert view.with_shape(again, (3, 8)) is None
    assert view.same(again, y)
    assert not view.same(again, x)
    assert view.is_weight(x)
    assert not view.is_weight(y)


@pytest.mark.parametrize(
    ("packet", "args", "wanted"),
    [
        (aten.add, (2.5,), "aten.add.Tensor"),
        (aten.sum, ([1],), "aten.sum.dim_IntList"),
        (aten.sum, (), "aten.sum.default"),
        (aten.mean, ([1], True), "aten.mean.dim"),
        (aten.clamp, (0, 1), "aten.clamp.default"),
        (aten.add, ("no", "such", "call", 1, 2), "aten.add.Tensor"),  # fits none: the first
    ],
)
def test_a_packet_is_the_first_overload_that_takes_its_arguments(
    packet: object, args: tuple[object, ...], wanted: str
) -> None:
    graph = fx.Graph()
    node = graph.call_function(packet, (graph.placeholder("x"), *args))  # type: ignore[arg-type]
    assert str(overload(node)) == wanted


def test_an_attribute_that_is_not_there_is_its_default() -> None:
    spelled = Canonical("slice", (), (("dim", 1),))
    assert (spelled.attr("dim"), spelled.attr("start"), spelled.attr("start", 0)) == (1, None, 0)


def test_a_part_of_what_is_no_node_has_a_spelling_of_its_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.getitem, (x, slice(0, 2)))
    assert canonical(node) == Canonical("getitem", (x,), (("index", slice(0, 2)),))


@pytest.mark.parametrize("stop", [None, 2**63 - 1])
def test_a_slice_to_the_end_of_a_symbolic_size_is_no_slice(stop: int | None) -> None:
    h = Hand()
    with h.mode:
        size = h.mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
        torch._check(size > 8)
        rows = h.given("rows", torch.empty(size, N))
    node = h.graph.call_function(aten.slice.Tensor, (rows, 0, 0, stop))
    assert canonical(node) == Canonical("reshape", (rows,))
    part = h.graph.call_function(aten.slice.Tensor, (rows, 0, 0, 4))
    assert canonical(part).attr("stop") == 4

"""Calls of ops that write, as torch.compile has them without the writes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from build import Hand, aten
from k3fuse.rewriter.recognise.functionalized import FunctionalizedCall, result_index

V2: Any = torch.ops.higher_order.auto_functionalized_v2
_LIBRARY: Any = torch.library.Library("k3fuse_test_writes", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("norm(Tensor x, Tensor(a!) out, Tensor(b!)? residual) -> ()")


def call(residual: bool, **extra: Any) -> tuple[Hand, fx.Node, fx.Node, fx.Node]:
    """norm(x, out, residual or nothing), its hand graph, and the getitem of each result."""
    h = Hand()
    x, out, rest = h.input("x", 4, 8), h.input("out", 4, 8), h.input("residual", 4, 8)
    op = torch.ops.k3fuse_test_writes.norm.default
    bases = [out, rest] if residual else [out]
    node = h.graph.call_function(
        V2, (op,),
        {
            "x": x, "_out_base_index": 0, "_residual_base_index": 1 if residual else None,
            "_all_bases": bases, **extra,
        },
    )  # fmt: skip
    node.meta["val"] = (None, *(n.meta["val"] for n in bases))
    parts = [h.item(node, i + 1) for i in range(len(bases))]
    return h, node, parts[0], parts[-1]


@pytest.mark.parametrize("residual", [True, False])
def test_what_a_call_writes_is_read_by_name(residual: bool) -> None:
    h, node, out, last = call(residual)
    found = h.view(out, last).find(FunctionalizedCall, node)
    assert found is not None
    assert found.name == "k3fuse_test_writes.norm"
    assert found.results == {"out": out, "residual": last if residual else None}
    assert found.args["residual"] is (node.kwargs["_all_bases"][1] if residual else None)  # type: ignore[index]
    assert set(found.nodes) == {node, out, last}
    assert result_index(node, "out") == 1


def test_a_write_into_a_part_of_its_base_is_refused() -> None:
    h, node, out, last = call(True, _out_size=[2, 8])
    view = h.view(out, last)
    assert view.find(FunctionalizedCall, node) is None
    miss = view.miss(FunctionalizedCall, node)
    assert miss is not None
    assert miss.reason.code.value == "ALIAS_RISK"


def test_another_call_is_none() -> None:
    h = Hand()
    y = h.call(aten.relu.default, h.input("x", 4, 8))
    part = h.graph.call_function(operator.getitem, (y, 0))
    assert h.view(y).find(FunctionalizedCall, y) is None
    for node in (y, part):
        with pytest.raises(TypeError, match=f"{node.name} is no functionalised call"):
            result_index(node, "out")

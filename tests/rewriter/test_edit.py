"""The editor: events, order, metadata, and refusal before the first change."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from build import BF16, FP32, Hand, aten, identity, rows
from k3fuse.rewriter.edit import EditError, Editor
from k3fuse.rewriter.site import Output, Replacement, Site

M, H = 4, 8
_LIBRARY: Any = torch.library.Library("k3fuse_edit_test", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("both(Tensor a, Tensor b, *, str note) -> Tensor[]")
_LIBRARY.define("flat(Tensor a, Tensor b, *, str note) -> Tensor[]")
_LIBRARY.define("wide(Tensor a, Tensor b, *, str note) -> Tensor[]")


def both(a: Tensor, b: Tensor, *, note: str) -> list[Tensor]:
    return [a * 2.0, b * 3.0]


_LIBRARY.impl("both", both, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "flat",
    lambda a, b, *, note: [(a * 2.0).view(-1), (b * 3.0).view(-1)],
    "CompositeExplicitAutograd",
)
_LIBRARY.impl("wide", lambda a, b, *, note: [a.float(), b.float()], "CompositeExplicitAutograd")
OPS = torch.ops.k3fuse_edit_test


def graph(reader_above: bool = False) -> tuple[fx.GraphModule, Site, dict[str, fx.Node]]:
    """Two products as one site; with `reader_above` the first is read before the last operand."""
    h = Hand()
    a, c = h.input("a", M, H), h.input("c", M, H)
    first = h.call(aten.mul.Tensor, a, 2.0)
    reader = h.call(aten.relu.default, first) if reader_above else None
    b = h.call(aten.sin.default, c)
    second = h.call(aten.mul.Tensor, b, 3.0)
    first.meta["eager_input_vals"] = ("of the old arguments",)
    if reader is None:
        reader = h.call(aten.relu.default, first)
    tail = h.call(aten.add.Tensor, reader, second)
    site = Site(
        "twins", "pair", first, (first, second), {"a": a, "b": b}, (first, second), {}, layer=7
    )
    n = {"a": a, "b": b, "first": first, "second": second, "reader": reader, "tail": tail}
    return h.done(tail, second), site, n


def plan(n: dict[str, fx.Node], op: Any = None, count: int = 2) -> Replacement:
    outputs = (Output(n["first"], 0), Output(n["second"], 1))[:count]
    return Replacement(op or OPS.both.default, (n["a"], n["b"]), {"note": "x"}, outputs)


@pytest.mark.parametrize("reader_above", [False, True])
def test_order_is_restored_and_values_are_equal(reader_above: bool) -> None:
    module, site, n = graph(reader_above)
    original = copy.deepcopy(module)
    editor = Editor(module)
    editor.replace(site, plan(n))
    editor.finish()
    module.graph.lint()
    position = {m: i for i, m in enumerate(module.graph.nodes)}
    assert all(position[i] < position[m] for m in module.graph.nodes for i in m.all_input_nodes)
    inputs = [rows(M, H), rows(M, H, seed=1)]
    for got, wanted in zip(module(*inputs), original(*inputs), strict=True):
        assert torch.equal(got, wanted)
    assert sum(m.target is OPS.both.default for m in module.graph.nodes) == 1


def test_events_are_counted_exactly() -> None:
    module, site, n = graph()
    heard: list[Any] = []
    editor = Editor(module, listeners=[heard.append])
    names = {"first": n["first"].name, "second": n["second"].name}
    before = {m.name for m in module.graph.nodes}
    call = editor.replace(site, plan(n))
    editor.finish()
    after = {m.name for m in module.graph.nodes}
    assert Counter(e.kind for e in editor.events) == {"inserted": 3, "replaced": 2, "erased": 2}
    assert {e.node for e in editor.events if e.kind == "inserted"} == after - before
    assert {e.node for e in editor.events if e.kind == "erased"} == before - after
    assert {e.node: e.by for e in editor.events if e.kind == "replaced"} == {
        names["first"]: call.next.name,
        names["second"]: call.next.next.name,
    }
    assert heard == editor.events


def test_a_result_that_nobody_reads_is_erased_again() -> None:
    h = Hand()
    a, c = h.input("a", M, H), h.input("c", M, H)
    first, second = h.call(aten.mul.Tensor, a, 2.0), h.call(aten.mul.Tensor, c, 3.0)
    module = h.done(first)
    site = Site("twins", "", first, (first, second), {"a": a, "b": c}, (first,), {})
    editor = Editor(module)
    editor.replace(site, Replacement(OPS.both.default, (a, c), {"note": ""}, (Output(first, 0),)))
    editor.finish()
    assert Counter(e.kind for e in editor.events) == {"inserted": 3, "replaced": 1, "erased": 3}
    assert [m.target for m in module.graph.nodes if m.op == "call_function"] == [
        OPS.both.default,
        operator.getitem,
    ]


def test_new_nodes_say_what_they_replace() -> None:
    module, site, n = graph()
    replaced = [n["first"].name, n["second"].name]
    trace = n["first"].meta["stack_trace"]
    Editor(module).replace(site, plan(n))
    new = [m for m in module.graph.nodes if "k3fuse" in m.meta]
    assert len(new) == 3
    for node in new:
        assert set(node.meta) == {"val", "stack_trace", "k3fuse"}
        assert node.meta["stack_trace"] == trace
        assert node.meta["k3fuse"] == {
            "pattern": "twins", "form": "pair", "layer": 7, "replaced": replaced,
        }  # fmt: skip
    for item in new[1:]:
        assert tuple(item.meta["val"].shape) == (M, H)
        assert item.meta["val"].dtype == BF16


def test_survivors_keep_their_metadata_objects() -> None:
    module, site, n = graph()
    kept = {m: dict(m.meta) for m in module.graph.nodes if m not in site.nodes}
    Editor(module).replace(site, plan(n))
    for node, meta in kept.items():
        assert {k: id(v) for k, v in node.meta.items()} == {k: id(v) for k, v in meta.items()}


def test_another_shape_of_the_same_elements_is_viewed() -> None:
    module, site, n = graph()
    original = copy.deepcopy(module)
    editor = Editor(module)
    editor.replace(site, plan(n, OPS.flat.default))
    editor.finish()
    assert Counter(e.kind for e in editor.events) == {"inserted": 5, "replaced": 2, "erased": 2}
    inputs = [rows(M, H), rows(M, H, seed=1)]
    assert all(torch.equal(g, w) for g, w in zip(module(*inputs), original(*inputs), strict=True))


@pytest.mark.parametrize(
    ("op", "code"), [(OPS.wide.default, "DTYPE_MISMATCH"), (OPS.both.default, None)]
)
def test_an_unfit_result_leaves_the_graph_as_it_is(op: Any, code: str | None) -> None:
    module, site, n = graph()
    before = identity(module)
    editor = Editor(module)
    if code is None:
        editor.replace(site, plan(n, op))
        assert identity(module) != before
        return
    with pytest.raises(EditError) as error:
        editor.replace(site, plan(n, op))
    assert error.value.reason.code.value == code
    assert identity(module) == before
    assert editor.events == []


def test_a_result_too_few_leaves_the_graph_as_it_is() -> None:
    module, site, n = graph()
    before = identity(module)
    outputs = (Output(n["first"], 0), Output(n["second"], 2))
    planned = Replacement(OPS.both.default, (n["a"], n["b"]), {"note": ""}, outputs)
    with pytest.raises(EditError) as error:
        Editor(module).replace(site, planned)
    assert error.value.reason.code.value == "OP_MISMATCH"
    assert identity(module) == before


def test_a_result_of_another_layout_leaves_the_graph_as_it_is() -> None:
    h = Hand()
    a, c = h.input("a", M, H), h.input("c", M, H)
    first = h.call(aten.t.default, h.call(aten.mul.Tensor, a, 2.0))
    second = h.call(aten.mul.Tensor, c, 3.0)
    module = h.done(first, second)
    covered = (*first.all_input_nodes, first, second)
    site = Site("twins", "", first, covered, {"a": a, "b": c}, (first, second), {})
    before = identity(module)
    outputs = (Output(first, 0), Output(second, 1))
    with pytest.raises(EditError) as error:
        Editor(module).replace(site, Replacement(OPS.both.default, (a, c), {"note": ""}, outputs))
    assert error.value.reason.code.value == "STRIDE_OR_ALIGN"
    assert identity(module) == before


def test_an_operand_replaced_before_is_followed() -> None:
    """The second site's operand is an output of the first one."""
    h = Hand()
    a, c = h.input("a", M, H), h.input("c", M, H)
    first, second = h.call(aten.mul.Tensor, a, 2.0), h.call(aten.mul.Tensor, c, 3.0)
    third, fourth = h.call(aten.mul.Tensor, first, 2.0), h.call(aten.mul.Tensor, second, 3.0)
    module = h.done(third, fourth)
    original = copy.deepcopy(module)
    editor = Editor(module)
    for x, y, p, q in ((a, c, first, second), (first, second, third, fourth)):
        site = Site("twins", "", p, (p, q), {"a": x, "b": y}, (p, q), {})
        outputs = (Output(p, 0), Output(q, 1))
        editor.replace(site, Replacement(OPS.both.default, (x, y), {"note": ""}, outputs))
    editor.finish()
    assert not any(m.target is aten.mul.Tensor for m in module.graph.nodes)
    inputs = [rows(M, H), rows(M, H, seed=1)]
    assert all(torch.equal(g, w) for g, w in zip(module(*inputs), original(*inputs), strict=True))


def test_an_output_can_be_an_operand_or_a_built_node() -> None:
    module, site, n = graph()

    def build(g: fx.Graph, results: list[fx.Node], current: Any) -> fx.Node:
        return g.call_function(aten.add.Tensor, (results[1], current(n["a"])))

    outputs = (Output(n["first"], n["a"]), Output(n["second"], build))
    editor = Editor(module)
    editor.replace(site, Replacement(OPS.both.default, (n["a"], n["b"]), {"note": ""}, outputs))
    editor.finish()
    a, c = rows(M, H, dtype=FP32), rows(M, H, seed=1, dtype=FP32)
    built = torch.sin(c) * 3.0 + a
    got = module(a, c)
    assert torch.allclose(got[1], built)
    assert torch.allclose(got[0], torch.relu(a) + built)
    assert all(
        "k3fuse" in m.meta or m.op != "call_function" or m in n.values() for m in module.graph.nodes
    )

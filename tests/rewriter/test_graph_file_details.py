"""Rarer parts of graph files: attributes, unbacked sizes, arithmetic of shapes, wrong entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from build import Hand, aten
from k3fuse.rewriter.graph_file import GraphFileError, graph_text, opaque_text
from k3fuse.rewriter.graph_load import parse_graph

Document = dict[str, Any]


def document() -> Document:
    """relu of an input of size s0, which is 2 to 64."""
    h = Hand()
    x = h.input("x", 4, 8)
    return {
        **json.loads(graph_text(h.done(h.call(aten.relu.default, x)), {"name": "small"})),
        "symbols": {"s0": [2, 64]},
        "hints": {"s0": 4},
    }


def sized(shape: Any, stride: Any = 1) -> Document:
    """The input's shape is this one size."""
    found = document()
    found["nodes"][0]["val"] |= {"shape": shape if isinstance(shape, list) else [shape]}
    found["nodes"][0]["val"] |= {"stride": stride if isinstance(stride, list) else [stride]}
    return found


def loaded(found: Document) -> fx.GraphModule:
    return parse_graph(json.dumps(found), "g").module


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s0", "s0"),
        ("2*s0 + 1", "2*s0 + 1"),
        ("-s0 + 65", "65 - s0"),
        ("s0**2", "s0**2"),
        ("FloorDiv(s0, 2)", "(s0//2)"),
        ("Mod(s0, 8)", "Mod(s0, 8)"),
        ("Max(s0, 8)", "Max(8, s0)"),
    ],
)
def test_sizes_are_read_as_arithmetic(text: str, wanted: str) -> None:
    value = next(iter(loaded(sized(text)).graph.nodes)).meta["val"]
    assert str(value.shape[0].node.expr) == wanted


WRONG: dict[str, tuple[Callable[[], Document], str]] = {
    "a part of a size": (lambda: sized("s0/3"), "is no integer"),
    "half an expression": (lambda: sized("s0 +"), r"bad shape expression 's0 \+'"),
    "a high power": (lambda: sized("s0**9"), "power 9 in 's0\\*\\*9' is not in 0 to 4"),
    "another function": (lambda: sized("len(s0)"), "bad shape expression 'len"),
    "sizes that are no list": (
        lambda: _edited(lambda d: d["nodes"][0]["val"].update(shape="s0")),
        "field 'shape' needs a list of sizes, got 's0'",
    ),
    "a size that is no number": (lambda: sized([2.5]), "field 'shape' needs a list of sizes"),
    "a node that is no object": (
        lambda: _edited(lambda d: d["nodes"].insert(0, [])), "node 0: needs an object with a 'name'"
    ),
    "no output": (lambda: _edited(lambda d: d["nodes"].pop()), "no output node"),
    "a value that is a node": (
        lambda: _edited(lambda d: d["nodes"][1].update(val={"node": "x"})),
        "a value cannot refer to node 'x'",
    ),
    "an attribute without a tensor": (
        lambda: _edited(lambda d: d["nodes"][0].update(op="get_attr", target="w", val=3)),
        "get_attr needs a tensor 'val'",
    ),
    "a number too long for Python": (lambda: "9" * 5000, "no graph file"),  # type: ignore[dict-item, return-value]
    "lists in lists without end": (lambda: "[" * 99999, "no graph file"),  # type: ignore[dict-item, return-value]
    "an op without a schema": (lambda: _with_op("k3bad.g.default", {}), "needs a 'schema' text"),
    "an op of another name": (
        lambda: _with_op("k3bad.g.default", {"schema": "k3bad::other() -> ()", "like": []}),
        "its schema .* defines another name",
    ),
    "an op of two names": (lambda: _with_op("k3bad.g", {}), "is not namespace.name.overload"),
}  # fmt: skip


def _edited(change: Callable[[Document], Any]) -> Document:
    found = document()
    change(found)
    return found


def _with_op(name: str, spec: Document) -> Document:
    return _edited(lambda d: d["ops"].update({name: spec}))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_entry_is_named_in_one_line(what: str) -> None:
    make, message = WRONG[what]
    found = make()
    with pytest.raises(GraphFileError, match=message) as caught:
        parse_graph(found if isinstance(found, str) else json.dumps(found), "g")
    assert "\n" not in str(caught.value)


def test_the_unchanged_document_loads() -> None:
    assert [n.op for n in loaded(document()).graph.nodes] == [
        "placeholder", "call_function", "output",
    ]  # fmt: skip


def test_an_unbacked_size_stays_one() -> None:
    found = sized(["u0", 8], [8, 1])
    found["symbols"]["u0"] = [0, None]
    value = next(iter(loaded(found).graph.nodes)).meta["val"]
    assert str(value.shape[0].node.expr) == "u0"
    assert value.shape[1] == 8


def test_an_attribute_of_a_layer_goes_through_a_file() -> None:
    """Its owners are made; the graph of the file reads the same path."""
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList([torch.nn.Linear(8, 4, bias=False)])
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 8)
    w = graph.get_attr("layers.0.weight")
    y = graph.call_function(aten.mul.Tensor, (x, w))
    graph.output((y,))
    again = loaded(json.loads(graph_text(fx.GraphModule(root, graph), {})))
    node = next(n for n in again.graph.nodes if n.op == "get_attr")
    assert node.target == "layers.0.weight"
    assert again.get_buffer(str(node.target)).shape == (4, 8)
    w.target = "layers.0"
    with pytest.raises(GraphFileError, match="get_attr of something that is no tensor"):
        graph_text(fx.GraphModule(root, graph), {})


def test_an_input_with_a_default_has_no_file() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x", default_value=1),))
    with pytest.raises(GraphFileError, match="placeholders with a default value"):
        graph_text(fx.GraphModule(torch.nn.Module(), graph), {})


def test_an_opaque_value_is_kept_as_its_text() -> None:
    class LayerName:
        value = "model.layers.3"

    assert opaque_text(LayerName()) == "LayerName('model.layers.3')"
    assert opaque_text(object()) == "object"
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = LayerName()
    graph.output((x,))
    text = graph_text(fx.GraphModule(torch.nn.Module(), graph), {})
    node = next(iter(loaded(json.loads(text)).graph.nodes))
    assert (node.meta["opaque"], node.meta["val"]) == ("LayerName('model.layers.3')", None)

"""Compositions: what they run is what the graph ran, whatever the graph looked like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table

from k3fuse.kernels.common.composition import Composition, CompositionError
from stock_spellings import (
    FUNCTIONS,
    arguments,
    bit_equal,
    linears,
    mutation,
    sizes,
    traced,
    views,
)
from traced import calls_of, compose, inputs_of, outputs_of

F = torch.nn.functional


def _run(composition: Composition, x: Tensor, w: Tensor) -> list[Tensor]:
    """Some functions read only the shape of `w`, which is static, so that it is no input."""
    return composition.run([x, w][: len(json.loads(composition.text)["in"])])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("level", ["aot", "inductor"])
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
def test_runs_bit_equal_at_any_token_count(
    function: Callable[..., Any], level: str, v2: bool
) -> None:
    decompositions = select_decomp_table() if level == "inductor" else None
    with torch._inductor.config.patch(enable_auto_functionalized_v2=v2):
        graph = traced(function, dynamic=None, decompositions=decompositions)
    composition = Composition.from_text(compose(graph).text)
    uses_wrapper = "auto_functionalized" in composition.text
    assert uses_wrapper == function.__name__.startswith("mutat")
    if uses_wrapper:
        assert ("auto_functionalized_v2" in composition.text) == v2
    # The sizes of any M are in the text, and the M that was traced is not.
    assert '"bfloat16[m0,16]"' in composition.text
    for m in (6, 1, 2, 17, 64, 100):
        x, w = arguments(m, seed=m)
        before = (x.clone(), w.clone())
        bit_equal(_run(composition, x, w), function(x, w))
        assert torch.equal(x, before[0])
        assert torch.equal(w, before[1])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_static_graphs(function: Callable[..., Any]) -> None:
    composition = compose(traced(function, dynamic=False))
    x, w = arguments(6, seed=9)
    bit_equal(_run(composition, x, w), function(x, w))
    with pytest.raises(CompositionError, match=r"input 0 is bfloat16\[7,16\]; .* bfloat16\[6,16\]"):
        _run(composition, *arguments(7))


def test_all_dims_symbolic() -> None:
    composition = compose(traced(views, dynamic=True))
    assert len(json.loads(composition.text)["sym"]) == 3
    for m, n, k in ((3, 8, 5), (9, 8, 30)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        x, w = x.bfloat16(), w.bfloat16()
        bit_equal(composition.run([x, w]), views(x, w))


# ---- text


def _renamed(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    remap: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(graph.nodes):
        new = copy.node_copy(node, remap.__getitem__)
        if node.op != "output":
            new.name = f"other_{97 * (i + 1) % 1009}"
        remap[node] = new
    return copy


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_text_does_not_depend_on_names(function: Callable[..., Any]) -> None:
    graph = traced(function, dynamic=None)
    text = compose(graph).text
    assert compose(_renamed(graph)).text == text
    assert compose(traced(function, m=9, dynamic=None)).text == text  # another trace, another s0
    assert Composition.from_text(text).text == text
    assert Composition.from_text(text) is Composition.from_text(text)


def test_different_subgraphs_have_different_texts() -> None:
    """Control of the test above."""
    texts = {compose(traced(f, dynamic=None)).text for f in FUNCTIONS}
    assert len(texts) == len(FUNCTIONS)


def test_equal_sites_of_one_graph_have_equal_texts() -> None:
    def two_layers(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return F.linear(y @ w, w), y

    graph = traced(two_layers, dynamic=None)
    mms = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    x, w = inputs_of(graph)

    def site(mm: fx.Node) -> str:
        row, weight_t = mm.args
        assert isinstance(row, fx.Node)
        assert isinstance(weight_t, fx.Node)
        return Composition.from_nodes([weight_t, mm], [row, w], [mm]).text

    assert mms[0].args[0] is x
    assert site(mms[0]) == site(mms[2])


# ---- symbols


def _symbolic(shapes: list[list[Any]]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of placeholders whose shapes are expressions in one backed symbol `s`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    row = torch.empty(6, 16)
    torch._dynamo.maybe_mark_dynamic(row, 0)
    s = mode.from_tensor(row).shape[0]
    graph = fx.Graph()
    nodes = []
    with mode:
        for i, shape in enumerate(shapes):
            node = graph.placeholder(f"p{i}")
            node.meta["val"] = torch.empty([d(s) if callable(d) else d for d in shape])
            nodes.append(node)
    return graph, nodes


@pytest.mark.filterwarnings("ignore:Raw SymInt")
def test_symbol_bound_from_a_multiple() -> None:
    """No input has the symbol as a size, only 12 times it: it is divided back out."""
    graph, (p,) = _symbolic([[lambda s: 12 * s, 4]])
    size = p.meta["val"].shape[0]
    view = graph.call_function(torch.ops.aten.view.default, (p, [size // 12, 12, 4]))
    composition = Composition.from_nodes([view], [p], [view])
    assert json.loads(composition.text)["sym"] == {"m0": [0, 0, 12, 0]}
    assert composition.run([torch.zeros(36, 4)])[0].shape == (3, 12, 4)
    with pytest.raises(CompositionError, match=r"input 0 has size 37 at dim 0; .* 12\*m0\+0"):
        composition.run([torch.zeros(37, 4)])


def test_a_plain_size_is_preferred_to_a_multiple() -> None:
    _, (p, q) = _symbolic([[lambda s: 12 * s, 4], [lambda s: s, 4]])
    composition = Composition.from_nodes([], [p, q], [q])
    assert json.loads(composition.text)["sym"] == {"m0": [1, 0, 1, 0]}
    assert json.loads(composition.text)["in"] == ["float32[12*m0,4]", "float32[m0,4]"]
    with pytest.raises(CompositionError, match=r"input 0 is float32\[30,4\]"):
        composition.run([torch.zeros(30, 4), torch.zeros(3, 4)])
    composition.run([torch.zeros(36, 4), torch.zeros(3, 4)])  # control


@pytest.mark.filterwarnings("ignore:Raw SymInt")
def test_size_of_no_input_is_refused() -> None:
    graph, (p, q) = _symbolic([[4, 4], [lambda s: s, 4]])
    size = q.meta["val"].shape[0]
    full = graph.call_function(torch.ops.aten.new_zeros.default, (p, [size]))
    message = r"node new_zeros_default: size s\d+ reads s\d+, which no dimension of an input gives"
    with pytest.raises(CompositionError, match=message):
        Composition.from_nodes([full], [p], [full])
    Composition.from_nodes([full], [p, q], [full])  # control


def test_size_read_from_a_node_without_metadata() -> None:
    graph, (p,) = _symbolic([[lambda s: s, 4]])
    size = graph.call_function(torch.ops.aten.sym_size.int, (p, 0))
    full = graph.call_function(torch.ops.aten.new_zeros.default, (p, [size]))
    composition = Composition.from_nodes([size, full], [p], [full])
    assert composition.run([torch.ones(5, 4)])[0].tolist() == [0.0] * 5


def test_device_follows_the_inputs() -> None:
    graph = traced(sizes, dynamic=None)
    text = compose(graph).text
    assert '{"device":"input"}' in text
    assert '{"device":"cpu"}' not in text
    x, w = arguments(4)
    for tensor in _run(Composition.from_text(text), x.to("meta"), w.to("meta")):
        assert tensor.device.type == "meta"


# ---- errors


def test_missing_operand_names_the_node() -> None:
    graph = traced(linears, dynamic=None)
    calls, ins, outs = calls_of(graph), inputs_of(graph), outputs_of(graph)
    mm = next(n for n in calls if n.target is torch.ops.aten.mm.default)
    with pytest.raises(CompositionError, match=f"node {mm.name} reads .*, which is no input"):
        Composition.from_nodes([n for n in calls if n.name != "t"], ins, outs)
    with pytest.raises(CompositionError, match="which comes later in the list"):
        Composition.from_nodes(calls[::-1], ins, outs)
    with pytest.raises(CompositionError, match="are neither composed nodes nor inputs"):
        Composition.from_nodes(calls[:1], ins, outs)
    Composition.from_nodes(calls, ins, outs)  # control


def test_write_into_an_input_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    add = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    with pytest.raises(CompositionError, match=r"calls aten\.add_\.Tensor, which writes"):
        Composition.from_nodes([add], [x], [add])
    add.target = torch.ops.aten.add.Tensor
    assert Composition.from_nodes([add], [x], [add]).run([torch.ones(1)])[0].item() == 2


def test_python_functions_and_graph_holders_are_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(torch.relu, (x,))
    with pytest.raises(CompositionError, match="node relu: call target"):
        Composition.from_nodes([plain], [x], [plain])
    cond = graph.call_function(torch.ops.higher_order.cond, (x,))
    with pytest.raises(CompositionError, match=r"calls higher_order\.cond, whose arguments live"):
        Composition.from_nodes([cond], [x], [cond])
    attr = graph.get_attr("w")
    with pytest.raises(CompositionError, match="node w is a get_attr; pass it as an input"):
        Composition.from_nodes([attr], [x], [attr])


def test_wrong_inputs_at_run_time() -> None:
    composition = compose(traced(linears, dynamic=None))
    x, w = arguments(3)
    with pytest.raises(CompositionError, match="takes 2 inputs, got 1"):
        composition.run([x])
    with pytest.raises(CompositionError, match=r"input 1 is float32\[8,16\].*bfloat16\[8,16\]"):
        composition.run([x, w.float()])
    with pytest.raises(CompositionError, match=r"input 0 is bfloat16\[3,15\]"):
        composition.run([x[:, 1:], w])
    composition.run([x, w])  # control


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "is not of version 1"),
        ('{"v":2}', "is not of version 1"),
        ('{"v":1}', "malformed"),
        ('{"v":1,"in":["f"],"sym":{},"nodes":[],"out":[]}', "malformed"),
        ('{"v":1,"in":["?"],"sym":{},"nodes":[],"out":["n0"]}', "no value for outputs"),
        ('{"v":1,"in":[],"sym":{"m0":[0,0,1,0]},"nodes":[],"out":[]}', "bound to no input"),
        (
            '{"v":1,"in":["?"],"sym":{},"nodes":[["a.b.c",[{"node":"n1"}],{}]],"out":[]}',
            "n0 reads",
        ),
    ],
)
def test_malformed_texts(text: str, message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        Composition.from_text(text)


def test_operator_of_a_missing_package() -> None:
    """In a process that did not import the package: the operator, its namespace and the fix."""
    text = compose(traced(mutation, dynamic=None)).text
    script = (
        "import sys, torch\n"
        "from k3fuse.kernels.common.composition import Composition, CompositionError\n"
        "c = Composition.from_text(sys.stdin.read())\n"
        "args = [torch.ones(3, 16).bfloat16(), torch.ones(8, 16).bfloat16()]\n"
        "try:\n"
        "    c.run(args)\n"
        "except CompositionError as err:\n"
        "    print('refused:', err)\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from traced import define_mutable_op\n"
        "define_mutable_op()\n"
        "print(c.run(args)[0].sum().item())\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, here],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    refused, value = done.stdout.splitlines()
    assert "k3fuse_test.accumulate_.default" in refused
    assert "import the package that registers the namespace 'k3fuse_test'" in refused
    x, w = torch.ones(3, 16).bfloat16(), torch.ones(8, 16).bfloat16()
    assert float(value) == mutation(x, w)[0].sum().item()

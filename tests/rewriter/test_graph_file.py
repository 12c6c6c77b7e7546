"""Graph files: what a round trip keeps, what a bad file says, which operators loading defines."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from k3fuse.kernels.common.encoding import Json
from k3fuse.rewriter.graph_file import (
    SCHEMA,
    GraphFileError,
    graph_text,
    load_graph,
    module_path,
    save_graph,
    source_line,
)
from k3fuse.rewriter.graph_load import parse_graph

META: dict[str, Json] = {"name": "small", "tp": 2, "m": None, "groups": {"tp:0": 2}}


def symbolic_graph() -> fx.GraphModule:
    """Symbolic M and K, a multi-output op, expressions, infinity, dtype and device arguments."""

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = torch.split(x @ w.t(), [4, w.shape[0] - 4], -1)
        flat = left.float().softmax(-1).to(torch.bfloat16).reshape(x.shape[0] * 4)
        rows = torch.zeros(x.shape[0] // 2 + 1, 3)
        return flat, rows, right + b, torch.full((2,), float("inf"))

    bf16 = torch.bfloat16
    inputs = torch.randn(6, 16, dtype=bf16), torch.randn(9, 16, dtype=bf16)
    return make_fx(step, tracing_mode="symbolic")(*inputs, torch.randn(5, dtype=bf16))


@functools.lru_cache
def symbolic_text() -> str:
    return graph_text(symbolic_graph(), META)


def static_text(**changes: Any) -> str:
    """A hand-written file with every special form; `changes` replace header fields."""
    row = {"dtype": "bfloat16", "shape": [4, 8], "stride": [8, 1], "device": "cuda"}
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "meta": META,
        "symbols": {},
        "hints": {},
        "ops": {
            "k3test.mix.default": {
                "schema": "k3test::mix(Tensor(a0!) bank, Tensor x, Any layer) -> ()",
                "like": [],
            },
            "k3test.reduce.default": {
                "schema": "k3test::reduce(Tensor x, str group) -> Tensor",
                "like": ["x"],
            },
        },
        "nodes": [
            _node("a", "placeholder", "a", val=row, origin="model.layers.3.x"),
            _node("layer", "placeholder", "layer", val={"opaque": "LayerName('model.layers.3')"}),
            _node(
                "mix",
                "call_function",
                "higher_order.auto_functionalized_v2",
                args=[{"op": "k3test.mix.default"}],
                kwargs={
                    "x": {"node": "a"},
                    "layer": {"node": "layer"},
                    "_bank_base_index": 0,
                    "_all_bases": [{"node": "a"}],
                },
                val={"tuple": [None, row]},
                module="model.layers.3.self_attn",
                source="package/file.py:12 mix(bank, x)",
            ),
            _node(
                "getitem_1",
                "call_function",
                "operator.getitem",
                args=[{"node": "mix"}, 1],
                val=row,
            ),
            _node(
                "kernel_proxy",
                "call_function",
                "higher_order.triton_kernel_wrapper_functional",
                args=[],
                kwargs={
                    "kernel_idx": 0,
                    "constant_args_idx": 0,
                    "grid": [{"tuple": [4, 1, 1]}],
                    "tma_descriptor_metadata": {"dict": {}},
                    "kwargs": {"dict": {"out": {"node": "getitem_1"}}},
                    "tensors_to_clone": ["out"],
                },
                val={"dict": {"out": row}},
                kernel="_norm_kernel",
            ),
            _node(
                "getitem_2",
                "call_function",
                "operator.getitem",
                args=[{"node": "kernel_proxy"}, "out"],
                val=row,
            ),
            _node(
                "reduce",
                "call_function",
                "k3test.reduce.default",
                args=[{"node": "getitem_2"}, "tp:0"],
                val=row,
            ),
            _node("output", "output", "output", args=[{"tuple": [{"node": "reduce"}]}]),
        ],
    }
    data.update(changes)
    return json.dumps(data)


def _node(name: str, op: str, target: str, **rest: Any) -> dict[str, Any]:
    return {"name": name, "op": op, "target": target, **rest}


def by_name(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {n.name: n for n in gm.graph.nodes}


# ---- round trip


def test_symbolic_graph_round_trips_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "graph.json"
    save_graph(symbolic_graph(), path, META)
    loaded = load_graph(path)
    assert graph_text(loaded.module, loaded.meta) == path.read_text()
    assert loaded.meta == META
    loaded.module.graph.lint()


def test_one_node_a_line(tmp_path: Path) -> None:
    gm = symbolic_graph()
    lines = graph_text(gm, META).splitlines()
    nodes = [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"name"')]
    assert [n["name"] for n in nodes] == [n.name for n in gm.graph.nodes]


def test_symbols_are_named_by_appearance_and_keep_ranges_and_hints() -> None:
    header = json.loads(symbolic_text())
    assert header["symbols"] == {"s0": [2, None], "s1": [2, None], "s2": [2, None]}
    assert header["hints"] == {"s0": 6, "s1": 16, "s2": 5}
    header["symbols"]["s0"] = [2, 64]
    loaded = parse_graph(json.dumps(header), "graph")
    size = by_name(loaded.module)["x_1"].meta["val"].shape[0]
    assert loaded.shape_env is not None
    bounds = loaded.shape_env.var_to_range[size.node.expr]
    assert (bounds.lower, bounds.upper) == (2, 64)
    assert size.node.hint == 6
    assert json.loads(graph_text(loaded.module, {}))["symbols"]["s0"] == [2, 64]


def test_values_are_fake_tensors_with_the_expressions_of_the_graph() -> None:
    nodes = by_name(parse_graph(symbolic_text(), "graph").module)
    val = nodes["view"].meta["val"]
    assert isinstance(val, torch._subclasses.FakeTensor)
    assert (val.dtype, str(val.shape[0])) == (torch.bfloat16, "4*s0")
    assert nodes["floordiv"].meta["val"].node.hint == 3
    assert nodes["full"].args[1] == float("inf")


def test_special_forms_round_trip() -> None:
    loaded = parse_graph(static_text(), "graph")
    nodes = by_name(loaded.module)
    again = json.loads(graph_text(loaded.module, loaded.meta))
    assert again == json.loads(static_text())
    assert nodes["layer"].meta["val"] is None
    assert nodes["layer"].meta["opaque"] == "LayerName('model.layers.3')"
    assert nodes["mix"].args[0] is torch.ops.k3test.mix.default
    assert nodes["mix"].kwargs["_all_bases"] == [nodes["a"]]
    assert nodes["kernel_proxy"].meta["triton_kernel"] == "_norm_kernel"
    assert nodes["a"].meta["val"].device.type == "cuda"


def test_provenance_reads_like_that_of_a_traced_graph() -> None:
    node = by_name(parse_graph(static_text(), "graph").module)["mix"]
    assert module_path(node) == "model.layers.3.self_attn"
    assert source_line(node) == "package/file.py:12 mix(bank, x)"


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("L['self'].layers.3.mlp", "layers.3.mlp"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self']", ""),
        ("model.layers.3", "model.layers.3"),
    ],
)
def test_module_path(stack: str, path: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", ""), "inner": (stack, "")}
    assert module_path(node) == path


def test_source_line_is_relative_to_the_package_and_skips_dispatch_frames() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/opt/lib/python3/site-packages/pkg/model.py", line 7, in forward\n    y = f(x)\n'
        '  File "/opt/lib/python3/site-packages/pkg/p.py", line 9, in __torch_function__\n    g()\n'
    )
    assert source_line(node) == "pkg/model.py:7 y = f(x)"


def test_devices_are_renamed_in_values_and_arguments() -> None:
    gm = make_fx(lambda x: x + torch.zeros(3, device="meta"))(torch.ones(3, device="meta"))
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert node.meta["val"].device.type == "meta"
    text = graph_text(gm, {}, devices={"meta": "cuda"})
    assert "meta" not in text.replace('"meta": {}', "")
    assert by_name(parse_graph(text, "graph").module)["add"].meta["val"].device.type == "cuda"


def test_a_constant_of_the_graph_becomes_a_value_without_data() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    gm = make_fx(lambda x: x + table)(torch.ones(2, 3))
    (constant,) = gm.graph.find_nodes(op="get_attr")
    loaded = parse_graph(graph_text(gm, {}), "graph")
    node = by_name(loaded.module)[constant.name]
    assert getattr(loaded.module, str(node.target)).shape == (2, 3)
    assert graph_text(loaded.module, {}) == graph_text(gm, {})


# ---- operators of other packages


def test_missing_operators_are_defined_with_their_mutability_and_a_fake() -> None:
    loaded = parse_graph(static_text(), "graph")
    mix, reduce = torch.ops.k3test.mix.default, torch.ops.k3test.reduce.default
    assert [a.alias_info is not None for a in mix._schema.arguments] == [True, False, False]
    x = by_name(loaded.module)["a"].meta["val"]
    assert loaded.fake_mode is not None
    with loaded.fake_mode:
        assert mix(x, x, "any object") is None
        assert reduce(x, "tp:0").shape == x.shape


def test_an_operator_that_is_there_is_left_alone() -> None:
    library: Any = torch.library.Library("k3kept", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("reduce(Tensor x, str group, int extra=3) -> Tensor")
    ops = {
        "k3kept.reduce.default": {
            "schema": "k3kept::reduce(Tensor x, str group) -> Tensor",
            "like": ["x"],
        }
    }
    parse_graph(static_text(ops={**json.loads(static_text())["ops"], **ops}), "graph")
    assert len(torch.ops.k3kept.reduce.default._schema.arguments) == 3


def test_stand_ins_give_way_to_the_package_that_owns_the_operators(tmp_path: Path) -> None:
    """In a process of its own, with a package named vllm that registers an operator on import."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import torch\n"
        "library = torch.library.Library('vllm', 'FRAGMENT')\n"
        "library.define('reduce(Tensor x, str group) -> Tensor')\n"
        "library.impl('reduce', lambda x, group: x * 2, 'CompositeExplicitAutograd')\n"
    )
    text = static_text().replace("k3test", "vllm")
    (tmp_path / "graph.json").write_text(text)
    script = f"""
        import sys, torch
        from pathlib import Path
        from k3fuse.rewriter.graph_file import load_graph
        loaded = load_graph(Path("graph.json"))
        assert "vllm" not in sys.modules
        twice = torch.library.Library("vllm", "FRAGMENT")
        try:
            twice.define("reduce(Tensor x, str group) -> Tensor")
        except RuntimeError:
            print("clash without the hook")
        sys.path.insert(0, {str(tmp_path)!r})
        import vllm
        print("value", torch.ops.vllm.reduce(torch.ones(1), "tp:0").item())
        load_graph(Path("graph.json"))
        print("value", torch.ops.vllm.reduce(torch.ones(1), "tp:0").item())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == ["clash without the hook", "value 2.0", "value 2.0"], run


# ---- bad files


def edit(old: str, new: str) -> str:
    text = symbolic_text()
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (lambda: symbolic_text()[:900], "line ", "truncated"),
        (lambda: "", "line 1", "truncated"),
        (lambda: "[]", "field 'schema'", SCHEMA),
        (lambda: edit(SCHEMA, "k3fuse.graph/2"), "field 'schema'", "capture the graph again"),
        (lambda: edit('"nodes"', '"knots"'), "field 'nodes'", "write it again"),
        (lambda: edit("bfloat16", "bfloat17"), "'x_1', field 'val'", "unknown dtype 'bfloat17'"),
        (lambda: edit('"device": "cpu"', '"device": "gpu"'), "field 'val'", "unknown device 'gpu'"),
        (lambda: edit('{"node": "t"}', '{"node": "tt"}'), "'mm', field 'args'", "node 'tt'"),
        (lambda: edit("aten.mm.default", "aten.nn.default"), "'mm', field 'target'", "aten.nn"),
        (lambda: edit('"4*s0"', '"4*s9"'), "field 'val'", "unknown symbol 's9'"),
        (lambda: edit('"4*s0"', '"__import__(1)"'), "field 'val'", "bad shape expression"),
        (lambda: edit('["s1", 1]', '["s1"]'), "field 'val'", "'stride'"),
        (lambda: edit('"s0": [2, null]', '"s0": [2]'), "field 'symbols', 's0'", "[low, high]"),
        (lambda: edit('{"s0": 6,', '{"s0": -1,'), "field 'symbols', 's0'", "'hints'"),
        (lambda: edit('"name": "mm"', '"name": "t"'), "'t'", "second node"),
        (lambda: edit('"op": "output"', '"op": "exit"'), "field 'op'", "write it again"),
        (
            lambda: static_text(ops={"k3bad.f.default": {"schema": "k3bad::f(Foo x)", "like": []}}),
            "field 'ops'",
            "k3bad.f.default: bad schema",
        ),
        (
            lambda: static_text(ops={"k3fuse.no_such.default": {"schema": "", "like": []}}),
            "field 'ops'",
            "not in this k3fuse",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text: Any, where: str, what: str) -> None:
    with pytest.raises(GraphFileError) as caught:
        parse_graph(text(), "some/graph.json")
    message = str(caught.value)
    assert message.startswith("some/graph.json: ")
    assert where in message
    assert what in message
    assert "\n" not in message


def test_the_unchanged_texts_load() -> None:
    """The control of every case above."""
    assert len(parse_graph(symbolic_text(), "g").module.graph.nodes) == 22
    assert len(parse_graph(static_text(), "g").module.graph.nodes) == 8


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match="cannot be read"):
        load_graph(tmp_path / "none.json")


# ---- graphs that have no file


def test_a_node_that_cannot_be_written_is_named() -> None:
    linear = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(GraphFileError, match=r"'_0'.*call_module.*after AOTAutograd"):
        graph_text(linear, {})
    python = fx.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(GraphFileError, match=r"'relu'.*has no text"):
        graph_text(python, {})
    traced = make_fx(torch.relu)(torch.ones(2))
    assert "aten.relu.default" in graph_text(traced, {})


def test_meta_must_be_json() -> None:
    gm = make_fx(torch.relu)(torch.ones(2))
    with pytest.raises(GraphFileError, match="meta is not JSON"):
        graph_text(gm, {"when": object()})  # type: ignore[dict-item]
    assert '"meta": {"when": "now"}' in graph_text(gm, {"when": "now"})

"""The call that takes the place of vLLM's opaque experts, by an operator of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from build import run_stored, stock_ops, stored
from expert_layer import NAME, PATTERN, as_loaded, k3_layer
from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.graph_file import GraphFile
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.report import Report
from k3fuse_vllm import experts as registry
from k3fuse_vllm import experts_op

STACK = "stack5_tp8_m4_opaque"
STAND_IN = (
    "experts_of_vllm(Tensor hidden, Tensor logits, Tensor? shared_x, Tensor? input_ids, Any layer,"
    " int hidden_dim_unpadded, str facts, str target) -> (Tensor, Tensor)"
)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The operator that vLLM's type of layers is needed for, with any type."""
    library: Any = torch.library.Library("k3fuse_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(STAND_IN)
    torch.library.register_fake("k3fuse_test::experts_of_vllm", experts_op._fake, lib=library)
    overload = torch.ops.k3fuse_test.experts_of_vllm.default
    monkeypatch.setattr(experts_op, "experts_op", lambda: overload)
    yield overload
    library._destroy()


def test_the_call_has_the_facts_of_its_layer(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_loaded(monkeypatch)
    before = [n for n in stored(STACK).module.graph.nodes if "moe_forward_shared" in str(n.target)]
    file, report = run_stored(STACK, target="gb300:tp8")
    assert report.counts()[PATTERN].found == 4
    nodes = list(file.module.graph.nodes)
    assert not [n for n in nodes if "moe_forward_shared" in str(n.target)]
    calls = [n for n in nodes if n.target is operator]
    assert [len(n.args) for n in calls] == [8] * 4
    for call, old in zip(calls, before, strict=True):
        assert [getattr(a, "name", a) for a in call.args[3:6]] == [
            getattr(a, "name", a) for a in old.args[3:6]
        ]
        assert call.args[6:] == (k3_layer().facts(), "gb300:tp8")
        shared, routed = call.meta["val"]
        assert (tuple(shared.shape), tuple(routed.shape)) == ((4, 7168), (4, 3584))
        assert sorted(u.args[1] for u in call.users) == [0, 1]


def look(file: GraphFile) -> Report:
    options = {"target": "gb300:tp8", "dry_run": True, "log": "off", "groups": file.meta["groups"]}
    return rewrite(file.module, Options.make(options))


def near(file: GraphFile) -> str:
    (miss,) = [n for n in look(file).near if n.pattern == PATTERN]
    return miss.reason.sentence


def test_experts_without_a_shared_one_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    as_loaded(monkeypatch)
    stock_ops()
    file = stored("layer1_tp8_m4_opaque")
    (node,) = [n for n in file.module.graph.nodes if "moe_forward_shared" in str(n.target)]
    node.target = torch.ops.vllm.moe_forward.default
    node.args = (*node.args[:2], node.args[4])
    assert near(file).endswith("there is no shared expert behind this op")


@pytest.mark.parametrize("known", [True, False])
def test_the_layer_may_be_an_object_of_the_graph(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands vLLM's LayerName over as an opaque object: its name is in the metadata."""
    asked: list[str] = []
    monkeypatch.setattr(registry, "find", lambda name: asked.append(name) or k3_layer(name))
    file = stored("layer1_tp8_m4_opaque")
    graph = file.module.graph
    (node,) = [n for n in graph.nodes if "moe_forward_shared" in str(n.target)]
    with graph.inserting_before(next(iter(graph.nodes))):
        layer = graph.placeholder("layer")

    class Name:
        value = NAME if known else None

    layer.meta["val"] = Name()
    node.args = (*node.args[:4], layer, node.args[5])
    if known:
        assert look(file).counts()[PATTERN].found == 1
        assert asked == [NAME]
    else:
        assert near(file).endswith("the layer argument names no layer")
        assert asked == []

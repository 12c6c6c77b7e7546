"""Each rule that a rewritten graph has to keep: broken alone, and kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from build import Hand, aten
from k3fuse.rewriter.verify import VerifyError, snapshot, verify


def graph() -> tuple[fx.GraphModule, fx.Node]:
    """relu(neg(x)), and the node of neg."""
    h = Hand()
    y = h.call(aten.neg.default, h.input("x", 4, 8))
    return h.done(h.call(aten.relu.default, y)), y


def reads_another_graph(module: fx.GraphModule, node: fx.Node) -> None:
    node.args = (graph()[1],)


def changes_a_survivor(module: fx.GraphModule, node: fx.Node) -> None:
    node.meta["val"] = node.meta["val"].float()


def names_nothing(module: fx.GraphModule, node: fx.Node) -> None:
    insert(module, node)


def has_no_value(module: fx.GraphModule, node: fx.Node) -> None:
    insert(module, node).meta["k3fuse"] = {"pattern": "test"}


def keeps_every_rule(module: fx.GraphModule, node: fx.Node) -> None:
    new = insert(module, node)
    new.meta.update(k3fuse={"pattern": "test"}, val=node.meta["val"])


def insert(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    with module.graph.inserting_after(node):
        return module.graph.call_function(aten.abs.default, (node,))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (reads_another_graph, "does not lint"),
        (changes_a_survivor, "neg_default had .* has "),
        (names_nothing, "inserted without naming"),
        (has_no_value, "inserted without a fake value"),
        (keeps_every_rule, ""),
    ],
)
def test_a_broken_rule_is_named(
    edit: Callable[[fx.GraphModule, fx.Node], None], message: str
) -> None:
    module, node = graph()
    before = snapshot(module.graph)
    edit(module, node)
    if message:
        with pytest.raises(VerifyError, match=message):
            verify(module, before, [])
    else:
        verify(module, before, [])

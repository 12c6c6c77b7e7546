"""The router's row must be the same on all ranks: made of an all-reduce, of as many tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from build import run, stored
from k3fuse.patterns.moe import equal_on_all_ranks
from k3fuse.rewriter.view import GraphView

GROUP = "tp:0"
NAME = "layer1_tp8_m4_opaque"


def reduced(rows: Tensor, group: str = GROUP) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(rows, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(started)


def equal(make: Callable[[Tensor], Tensor]) -> bool:
    """Whether the last value of a small graph is taken for the same on all ranks."""
    graph = make_fx(make, tracing_mode="fake")(torch.ones(8, 16)).graph
    (row,) = (node for node in graph.nodes if node.op == "output")
    return equal_on_all_ranks(GraphView(graph, {GROUP: 8}), row.all_input_nodes[0], GROUP)


def test_what_an_all_reduce_made_is_equal() -> None:
    assert equal(lambda x: reduced(x))
    assert equal(lambda x: torch.nn.functional.rms_norm(reduced(x) + x, (16,)))
    assert equal(lambda x: reduced(x).view(2, 4, 16).transpose(0, 1).reshape(8, 16) * 2)


def test_what_no_all_reduce_made_is_not() -> None:
    assert not equal(lambda x: x * 2)
    assert not equal(lambda x: reduced(x, "dp:0") * 2)


def test_a_chunk_of_the_tokens_is_not() -> None:
    """As sequence parallelism hands each rank tokens of its own behind the reduction."""
    assert not equal(lambda x: reduced(x)[2:4] * 2)


@pytest.mark.parametrize("group", ["tp:0", "dp:0"])
def test_a_site_whose_row_another_group_reduced_is_refused(group: str) -> None:
    file = stored(NAME)
    reductions = [n for n in file.module.graph.nodes if str(n.target) == "vllm.all_reduce.default"]
    first = reductions[0]  # the output projection's
    first.args = (first.args[0], group)
    report = run(file.module, "gb300:tp8", groups={**file.meta["groups"], "dp:0": 8})
    (site,) = (s for s in report.sites if s.pattern == "router")
    codes = [r.code.value for r in site.reasons]
    assert codes == ([] if group == GROUP else ["GROUP_MISMATCH"])


def test_the_report_says_what_is_hidden() -> None:
    file = stored(NAME)
    report = run(file.module, "gb300:tp8", groups=file.meta["groups"])
    (site,) = (s for s in report.sites if s.pattern == "router")
    assert site.notes == (
        "hidden in an opaque experts op: the selection, the shared expert's gate and up",
    )

"""Rows that all ranks have, split over them: which sites are, which are refused, what it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from build import run, run_stored
from k3fuse.patterns.latent_rows import split_rows
from k3fuse.patterns.sources.kimi_k3 import build
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.sources import SourceRequest, capture
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView

K = 7168
# Bytes of the rows that the other ranks read, by ranks.
LEFT = {tp: (2112 - 2112 // tp) * K * 2 for tp in (8, 16)}


def own_model(tp: int, form: str, **options: Any) -> tuple[Report, list[Any]]:
    """Four layers of Kimi K3, and the calls of the op."""
    target = f"gb300:tp{tp}"
    graph = build(SourceRequest(Target.parse(target), 8, 4, form))[0]
    report = run(graph.module, target, groups=graph.groups, **options)
    nodes = graph.module.graph.nodes
    return report, [n for n in nodes if "k3fuse.attention_projection" in str(n.target)]


def projections(report: Report) -> list[Site]:
    return [s for s in report.sites if s.pattern == "attention_projection"]


@pytest.mark.parametrize(
    ("tp", "form", "split"), [(8, "list", [2112]), (16, "list-separate", [1536, 576, 0])]
)
def test_latent_attention_is_split_where_that_is_asked_for(
    tp: int, form: str, split: list[int]
) -> None:
    report, calls = own_model(tp, form, row_sharded=True)
    sites = projections(report)
    assert [s.outcome for s in sites] == ["found"] * 4, report.reason_lines()
    assert [n.kwargs.get("row_sharded") for n in calls] == [None, None, None, split]
    assert all(n.kwargs["group"] for n in calls)
    kernels = [s.kernel for s in sites if s.kernel is not None]
    assert [k.name for k in kernels] == ["stream_gemm"] * 3 + ["row_sharded_stream_gemm"]
    assert [(k.launches, k.hops, k.unread) for k in kernels] == [(1, 0, 0)] * 3 + [(1, 1, LEFT[tp])]
    rows = {8: "n3648s2112", 16: "n1536s1536_576s576_768"}[tp]
    assert list(kernels[-1].built) == [f"stream_m8_k7168_tp{tp}_{rows}_multicast"]


def test_off_by_default() -> None:
    report, calls = own_model(8, "list")
    assert ["row_sharded" in n.kwargs for n in calls] == [False] * 4
    assert [s.kernel.hops for s in projections(report) if s.kernel is not None] == [0] * 4


def test_vllms_layers_are_split_where_the_row_is_the_same_on_all_ranks() -> None:
    _, report = run_stored("stack5_tp8_m4_opaque", row_sharded=True)
    mla = [s for s in projections(report) if s.form.startswith("mla")]
    assert [(s.outcome, s.facts[2]) for s in mla] == [("found", (2112, 0))]
    # One layer alone gets its row from outside: nothing shows that all ranks have the same one.
    _, report = run_stored("layer3_tp8_m8_opaque", row_sharded=True)
    (site,) = projections(report)
    assert site.outcome == "refused"
    (reason,) = site.reasons
    assert reason.code.value == "GROUP_MISMATCH"
    assert "row_all_reduced = no" in reason.sentence
    _, report = run_stored("layer3_tp8_m8_opaque")  # the control
    assert [s.outcome for s in projections(report)] == ["found"]


def parts(call: Callable[..., Any], rows: Sequence[int]) -> tuple[int, ...]:
    """What `split_rows` says of the linears of a small graph."""
    inputs = (torch.randn(2, 8), *(torch.randn(n, 8) for n in rows))
    graph = capture(call, inputs, {}, name="rows")[0].module.graph
    view = GraphView(graph, {})
    return split_rows(view, list(view.each(Linear)), set(graph.nodes))


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def merged(x: Tensor, w: Tensor) -> Any:
    q, kv, gate = linear(x, w).split([1536, 576, w.shape[0] - 2112], dim=-1)
    return q, kv[:, :512], kv[:, 512:], torch.sigmoid(gate.double())


def gate_first(x: Tensor, w: Tensor) -> Any:
    gate, rest = linear(x, w).split([w.shape[0] - 2112, 2112], dim=-1)
    return torch.sigmoid(gate), rest


def two_gates(x: Tensor, w: Tensor) -> Any:
    z = linear(x, w)
    return torch.sigmoid(z[:, 2112:]), torch.sigmoid(z[:, :1536])


def gate_of_a_sum(x: Tensor, w: Tensor) -> Any:
    z = linear(x, w)
    return torch.sigmoid(z[:, 2112:] + 1), z[:, :2112]


def other_widths(x: Tensor, w: Tensor) -> Any:
    return torch.sigmoid(linear(x, w)[:, 2048:])


def gate_from_the_middle(x: Tensor, w: Tensor) -> Any:
    return torch.sigmoid(linear(x, w)[:, 2112:-1])


@pytest.mark.parametrize("rows", [3648, 2880])
def test_all_but_the_gate_are_split(rows: int) -> None:
    assert parts(merged, (rows,)) == (2112,)


def test_separate_weights_are_told_apart_by_the_gate_though_it_is_as_wide_as_q_a() -> None:
    def call(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        return torch.sigmoid(linear(x, a)), linear(x, b), linear(x, c)

    assert parts(call, (1536, 1536, 576)) == (0, 1536, 576)
    assert parts(call, (1536, 1500, 612)) == ()


@pytest.mark.parametrize(
    "call", [gate_first, two_gates, gate_of_a_sum, other_widths, gate_from_the_middle]
)
def test_what_is_not_certain_is_not_split(call: Callable[..., Any]) -> None:
    assert parts(call, (3648,)) == ()

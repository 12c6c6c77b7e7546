"""Bytes and counts of a layer, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from k3fuse.rewriter.costs import layer_costs
from k3fuse.rewriter.site import Absorption, Kernel, Site
from k3fuse.rewriter.sources import capture
from reports import full_size

BF16 = torch.bfloat16
LAUNCHES = Kernel("k", True, 3)
X, W = 4 * 8 * 2, 8 * 8 * 2  # bytes of [4, 8] and [8, 8] in BF16


def rows(
    call: Callable[..., Any], inputs: tuple[torch.Tensor, ...], chosen: Callable[[fx.Node], bool],
    kernel: Kernel = LAUNCHES,
) -> dict[str, Any]:  # fmt: skip
    """Costs of a graph that is one layer, with one found site of the chosen nodes."""
    graph = capture(call, inputs, {}, name="costs")[0].module.graph
    inside = tuple(n for n in graph.nodes if n.op == "call_function" and chosen(n))
    site = Site("mine", "plain", inside[-1], inside, {}, (inside[-1],), {}, layer=2)
    site.kernel = kernel
    (entry,) = layer_costs(list(graph.nodes), dict.fromkeys(graph.nodes, 2), [site])
    return entry


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.linear(x, w)) * 2


def test_a_site_reads_and_writes_its_edges_once() -> None:
    inputs = (torch.randn(4, 8, dtype=BF16), torch.randn(8, 8, dtype=BF16))
    entry = rows(chain, inputs, lambda n: "mul" not in str(n.target))
    site, rest = entry["rows"]
    assert (site["part"], site["operations"], site["launches"]) == ("mine", 2, 3)
    assert (site["read"], site["written"]) == (X + W + X, X + X)  # mm, then relu by itself
    assert (site["read_after"], site["written_after"]) == (X + W, X)
    assert (rest["part"], rest["operations"], rest["launches"]) == ("", 1, 1)
    assert entry["floor"] == X + W + X
    assert (entry["layer"], entry["layers"], entry["sites"]) == (2, [2], ["mine plain"])


def test_a_kernel_of_several_ranks_counts_its_exchange_and_leaves_bytes_to_the_others() -> None:
    inputs = (torch.randn(4, 8, dtype=BF16), torch.randn(8, 8, dtype=BF16))
    plain, shared = (
        rows(chain, inputs, lambda n: "mul" not in str(n.target), kernel)["rows"]
        for kernel in (Kernel("k", True, 1), Kernel("k", True, 1, hops=1, unread=W // 2))
    )
    assert [r["hops"] for r in (*plain, *shared)] == [0] * 4
    assert [r["hops_after"] for r in (*plain, *shared)] == [0, 0, 1, 0]
    assert plain[0]["read_after"] - shared[0]["read_after"] == W // 2
    assert plain[1] == shared[1]


def test_a_site_in_another_op_reads_nothing_that_this_makes_and_has_no_launch() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + y

    inputs = (torch.randn(4, 8, dtype=BF16), torch.randn(4, 8, dtype=BF16))
    graph = capture(call, inputs, {}, name="costs")[0].module.graph
    relu, add = (n for n in graph.nodes if n.op == "call_function")
    taken = {}
    for absorbed in (False, True):
        first = Site("one", "plain", relu, (relu,), {}, (relu,), {}, layer=2, kernel=LAUNCHES)
        second = Site("two", "plain", add, (add,), {}, (add,), {}, layer=2, kernel=LAUNCHES)
        if absorbed:
            second.kernel = Kernel("k", True, 0)
            link = Absorption(first, second, partial(replace, first))
            first.links.append(link)
            second.links.append(link)
        (entry,) = layer_costs(list(graph.nodes), {}, [first, second])
        taken[absorbed] = entry["rows"][1]
    assert (taken[False]["read_after"], taken[True]["read_after"]) == (2 * X, X)
    assert (taken[False]["launches"], taken[True]["launches"]) == (3, 0)
    assert taken[True]["written_after"] == X


def test_views_cost_nothing() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.view(2, 2, 8).transpose(0, 1)) + 1

    entry = rows(call, (torch.randn(4, 8, dtype=BF16),), lambda n: "add" not in str(n.target))
    assert entry["rows"][0]["operations"] == 1
    assert entry["rows"][0]["read_after"] == X


def test_an_expanded_operand_counts_once() -> None:
    def call(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, row.expand(4, 8))

    inputs = (torch.randn(4, 8, dtype=BF16), torch.randn(1, 8, dtype=BF16))
    assert rows(call, inputs, lambda n: True)["rows"][0]["read"] == X + X // 4


def test_picked_rows_are_those_that_uniform_routing_touches() -> None:
    experts, width, tokens, top = 64, 32, 8, 4

    def call(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return w[ids]

    ids = torch.zeros(tokens, top, dtype=torch.int64)
    inputs = (torch.randn(experts, width, dtype=BF16), ids)
    entry = rows(call, inputs, lambda n: True)
    different = experts * (1 - (1 - top / experts) ** tokens)
    assert entry["rows"][0]["read_after"] == round(width * 2 * different) + tokens * top * 8
    assert different < tokens * top  # the control: less than every pick by itself


def test_a_refused_site_costs_what_it_did() -> None:
    graph = capture(
        chain, (torch.randn(4, 8, dtype=BF16), torch.randn(8, 8, dtype=BF16)), {}, name="costs"
    )[0].module.graph
    inside = tuple(n for n in graph.nodes if n.op == "call_function")
    site = Site("mine", "plain", inside[-1], inside, {}, (inside[-1],), {}, layer=0)
    site.outcome = "refused"
    (entry,) = layer_costs(list(graph.nodes), {}, [site])
    (row,) = entry["rows"]
    assert row["launches"] == row["operations"] == 3
    assert (row["read_after"], row["written_after"]) == (row["read"], row["written"])


def test_a_symbolic_size_without_a_number_gives_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    for n in (x, node):
        n.meta["val"] = torch.empty(4, 8)
    graph.output(node)
    site = Site("mine", "plain", node, (node,), {}, (node,), {}, layer=0)
    assert layer_costs(list(graph.nodes), {}, [site]) != []

    class Unknown(torch.Tensor):
        shape = (object(), 8)  # type: ignore[assignment]

    node.meta["val"] = torch.empty(4, 8).as_subclass(Unknown)
    assert layer_costs(list(graph.nodes), {}, [site]) == []


def test_kimi_k3_at_tp8() -> None:
    """The byte floor of a KDA layer with experts at M = 8, in MB.

    Input projection 90.1, output projection 22.0, router 12.9, latent down and up 51.4 each,
    shared experts 33.0, 120.4 of 896 routed experts of 2.19 each, recurrent state 12.8 in and out.
    """
    kinds = [x for x in full_size()["layers"] if "kda" in " ".join(x["sites"])]
    most = max(kinds, key=lambda x: len(x["layers"]))
    floor = 90.1 + 22.0 + 12.9 + 2 * 51.4 + 33.0 + 120.4 * 2.19 + 12.8
    assert most["floor"] == pytest.approx(floor * 1e6, rel=0.01)
    assert sum(r["launches"] for r in most["rows"] if r["outcome"] == "found") == 6
    assert sum(r["hops"] for r in most["rows"]) == 3
    # The router's rows and those of the up-projection are split over the ranks: a hop each.
    assert sum(r["hops_after"] for r in most["rows"]) == 5
    experts, router = (
        next(r for r in most["rows"] if r["part"] == part) for part in ("experts", "router")
    )
    # The shared expert's gate and up are in the router's launch.
    read = 120.4 * 2.19 + 51.4 / 8 + 11.0
    assert experts["read_after"] == pytest.approx(read * 1e6, rel=0.01)
    read = (12.9 + 51.4) / 8 + 22.0
    assert router["read_after"] == pytest.approx(read * 1e6, rel=0.01)
    assert (router["launches"], experts["launches"]) == (2, 2)

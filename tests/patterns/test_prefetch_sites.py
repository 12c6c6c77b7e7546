"""The option `prefetch` on Kimi K3's layers: which weights, how many bytes, and nothing else."""

from __future__ import annotations

import functools
import json
from collections import Counter
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from torch import fx

from build import run, run_stored
from k3fuse.kernels.prefetch.policy import MOST_BYTES
from k3fuse.patterns.sources.kimi_k3 import build
from k3fuse.rewriter.graph_text import graph_text
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.sources import SourceRequest
from k3fuse.rewriter.target import Target

HIDDEN = 7168
# Bytes that one rank of eight reads.
GATE, LATENT = 896 // 8 * HIDDEN * 2, 3584 // 8 * HIDDEN * 2


@functools.cache
def rewritten(
    layers: int, tp: int, m: int | None, form: str = "list", **options: Any
) -> tuple[Report, fx.Graph]:
    target = f"gb300:tp{tp}"
    graph = build(SourceRequest(Target.parse(target), m, layers, form))[0]
    report = run(graph.module, target, groups=graph.groups, **options)
    return report, graph.module.graph


def asking(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.kwargs.get("prefetch")]


def listed(graph: fx.Graph) -> list[list[str]]:
    return [[w.name for w in n.kwargs["prefetch"]] for n in asking(graph)]  # type: ignore[union-attr]


def check_order(graph: fx.Graph) -> None:
    """Each weight is named once, by an op above its only reader."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    seen: set[fx.Node] = set()
    for op in asking(graph):
        weights: Any = op.kwargs["prefetch"]
        assert len(weights) <= 16
        for weight in weights:
            assert weight.op == "placeholder"
            assert weight not in seen
            seen.add(weight)
            readers = [u for u in weight.users if u is not op]
            assert len(readers) == 1
            assert index[op] < index[readers[0]]


def test_off_nothing_changes() -> None:
    report, graph = rewritten(5, 8, 8)
    assert not any(name.startswith("prefetch") for n in graph.nodes for name in n.kwargs)
    assert {s.prefetched_bytes for s in report.sites} == {0}
    assert "prefetch" not in report.summary()
    assert "prefetched_bytes" not in str(report.to_json()["sites"])


def test_on_only_the_lists_are_new() -> None:
    report, graph = rewritten(5, 8, 8, prefetch=True)
    other, plain = rewritten(5, 8, 8)
    lists = {node: node.kwargs for node in asking(graph)}
    for node, kwargs in lists.items():
        node.kwargs = {k: v for k, v in kwargs.items() if not k.startswith("prefetch")}
    assert graph_text(graph) == graph_text(plain)
    assert report.site_hash() == other.site_hash()
    for node, kwargs in lists.items():
        node.kwargs = kwargs


def test_behind_the_output_projection_the_router_reads() -> None:
    report, graph = rewritten(5, 8, 8, prefetch=True)
    check_order(graph)
    sites = [s for s in report.sites if s.pattern == "output_projection"]
    first, *others = sites
    # Layer 0 is dense: what its attention is followed by would push the next weights out again.
    assert first.prefetched == ()
    assert "ops before it read 181665792 bytes" in first.notes[-1]
    for site in others:
        assert [size for _, size in site.prefetched] == [GATE, LATENT, MOST_BYTES - GATE - LATENT]
        assert site.prefetched_bytes == MOST_BYTES
        assert site.kernel is not None
        assert site.kernel.launches == 2
    document = [s for s in report.to_json()["sites"] if "prefetched_bytes" in s]
    assert sum(s["prefetched_bytes"] for s in document) == report.prefetched_bytes
    assert f", prefetch: {report.prefetched_bytes} bytes" in report.summary().splitlines()[-1]
    schema = json.loads(files("k3fuse.rewriter").joinpath("report.schema.json").read_text())
    jsonschema.validate(report.to_json(), schema)
    projections = [n for n in asking(graph) if "output_projection" in str(n.target)]
    assert [n.kwargs["prefetch_split"] for n in projections] == [[896, 3584, 0]] * 4
    names = ["mlp_gate_weight", "mlp_latent_down_proj_weight", "mlp_shared_experts_gate_up_proj"]
    for layer, node in enumerate(projections, start=1):
        weights: Any = node.kwargs["prefetch"]
        for weight, name in zip(weights, names, strict=True):
            assert f"layers_{layer}_{name}" in weight.name


def test_behind_the_tail_the_next_attention_reads() -> None:
    report, graph = rewritten(5, 8, 8, prefetch=True)
    sites = [s for s in report.sites if s.pattern == "experts"]
    assert [s.prefetched_bytes for s in sites] == [MOST_BYTES] * 3 + [0]  # the last has none behind
    tails = [n for n in asking(graph) if "k3fuse.experts" in str(n.target)]
    assert [[w.name for w in n.kwargs["prefetch"]] for n in tails] == [  # type: ignore[union-attr]
        [f"layers_{layer}_self_attn_in_proj_weight"] for layer in (2, 3, 4)
    ]
    assert not any("prefetch_split" in n.kwargs for n in tails)
    plain, _ = rewritten(5, 8, 8)
    more: Counter[int | None] = Counter()
    for site, other in zip(report.sites, plain.sites, strict=True):
        assert site.kernel is not None
        assert other.kernel is not None
        launches = site.kernel.launches - other.kernel.launches
        assert launches == bool(site.prefetched)
        more[site.layer] += launches
    # Behind attention's projection and behind the tail of a layer.
    assert [more[layer] for layer in range(5)] == [0, 2, 2, 2, 1]


def test_of_rows_that_the_ranks_split_a_rank_asks_for_its_own() -> None:
    """Latent attention's q_a and kv_a with both options: a share of 2112 rows, then the gate's."""
    report, graph = rewritten(4, 8, 8, "list-separate", prefetch=True, row_sharded=True)
    (node,) = [n for n in asking(graph) if "prefetch_split" in n.kwargs and "experts" in n.name][:1]
    site = next(s for s in report.sites if s.pattern == "experts" and s.layer == 2)
    assert node.kwargs["prefetch_split"] == [1536, 576, 0]
    sizes = [1536 // 8 * HIDDEN * 2, 576 // 8 * HIDDEN * 2]
    assert [size for _, size in site.prefetched] == [*sizes, MOST_BYTES - sum(sizes)]


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
def test_the_whole_model(tp: int) -> None:
    """92 output projections behind the dense layer, 91 tails with an attention behind them."""
    report, graph = rewritten(93, tp, 8, prefetch=True)
    check_order(graph)
    router = (896 // tp + 3584 // tp + 12288 // tp) * HIDDEN * 2
    sizes = Counter((s.pattern, s.prefetched_bytes) for s in report.sites if s.prefetched)
    assert sizes == {
        ("output_projection", min(router, MOST_BYTES)): 92, ("experts", MOST_BYTES): 91
    }  # fmt: skip
    assert report.prefetched_bytes == 92 * min(router, MOST_BYTES) + 91 * MOST_BYTES
    assert report.launches == {"kda_layer": 9, "mla_layer": 11}  # two more than without
    assert f"prefetch: {report.prefetched_bytes} bytes" in report.summary()


def test_where_the_policy_has_no_row_nothing_is_named() -> None:
    report, graph = rewritten(2, 8, 16, prefetch=True)
    assert asking(graph) == []
    notes = [n for s in report.sites for n in s.notes if "prefetch" in n]
    assert set(notes) == {"no prefetch of all weights: the policy has no row for M = 16"}
    assert "prefetch:" not in report.summary()


def test_a_symbolic_token_count_is_decided_by_the_op() -> None:
    file, report = run_stored("stack5_tp8_mdyn_opaque", prefetch=True)
    assert isinstance(report.m, str)
    assert listed(file.module.graph)
    launches = {s.kernel.launches for s in report.sites if s.prefetched and s.kernel is not None}
    assert launches == {2}


@pytest.mark.parametrize("stored", ["stack5_tp8_m4_opaque", "layer3_tp8_m8_plain"])
def test_vllms_graphs(stored: str) -> None:
    file, report = run_stored(stored, prefetch=True)
    assert [s.outcome for s in report.sites if s.reasons] == []
    check_order(file.module.graph)
    assert listed(file.module.graph)

"""Graph pieces: local names, one key for equal sites, marks of what the rewrite changed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from k3fuse.rewriter import pieces
from k3fuse.rewriter.sources import capture
from reports import full_size, small


def linear(rows: int = 4) -> fx.Graph:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.linear(x, w)) + 1

    module = capture(call, (torch.randn(rows, 8), torch.randn(16, 8)), {}, name="linear")[0].module
    return module.graph


def computed(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def test_records_of_a_piece() -> None:
    nodes = computed(linear())
    records = pieces.draft(nodes[:2]).records
    assert [r["op"] for r in records] == ["aten.t", "aten.mm", "input", "input"]
    assert records[1]["text"].startswith("%mm: f32[4, 16] = aten.mm(%")
    assert records[1]["readers"] == 1
    assert "readers" not in records[0]
    assert records[1]["inputs"][1] == "t"


def test_equal_graphs_give_one_piece_and_others_another() -> None:
    kept = pieces.Pieces()
    keys = [kept.keep(pieces.draft(computed(linear(rows)))) for rows in (4, 4, 5)]
    assert keys[0] == keys[1] != keys[2]
    assert len(kept.store) == 2


def test_changed_nodes_are_marked() -> None:
    kept = pieces.Pieces()
    nodes = computed(linear())
    key = kept.keep(pieces.draft(nodes), {nodes[1]})
    marked = [r["name"] for r in kept.store[key]["nodes"] if r.get("changed")]
    assert marked == ["mm"]


def test_layer_numbers_are_left_out() -> None:
    graph = fx.Graph()
    for layer in (3, 57):
        graph.placeholder(f"layers_{layer}_mlp_gate_weight")
    assert {pieces.label(n) for n in graph.nodes} == {"layers_N_mlp_gate_weight"}


def test_a_near_miss_shows_its_neighbours() -> None:
    nodes = computed(linear())
    assert pieces.around(nodes[1]) == tuple(nodes[:3])


@pytest.mark.parametrize(
    ("path", "kept"),
    [("/home/me/model.py", True), ("/site/torch/nn/functional.py", False), ("<string>", False)],
)
def test_frames_are_the_models(path: str, kept: bool) -> None:
    node = computed(linear())[0]
    node.meta["stack_trace"] = f'  File "{path}", line 12, in forward\n    y = self.gate(x)\n'
    assert pieces.frames(node) == (["me/model.py:12 y = self.gate(x)"] if kept else [])


def test_a_report_keeps_a_piece_once() -> None:
    report = full_size()
    used = [key for s in report["sites"] for key in s["pieces"].values()]
    assert len(used) == 2 * 464
    assert set(used) == set(report["graphs"])
    assert len(report["graphs"]) < 100


def test_sites_of_a_recorded_report_have_lines_and_both_graphs() -> None:
    found = [s for s in small()["sites"] if s["outcome"] == "found"]
    assert len(found) == 5
    for site in found:
        assert set(site["pieces"]) == {"before", "after"}, site["pattern"]
        assert site["frames"]
    refused = [s for s in small(plan=False)["sites"] if s["outcome"] == "refused"]
    assert {"experts"} == {s["pattern"] for s in refused}
    assert all(set(s["pieces"]) == {"before"} for s in refused)


def test_what_went_away_and_what_is_new_is_marked() -> None:
    report = small()
    site = next(s for s in report["sites"] if s["pattern"] == "output_projection")
    before, after = (report["graphs"][site["pieces"][p]]["nodes"] for p in ("before", "after"))
    gone = {n["op"] for n in before if n.get("changed")}
    assert {"aten.mm", "vllm.all_reduce", "_C.kimi_k3_attn_res"} <= gone
    assert {n["op"] for n in after if n.get("changed")} == {
        "k3fuse.output_projection_attn_res", "getitem",
    }  # fmt: skip
    stock = small(plan=False)
    kept = [s["pieces"]["before"] for s in stock["sites"] if s["outcome"] == "refused"]
    assert kept
    assert not any(n.get("changed") for key in kept for n in stock["graphs"][key]["nodes"])

"""The stored decode graphs of vLLM's Kimi K3: complete, readable, and consistent with torch."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from k3fuse.rewriter.graph_file import GraphFile, graph_text, load_graph, module_path

DATA = Path(__file__).parents[1] / "data" / "vllm_k3"
LAYERS = (0, 1, 3, 12, 91, 92)
MLA = (3, 91, 92)
GROUPS = (8, 16)
TOKENS = ("1", "4", "8", "64", "dyn")
FILES = sorted(p.name for p in DATA.glob("*.json"))


def expected_files() -> set[str]:
    names = [f"layer{i}" for i in LAYERS]
    found = {
        f"{n}_tp{tp}_m{m}_opaque.json" for n in [*names, "stack5"] for tp in GROUPS for m in TOKENS
    }
    found |= {f"final_tp{tp}_m{m}_plain.json" for tp in GROUPS for m in TOKENS}
    # The attention bodies of vLLM fix M when they are traced: no symbolic M with a plain core.
    found |= {
        f"{n}_tp{tp}_m{m}_plain.json" for n in names for tp in GROUPS for m in TOKENS if m != "dyn"
    }
    return found | {f"stack5_tp{tp}_m{m}_plain.json" for tp in GROUPS for m in ("1", "64")}


@functools.cache
def load(name: str) -> GraphFile:
    return load_graph(DATA / name)


def calls(name: str, target: str) -> list[fx.Node]:
    """Nodes that call `target`, also through auto_functionalized."""
    nodes = load(name).module.graph.nodes
    return [n for n in nodes if n.op == "call_function" and target in _targets(n)]


def _targets(node: fx.Node) -> list[str]:
    first = node.args[:1] if "auto_functionalized" in str(node.target) else ()
    return [str(node.target), *map(str, first)]


def inputs(name: str) -> dict[str, Any]:
    """Shape by input name, where the input is a tensor."""
    found = {}
    for node in load(name).module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            found[node.meta["origin"]] = tuple(node.meta["val"].shape)
    return found


# ---- all files


def test_the_set_is_complete_and_small() -> None:
    assert set(FILES) == expected_files()
    assert sum(p.stat().st_size for p in DATA.iterdir()) < 6 << 20


@pytest.mark.parametrize("name", FILES)
def test_a_file_round_trips_and_its_graph_is_sound(name: str) -> None:
    loaded = load(name)
    assert graph_text(loaded.module, loaded.meta) == (DATA / name).read_text(encoding="utf-8")
    loaded.module.graph.lint()
    assert loaded.meta["name"] == name.removesuffix(".json")
    assert loaded.meta["vllm"] == "0.33.0"
    assert "/work" not in (DATA / name).read_text(encoding="utf-8")


def propagate(loaded: GraphFile) -> Iterator[tuple[fx.Node, Any]]:
    """Every call with the value that torch computes from the stored values of its inputs."""
    assert loaded.fake_mode is not None
    with loaded.fake_mode:
        for node in loaded.module.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), lambda n: n.meta.get("val")
                )
                yield node, node.target(*args, **kwargs)


def layout(value: Any) -> list[Any]:
    return [
        (str(v.shape), str(v.stride()), v.dtype, v.device.type)
        if isinstance(v, torch.Tensor)
        else str(v)
        for v in pytree.tree_leaves(value)
    ]


# Other M repeat the same operations: the smallest and largest M, and the symbolic one.
PROPAGATED = [n for n in FILES if "8_m1_opaque" in n or "16_m64_plain" in n or "_mdyn_" in n]


@pytest.mark.parametrize("name", PROPAGATED)
def test_stored_values_are_what_torch_computes(name: str) -> None:
    seen = 0
    for node, value in propagate(load(name)):
        assert layout(value) == layout(node.meta["val"]), node.format_node()
        seen += 1
    assert seen >= (40 if not name.startswith("final") else 6)


def test_a_wrong_stored_value_is_noticed() -> None:
    loaded = load_graph(DATA / "layer1_tp8_m1_opaque.json")
    assert loaded.fake_mode is not None
    *_, last = [n for n in loaded.module.graph.nodes if n.op == "call_function"]
    with loaded.fake_mode:
        last.meta["val"] = last.meta["val"].t()
    assert [n for n, v in propagate(loaded) if layout(v) != layout(n.meta["val"])] == [last]


# ---- known facts of Kimi K3


@pytest.mark.parametrize(("tp", "kda", "mla"), [(8, 6288, 3648), (16, 3216, 2880)])
def test_attention_projections(tp: int, kda: int, mla: int) -> None:
    for layer in LAYERS:
        name = f"layer{layer}_tp{tp}_m4_opaque.json"
        linear = "fused_qkv_a_g_proj" if layer in MLA else "in_proj_qkvgfab"
        rows = mla if layer in MLA else kda
        shape = inputs(name)[f"model.layers.{layer}.self_attn.{linear}.weight"]
        assert shape == (rows, 7168)
        read = [a for mm in calls(name, "aten.mm.default") for a in mm.args]
        sizes = [tuple(a.meta["val"].shape) for a in read if isinstance(a, fx.Node)]
        assert (7168, 2112 if layer in MLA else kda) in sizes


@pytest.mark.parametrize("tp", GROUPS)
def test_output_projection_router_and_experts(tp: int) -> None:
    name = f"layer1_tp{tp}_m8_opaque.json"
    shapes = inputs(name)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (7168, 12288 // tp)
    assert shapes["model.layers.1.mlp.gate.weight"] == (896, 7168)
    assert shapes["model.layers.1.mlp.routed_expert_down_proj.weight"] == (3584, 7168)
    (gate,) = calls(name, "aten.mm.dtype")
    assert gate.meta["val"].dtype == torch.float32
    (experts,) = calls(name, "vllm.moe_forward_shared.default")
    shared, routed = experts.meta["val"]
    assert (tuple(shared.shape), tuple(routed.shape)) == ((8, 7168), (8, 3584))
    layer_name = experts.args[4]
    assert isinstance(layer_name, fx.Node)
    assert layer_name.meta["opaque"] == "LayerName('model.layers.1.block_sparse_moe.experts')"


@pytest.mark.parametrize("tp", GROUPS)
@pytest.mark.parametrize(("layer", "count"), [(0, 2), (1, 3), (3, 3), (12, 3), (91, 3), (92, 3)])
def test_all_reduces_name_the_group_of_the_header(layer: int, count: int, tp: int) -> None:
    name = f"layer{layer}_tp{tp}_mdyn_opaque.json"
    reduces = calls(name, "vllm.all_reduce.default")
    assert [n.args[1] for n in reduces] == ["tp:0"] * count
    assert load(name).meta["groups"] == {"tp:0": tp}


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        # (blocks read, block written, has a delta, has an output norm)
        ("layer0_tp8_m4_opaque.json", [(0, 0, False, True), (1, -1, False, True)]),
        ("layer1_tp8_m4_opaque.json", [(1, -1, True, True), (1, -1, True, True)]),
        ("layer12_tp8_m4_opaque.json", [(1, 1, True, True), (2, -1, False, True)]),
        ("layer92_tp16_mdyn_opaque.json", [(8, -1, True, True), (8, -1, True, True)]),
        ("final_tp8_m64_plain.json", [(8, -1, True, False)]),
    ],
)
def test_attn_res_forms(name: str, forms: list[tuple[int, int, bool, bool]]) -> None:
    found = [
        (
            n.kwargs["num_blocks"],
            n.kwargs["block_write_idx"],
            n.kwargs["delta"] is not None,
            n.kwargs["output_norm_weight"] is not None,
        )
        for n in calls(name, "_C.kimi_k3_attn_res.default")
    ]
    assert found == forms


def test_attn_res_keeps_its_mutability() -> None:
    load("layer1_tp8_m1_opaque.json")
    schema = torch.ops._C.kimi_k3_attn_res.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["prefix", "blocks", "output"]


# ---- the token count


@pytest.mark.parametrize("name", [n for n in FILES if "_mdyn_" in n])
def test_a_symbolic_m_is_one_symbol(name: str) -> None:
    header = json.loads((DATA / name).read_text(encoding="utf-8"))
    # vLLM takes another tail above 256 tokens, so that this graph is of steps up to there.
    routed = not name.startswith(("layer0_", "final_"))
    assert header["symbols"] == {"s0": [2, 256 if routed else None]}
    sizes = [s for shape in inputs(name).values() for s in shape if isinstance(s, torch.SymInt)]
    assert {str(s) for s in sizes} == {"s0"}
    assert len(sizes) >= 2


@pytest.mark.parametrize("core", ["opaque", "plain"])
@pytest.mark.parametrize("tp", GROUPS)
def test_the_operations_are_the_same_at_every_m(tp: int, core: str) -> None:
    for layer in LAYERS:
        name = f"layer{layer}_tp{tp}_m{{}}_{core}.json"
        m1, *others = ([_targets(n) for n in _calls(name.format(m))] for m in ("1", "8", "64"))
        assert len(m1) > 40
        # At M = 1 vLLM's own slices are whole and vanish or appear as aliases.
        assert others[0] == others[1]
        assert [t for t in m1 if _is_work(t)] == [t for t in others[0] if _is_work(t)]


def _calls(name: str) -> list[fx.Node]:
    return [n for n in load(name).module.graph.nodes if n.op == "call_function"]


def _is_work(targets: list[str]) -> bool:
    return any(part in t for t in targets for part in ("mm", "_C", "vllm", "triton", "mul", "add"))


def test_one_token_row_shape() -> None:
    for m in ("1", "4", "8", "64"):
        assert inputs(f"layer3_tp16_m{m}_opaque.json")["prefix_sum"] == (int(m), 7168)


# ---- where nodes come from


def test_module_paths_name_the_layer() -> None:
    for name, layers in (("layer91_tp8_m1_opaque.json", {91}), ("stack5_tp8_m1_opaque.json", None)):
        paths = [module_path(n) for n in calls(name, "aten.mm.default")]
        found = {int(p.split(".")[2]) for p in paths}
        assert found == (layers or {0, 1, 2, 3, 4})


def test_opaque_cores_name_their_layer() -> None:
    name = "stack5_tp16_mdyn_opaque.json"

    def cores(op: str) -> list[Any]:
        return [n.kwargs["layer_name"] for n in calls(name, op)]

    kda = [f"model.layers.{i}.self_attn" for i in (0, 1, 2, 4)]
    assert cores("k3fuse_vllm.kda_core.default") == kda
    assert cores("k3fuse_vllm.mla_core.default") == ["model.layers.3.self_attn"]


def test_triton_kernels_keep_their_name() -> None:
    (node,) = calls("layer3_tp8_m4_opaque.json", "triton_kernel_wrapper_functional")
    module = "vllm.models.common.ops.fused_qk_rmsnorm"
    assert node.meta["triton_kernel"] == f"{module}.FusedQKVRMSNormKernel.kernel"


def test_loading_does_not_import_vllm() -> None:
    load("layer1_tp8_m1_plain.json")
    assert not [m for m in sys.modules if m.split(".")[0] == "vllm"]
    assert hasattr(torch.ops._C, "fused_kda_decode")  # the stand-in

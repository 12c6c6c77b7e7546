"""The real vLLM engine on the CPU: rewritten and stock give the same tokens, and it says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from model import LAYERS
from offline import PROMPTS, TOKENS

EAGER = {"enforce_eager": True}
REGION = {"region": ["DeepseekV2DecoderLayer"], "target": "reference", "inner": "aot_eager"}
PASS = {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}
MODE3: dict[str, Any] = {"mode": 3, "compile_sizes": [], "compile_ranges_endpoints": [64]}
# One output projection and one attention projection a layer. The experts' tail is Kimi K3's alone.
LAYER_SITES = {"attention_projection": LAYERS, "output_projection": LAYERS}
# With the embedding in the same graph and split over ranks, the first layer's row comes from a
# reduction, which is not read as a residual row.
TWO_RANK_SITES = {**LAYER_SITES, "attention_projection": LAYERS - 1}
GRAPHS = 4
CUDA_LIKE3 = "mode3,cuda_ops,fallback"


def asking(compilation: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Engine arguments that ask for k3fuse."""
    given = {"additional_config": {"k3fuse": {"target": "reference", **options}}}
    return {**given, **({"compilation_config": compilation} if compilation else {})}


def says(log: str) -> bool:
    """Whether k3fuse itself logged something; paths and the tests' own plugin name it, too."""
    return re.search(r"(?<![\w/])k3fuse(?![\w/])", log) is not None


# --- regional: independent of vLLM's own compile ---------------------------------------------


def test_regional_gives_the_same_tokens(engine: Any) -> None:
    off = engine("eager", EAGER)
    on = engine("regional", {**EAGER, **asking(**REGION)})
    assert on.tokens == off.tokens, on.log[-3000:]
    assert len({t for row in off.tokens for t in row}) > 10  # control: not one constant token
    assert on.sites == LAYER_SITES
    assert on.report["route"] == "regional"
    # A dense and a MoE layer; the MoE layers share one. Each twice: the copy into a slice asks
    # whether there is one token.
    assert on.report["graphs"] == GRAPHS
    assert f"{2 * LAYERS} sites in {GRAPHS} graphs" in on.log
    assert on.log.count("k3fuse: torch.compile, 1 layers") == GRAPHS  # none is left for a request
    assert says(on.log)
    assert "k3fuse.rewriter.backend" in on.modules


def test_installed_and_not_asked_for_leaves_no_trace(engine: Any) -> None:
    off = engine("eager", EAGER)
    without = engine("eager_without", EAGER, env={"VLLM_PLUGINS": "k3fuse_cuda_like"})
    assert off.tokens == without.tokens
    assert without.modules == []
    # The entry point and its package, and nothing of the rewriter.
    assert off.modules == ["k3fuse_vllm.graph_pass", "k3fuse_vllm.plugin"]
    assert not says(off.log)
    assert without.report is off.report is None


def test_experts_are_read_where_they_lie(engine: Any) -> None:
    """The engine's own parameters, by layer name; the report says what keeps kernels from them."""
    on = engine("regional", {**EAGER, **asking(**REGION)})
    assert len(on.experts) == LAYERS - 1
    for name, layer in on.experts.items():
        assert name.startswith("model.layers.")
        assert layer["in_place"]
        assert (layer["experts"], layer["top_k"], layer["activation"]) == (16, 4, "silu")
        assert (layer["latent"], layer["width"], layer["weights"]) == (256, 128, "bfloat16")
        # vLLM scales this model's sums by 2.5 behind the op, and no weights inside.
        assert (layer["routing"], layer["scale"]) == (["sigmoid", 4, 2], 1.0)
        assert (layer["bias"], layer["shared"]) == ([16], [[256, 256], [256, 128]])
        # The CPU's kernel keeps the weights in tiles of its own.
        assert layer["layout"] == "cpu_tiles"
        # This model's gate is the runner's: the op's logits are the row.
        assert layer["extras"] == ["a gate inside"]
    told = on.report["experts"]
    assert (told["layers"], told["kinds"][0]["layers"]) == (LAYERS - 1, LAYERS - 1)
    sentences = " ".join(r["sentence"] for r in told["reasons"])
    assert "but activation = silu" in sentences
    assert "but layout = cpu_tiles" in sentences


def test_experts_of_another_layout_stay_and_say_why(engine: Any) -> None:
    """Unquantised experts in the CPU's tiles: refused by every guard that they break."""
    on = engine("regional", {**EAGER, **asking(**REGION)})
    refused = [s for s in on.report["report"]["sites"] if s["pattern"] == "experts_partials"]
    assert {s["outcome"] for s in refused} == {"refused"}
    codes = {r["code"] for s in refused for r in s["reasons"]}
    assert codes == {"STRIDE_OR_ALIGN", "DTYPE_MISMATCH", "ATTR_MISMATCH", "OP_MISMATCH"}
    actual = {r["actual"] for s in refused for r in s["reasons"]}
    assert {
        "layout = cpu_tiles", "weights = not packed", "activation = silu", "expert_groups = 4",
        "features = a gate inside",
    } <= actual  # fmt: skip
    assert on.tokens == engine("eager", EAGER).tokens


def test_the_operator_runs_vllms_own_where_the_layer_is_another(engine: Any) -> None:
    """Two layers behind the operator in a graph that was made for neither: the same tokens."""
    on = engine("stale", {**EAGER, **asking(**REGION)}, adapt="cuda_ops,fallback,stale")
    assert on.tokens == engine("eager", EAGER).tokens, on.log[-3000:]
    assert on.sites == {**LAYER_SITES, "experts_partials": LAYERS - 1}
    for n in range(1, LAYERS):
        line = f"vLLM's experts run: model.layers.{n}.mlp.experts is not the layer that its graph"
        assert on.log.count(line) == 1
    assert "vLLM's experts run" not in engine("regional", {**EAGER, **asking(**REGION)}).log


def test_a_quantised_linear_is_refused_by_name(parts: Any) -> None:
    code, sentence = parts["linears"]["fp8"]
    assert code == "DTYPE_MISMATCH"
    assert sentence == "linear self_attn.in_proj is quantised (Fp8LinearMethod)"
    assert parts["linears"]["bf16"] == []  # control


def test_the_pass_and_the_plugin_as_objects(parts: Any) -> None:
    """What vLLM does with them: send by name, copy, key caches, ask by range, load twice."""
    wanted = {"pickled": True, "copied": True, "keyed": True, "small": True, "large": False}
    assert parts["pass"] == wanted
    assert parts["plugin"] == {"once": True, "wrapped": True, "late": True}


def test_single_layers_are_left_out(engine: Any) -> None:
    """Two MoE layers share a graph; the one that is left out runs vLLM's own code all the same."""
    on = engine("regional_layers", {**EAGER, **asking(**REGION, only_layers=[0, 2])})
    assert on.tokens == engine("eager", EAGER).tokens
    assert on.sites == dict.fromkeys(LAYER_SITES, 2)
    assert on.report["modules"] == 2
    assert {s["layer"] for s in on.report["report"]["sites"]} == {0, 2}


def test_regional_on_two_ranks(engine: Any) -> None:
    two = {**EAGER, "tensor_parallel_size": 2}
    off = engine("eager_tp2", two)
    on = engine("regional_tp2", {**two, **asking(**REGION)})
    assert on.tokens == off.tokens, on.log[-3000:]
    assert on.sites == LAYER_SITES
    assert on.log.count(f"sites in {GRAPHS} graphs") == 1  # once a rank set


def test_two_ranks_that_disagree_fall_back(engine: Any) -> None:
    two = {**EAGER, "tensor_parallel_size": 2}
    on = engine("disagree", {**two, **asking(**REGION)}, adapt="cuda_ops,fallback,disagree")
    assert on.tokens == engine("eager_tp2", two).tokens
    assert on.sites == {}
    assert "RANK_DISAGREES  ranks [1] chose other sites than rank 0" in on.log
    assert on.log.count("ERROR:k3fuse") == 1  # one error, however many graphs and ranks
    assert engine("regional_tp2", {**two, **asking(**REGION)}).sites  # control


# --- mode 3: a pass in vLLM's own compile ----------------------------------------------------


def mode3(**options: Any) -> dict[str, Any]:
    """Engine arguments of mode 3 with the pass."""
    return asking({**MODE3, "inductor_passes": PASS}, **options)


def test_mode3_gives_the_same_tokens(engine: Any) -> None:
    off = engine("mode3_off", {"compilation_config": MODE3}, adapt=CUDA_LIKE3)
    on = engine("mode3", mode3(), adapt=CUDA_LIKE3)
    assert on.tokens == off.tokens, on.log[-3000:]
    # vLLM cuts the graph at attention: entry and output projection of a layer are in two pieces.
    assert on.sites == LAYER_SITES
    assert on.report["route"] == "pass"
    assert not on.report["from_cache"]
    assert not says(off.log)
    assert says(on.log)


def test_mode3_from_warm_caches_says_the_same(engine: Any) -> None:
    cold = engine("mode3", mode3(), adapt=CUDA_LIKE3)
    warm = engine("mode3_warm", mode3(), adapt=CUDA_LIKE3, caches="mode3")
    assert warm.report["from_cache"]
    assert warm.sites == cold.sites
    assert warm.tokens == cold.tokens
    assert "(from a warm cache)" in warm.log


def test_mode3_with_another_option_misses_the_caches(engine: Any) -> None:
    cold = engine("mode3", mode3(), adapt=CUDA_LIKE3)
    other = engine(
        "mode3_other", mode3(disable=["output_projection"]), adapt=CUDA_LIKE3, caches="mode3"
    )
    assert not other.report["from_cache"]
    assert "output_projection" not in other.sites
    assert cold.sites["output_projection"] == LAYERS
    assert other.tokens == cold.tokens


def test_mode3_on_two_ranks(engine: Any) -> None:
    two = {"tensor_parallel_size": 2}
    off = engine("mode3_off_tp2", {**two, "compilation_config": MODE3}, adapt=CUDA_LIKE3)
    on = engine("mode3_tp2", {**two, **mode3()}, adapt=CUDA_LIKE3)
    assert on.tokens == off.tokens, on.log[-3000:]
    assert on.sites == TWO_RANK_SITES


@pytest.mark.nightly
def test_mode3_in_spawned_processes(engine: Any) -> None:
    """The pass and its options reach engine core and workers through their configuration alone."""
    two = {"tensor_parallel_size": 2}
    off = engine("mode3_off_tp2", {**two, "compilation_config": MODE3}, adapt=CUDA_LIKE3)
    on = engine("mode3_tp2_spawn", {**two, **mode3()}, adapt=CUDA_LIKE3, spawn=True)
    assert on.tokens == off.tokens, on.log[-3000:]
    assert on.sites == TWO_RANK_SITES


# --- modes 1 and 2: a backend by name --------------------------------------------------------


def test_mode2_by_registered_name(engine: Any) -> None:
    off = engine("mode2_off", asking({"mode": 2, "backend": "k3fuse"}, dry_run=True))
    on = engine("mode2", asking({"mode": 2, "backend": "k3fuse"}))
    # Same compile without the edit: another one orders or rounds other steps differently.
    assert on.tokens == off.tokens, on.log[-3000:]
    assert on.sites == LAYER_SITES
    assert on.report["route"] == "backend"
    assert "checked: off, options: dry_run=True" in off.log  # control: nothing was edited


def test_mode2_on_two_ranks(engine: Any) -> None:
    two = {"tensor_parallel_size": 2}
    off = engine("mode2_off_tp2", {**two, **asking({"mode": 2, "backend": "k3fuse"}, dry_run=True)})
    on = engine("mode2_tp2", {**two, **asking({"mode": 2, "backend": "k3fuse"})})
    assert on.tokens == off.tokens, on.log[-3000:]
    assert on.sites == TWO_RANK_SITES


def test_mode1_by_qualified_name(engine: Any) -> None:
    """vLLM's CPU runner never compiles in mode 1; with the GPU runner's step it does."""
    named = asking({"mode": 1, "backend": "k3fuse.rewriter.backend.k3fuse"})
    on = engine("mode1", named, adapt="cuda_ops,fallback,mode1")
    # The profiling step's graph is too large for a decode step; one token has a graph of its own.
    assert on.sites == {name: 2 * n for name, n in LAYER_SITES.items()}
    assert on.log.count("k3fuse: torch.compile") == 3  # none is left for a request
    missed = engine("mode1_stock", named)
    assert missed.tokens is not None
    assert "COMPILE_NOT_REACHED" in missed.log
    strict = engine("mode1_strict", asking(named["compilation_config"], strict=True))
    assert strict.tokens is None  # never reached: the start fails
    assert "StrictError: k3fuse: COMPILE_NOT_REACHED" in strict.log
    assert "COMPILE_NOT_REACHED" not in on.log


# --- loud ------------------------------------------------------------------------------------


def test_enforce_eager_says_that_the_pass_was_not_reached(engine: Any) -> None:
    asked = {**EAGER, **asking({"inductor_passes": PASS})}
    on = engine("eager_pass", asked)
    assert on.tokens == engine("eager", EAGER).tokens
    assert "not used: COMPILE_NOT_REACHED" in on.log
    assert "because enforce_eager is set" in on.log
    strict = engine(
        "eager_pass_strict", {**EAGER, **asking({"inductor_passes": PASS}, strict=True)}
    )
    assert strict.tokens is None
    assert "StrictError: COMPILE_NOT_REACHED" in strict.log


@pytest.mark.parametrize(
    ("name", "arguments", "adapt", "text"),
    [
        ("unknown_option", asking(tarjet=1), "", "option 'tarjet' does not exist"),
        (
            "conflict",
            asking({"mode": 2, "backend": "k3fuse"}, strict=True, route="regional"),
            "",
            "two routes at once",
        ),
    ],
)
def test_what_cannot_start(
    engine: Any, name: str, arguments: dict[str, Any], adapt: str, text: str
) -> None:
    failed = engine(name, arguments, adapt=adapt)
    assert failed.code != 0
    assert failed.tokens is None
    assert text in failed.log


def test_an_unknown_vllm_runs_stock(engine: Any) -> None:
    on = engine("unknown", {**EAGER, **asking(**REGION)}, adapt="cuda_ops,fallback,unknown")
    assert on.tokens == engine("eager", EAGER).tokens
    assert on.sites == {}
    assert "vLLM 0.99.0 is not known to k3fuse" in on.log


# --- server ----------------------------------------------------------------------------------


def test_http_server(engine: Any, server: Callable[..., tuple[list[int], str]]) -> None:
    flags = ["--enforce-eager", "--additional-config", json.dumps({"k3fuse": REGION})]
    tokens, log = server(flags, PROMPTS[0], TOKENS, "cuda_ops,fallback")
    assert f"{2 * LAYERS} sites in {GRAPHS} graphs" in log
    # Threads of a worker process sum in another order than those of one process.
    assert tokens == engine("eager_spawned", EAGER).tokens[0]

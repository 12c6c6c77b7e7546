"""What stands for vLLM's experts: a layer is read from its registry, ours run, or vLLM's own."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import k3fuse.kernels.experts_partials.op  # noqa: F401
from k3fuse.rewriter.reasons import Refusal
from k3fuse_vllm import experts as registry
from k3fuse_vllm import experts_op
from k3fuse_vllm.experts import ExpertLayer

NAME, M, L, H, E, WIDTH, TOP_K = "model.layers.1.experts", 3, 64, 40, 5, 32, 2
BF16 = torch.bfloat16


class GroupedTopKRouter:
    bias_vl = None


class SituAndMul:
    beta, linear_beta = 4.0, 25.0


class Mxfp4MoEMethod:
    moe_kernel = None
    mxfp4_backend = SimpleNamespace(name="B12X_MXFP4_MXFP8")


def weight(*shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 8).to(BF16)


def codes(low: int, high: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(low)
    return torch.randint(low, high, shape, generator=made).to(torch.uint8)


def runner(**changes: Any) -> Any:
    """One of vLLM's MoE runners with the fields that are read, as a namespace; `changes` of it."""
    linear = {name: SimpleNamespace(weight=weight(*shape), bias=None) for name, shape in {
        "gate_up_proj": (2 * 24, H), "down_proj": (H, 24)}.items()}  # fmt: skip
    shared = SimpleNamespace(act_fn=SituAndMul(), **linear)
    held = SimpleNamespace(
        w13_weight=codes(0, 256, E, 2 * WIDTH, L // 2), w2_weight=codes(1, 256, E, L, WIDTH // 2),
        w13_weight_scale=codes(122, 125, E, 2 * WIDTH, L // 32),
        w2_weight_scale=codes(123, 125, E, L, WIDTH // 32), top_k=TOP_K, scoring_func="sigmoid",
        renormalize=True, routed_scaling_factor=1.0, num_expert_group=1, topk_group=1,
        use_grouped_topk=True, e_score_correction_bias=torch.linspace(0, 0.1, E),
        custom_routing_function=None, activation=SimpleNamespace(value="situ"),
        global_num_experts=E, local_num_experts=E, quant_method=Mxfp4MoEMethod(), expert_map=None,
        swiglu_limit=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    parallel = SimpleNamespace(use_ep=False, dp_size=1, enable_eplb=False)
    config = SimpleNamespace(
        activation_situ_beta=4.0, activation_situ_linear_beta=25.0, hidden_dim=L,
        hidden_dim_unpadded=L, intermediate_size_per_partition=WIDTH,
        intermediate_size_per_partition_unpadded=WIDTH, tp_size=1, in_dtype=BF16,
        moe_parallel_config=parallel, is_sequence_parallel=False, is_lora_enabled=False,
        has_bias=False,
    )  # fmt: skip
    made = SimpleNamespace(
        routed_experts=held, moe_config=config, router=GroupedTopKRouter(),
        _shared_experts=SimpleNamespace(_layer=shared),
    )  # fmt: skip
    for place, value in changes.items():
        owner, _, name = place.rpartition("__")
        setattr(getattr(made, owner) if owner else made, name, value)
    return made


def engine(table: dict[str, Any]) -> Any:
    """A VllmConfig with these layers in its registry."""
    compilation = SimpleNamespace(static_forward_context=table, static_all_moe_layers=list(table))
    return SimpleNamespace(compilation_config=compilation)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry of a running step, which vLLM's forward context hands out."""
    table: dict[str, Any] = {NAME: runner()}
    context: Any = ModuleType("vllm.forward_context")
    context.is_forward_context_available = lambda: True
    context.get_forward_context = lambda: SimpleNamespace(no_compile_layers=table)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    experts_op._say_once.cache_clear()
    return table


def given(m: int = M) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(7)
    rows = [torch.randn(m, n, generator=drawn) for n in (L, E, H)]
    return rows[0].to(BF16), rows[1], rows[2].to(BF16)


def ours(facts: str, m: int = M, target: str = "reference", ids: Tensor | None = None) -> Any:
    hidden, logits, row = given(m)
    return experts_op.ours(hidden, logits, row, ids, NAME, facts, target)


def test_a_layer_is_read_as_it_is_loaded(step: dict[str, Any]) -> None:
    layer = registry.lookup(NAME)
    assert layer == registry.find(NAME)
    assert (layer.experts, layer.local, layer.latent) == (E, E, L)
    assert (layer.width, layer.width_used, layer.tp) == (WIDTH, WIDTH, 1)
    assert (layer.routing.top_k, layer.routing.router) == (TOP_K, "GroupedTopKRouter")
    assert (layer.activation, layer.beta, layer.linear_beta) == ("situ", 4.0, 25.0)
    assert layer.layout.name == "rows"
    assert layer.extras == ()
    assert layer.shared is not None
    assert layer.shared.activation == "situ"
    assert set(layer.tensors()) == {
        "w13", "w13_scale", "w2", "w2_scale", "correction bias", "shared gate and up 0",
        "shared down",
    }  # fmt: skip
    described = layer.describe()
    assert (described["weights"], described["rows"]) == ("MXFP4", layer.layout.rows)
    plain = replace(layer, w13_scale=None, w2_scale=None, w13=weight(2, 2))
    assert plain.describe()["weights"] == "bfloat16"
    assert replace(plain, w13=None).describe()["weights"] == ""


def test_ours_are_the_partials_of_the_layer(step: dict[str, Any]) -> None:
    layer = registry.lookup(NAME)
    made = ours(layer.facts())
    assert made is not None
    hidden, logits, row = given()
    wanted = torch.ops.k3fuse.experts_partials(
        *experts_op.call_arguments(layer, hidden, logits, row), target="reference", composition=""
    )
    assert [tuple(t.shape) for t in made] == [(M, H), (M, L)]
    for got, want in zip(made, wanted, strict=True):
        assert torch.equal(got, want)
    # The control: another layer's weights give other rows.
    step[NAME].routed_experts.w13_weight = codes(9, 256, E, 2 * WIDTH, L // 2)
    again = ours(layer.facts())
    assert not torch.equal(again[1], made[1])
    assert torch.equal(again[0], made[0])


def test_weights_typed_as_fp8_are_taken_as_bytes(step: dict[str, Any]) -> None:
    held = step[NAME].routed_experts
    plain = ours(registry.lookup(NAME).facts())
    for name in ("w13_weight_scale", "w2_weight_scale"):
        setattr(held, name, getattr(held, name).view(torch.float8_e4m3fn))
    typed = ours(registry.lookup(NAME).facts())
    assert all(torch.equal(a, b) for a, b in zip(plain, typed, strict=True))


def test_without_a_row_of_the_shared_expert_the_latent_row_is_its_row(step: dict[str, Any]) -> None:
    hidden, logits, _ = given()
    module = step[NAME]._shared_experts._layer
    module.gate_up_proj.weight, module.down_proj.weight = weight(48, L), weight(L, 24)
    facts = registry.lookup(NAME).facts()
    made = experts_op.ours(hidden, logits, None, None, NAME, facts, "reference")
    both = experts_op.ours(hidden, logits, hidden, None, NAME, facts, "reference")
    assert made is not None
    assert both is not None
    assert tuple(made[0].shape) == (M, L)
    assert all(torch.equal(a, b) for a, b in zip(made, both, strict=True))


def test_what_vllms_operator_has_to_do(
    step: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    facts = registry.lookup(NAME).facts()
    assert ours(facts) is not None  # the control
    with caplog.at_level(logging.WARNING, "k3fuse"):
        assert ours(facts, m=65, target="gb300:tp8") is None
        assert ours(facts, ids=torch.zeros(M)) is None
        assert ours(facts, target="gb300:tp8") is None  # its tensors are on no GPU
        assert caplog.records == []
        step[NAME].moe_config.activation_situ_beta = 3.0
        assert ours(facts) is None
        assert ours(facts) is None
        del step[NAME]
        assert ours(facts) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said  # each once
    assert "is not the layer that its graph was made for" in said[0]
    assert f"has no MoE layer '{NAME}'" in said[1]


def test_the_fake_has_the_shapes_of_vllms_operator() -> None:
    hidden, logits, row = given()
    shared, routed = experts_op._fake(hidden, logits, row, None, NAME, 0, "", "reference")
    assert [tuple(t.shape) for t in (shared, routed)] == [(M, H), (M, L)]
    shared, routed = experts_op._fake(hidden, logits, None, None, NAME, 48, "", "reference")
    assert [tuple(t.shape) for t in (shared, routed)] == [(M, L), (M, 48)]


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        ({"moe_config__is_lora_enabled": True}, "LoRA"),
        ({"moe_config__hidden_dim_unpadded": L - 32}, "a padded latent"),
        ({"routed_experts__expert_map": torch.zeros(E)}, "an expert map"),
        ({"gate": object()}, "a gate inside"),
        ({"router": SimpleNamespace(capture_fn=print)}, "captured ids"),
    ],
)
def test_what_no_kernel_computes_is_named(change: dict[str, Any], extra: str) -> None:
    assert registry.read(NAME, runner(**change)).extras == (extra,)
    assert registry.read(NAME, runner()).extras == ()


@pytest.mark.parametrize(("is_reduced", "extra"), [(True, True), (False, False), (None, True)])
def test_a_kernel_that_reduces_or_does_not_say_is_named(
    is_reduced: bool | None, extra: bool
) -> None:
    def said() -> bool:
        if is_reduced is None:
            raise NotImplementedError
        return is_reduced

    method = Mxfp4MoEMethod()
    method.moe_kernel = SimpleNamespace(output_is_reduced=said)  # type: ignore[assignment]
    found = registry.read(NAME, runner(routed_experts__quant_method=method)).extras
    assert ("a reduced result" in found) == extra


def test_a_layer_without_a_shared_expert_has_none() -> None:
    layer = registry.read(NAME, runner(_shared_experts=None))
    assert (layer.shared, layer.extras) == (None, ())


def test_a_layer_of_another_form_is_refused() -> None:
    with pytest.raises(Refusal, match="this vLLM's MoE layer has another form"):
        registry.read(NAME, runner(moe_config=SimpleNamespace()))


def test_an_engine_is_surveyed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENGINE", [])
    with pytest.raises(Refusal, match="no engine runs here"):
        registry.find(NAME)
    assert registry.digest() == ""
    config = engine({NAME: runner(), "other": runner(moe_config__activation_situ_beta=3.0)})
    registry.use_engine(config)
    assert registry.find(NAME).name == NAME
    both = registry.digest()
    assert len(both) == 16
    found = registry.report(config, reference=True)
    assert found["layers"] == 2
    assert [kind["layers"] for kind in found["kinds"]] == [2]
    assert [reason["code"] for reason in found["reasons"]] == ["ATTR_MISMATCH"]
    registry.use_engine(engine({NAME: runner()}))
    assert registry.digest() not in ("", both)
    wrong = engine({NAME: object()})
    registry.use_engine(wrong)
    assert registry.digest() == "ENGINE_UNSUPPORTED"
    unread = registry.report(wrong)
    assert (unread["layers"], unread["kinds"]) == (0, [])
    assert [reason["actual"] for reason in unread["reasons"]] == ["object"]


def test_a_layer_without_memory_is_not_loaded(step: dict[str, Any]) -> None:
    assert isinstance(registry.find(NAME), ExpertLayer)  # the control
    step[NAME].routed_experts.w2_weight = torch.empty(2, device="meta")
    with pytest.raises(Refusal, match="the layer's tensors have no memory"):
        registry.find(NAME)

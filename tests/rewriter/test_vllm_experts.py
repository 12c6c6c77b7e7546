"""What keeps one of vLLM's MoE layers from a kernel: each guard with a control that passes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3fuse.rewriter.reasons import Refusal
from k3fuse_vllm import experts
from k3fuse_vllm.expert_layout import of_method
from k3fuse_vllm.experts import ExpertLayer, Routing, Wanted, objections

E, L, W = 8, 64, 32
WANTED = Wanted(experts=E, top_k=2, latent=L, width=W)
ROUTING = Routing(2, "sigmoid", True, 1.0, 1, 1, torch.zeros(E))


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def method(name: str, field: str = "mxfp4_backend") -> Any:
    return SimpleNamespace(**{field: SimpleNamespace(name=name)})


LAYER = ExpertLayer(
    name="model.layers.1.experts",
    w13=bytes_of(E, 2 * W, L // 2),
    w2=bytes_of(E, L, W // 2),
    w13_scale=bytes_of(E, 2 * W, L // 32),
    w2_scale=bytes_of(E, L, W // 32),
    routing=ROUTING,
    activation="situ",
    beta=4.0,
    linear_beta=25.0,
    experts=E,
    local=E,
    latent=L,
    width=W,
    width_used=W,
    tp=1,
    dtype=torch.bfloat16,
    layout=of_method(method("B12X_MXFP4_MXFP8")),
    shared_gate_up=(torch.zeros(2 * W, L, dtype=torch.bfloat16),),
    shared_down=torch.zeros(L, W, dtype=torch.bfloat16),
)


def codes(layer: ExpertLayer, wanted: Wanted = WANTED) -> list[str]:
    return [r.code.value for r in objections(layer, wanted)]


def test_a_layer_as_published_is_covered() -> None:
    assert codes(LAYER) == []
    assert LAYER.packed


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"activation": "silu"}, "ATTR_MISMATCH", "activation is silu"),
        ({"beta": 1.0}, "ATTR_MISMATCH", "beta is 1.0"),
        ({"linear_beta": None}, "ATTR_MISMATCH", "linear beta is None"),
        (
            {
                "width": 2 * W,
                "w13": bytes_of(E, 4 * W, L // 2),
                "w2": bytes_of(E, L, W),
                "w13_scale": bytes_of(E, 4 * W, L // 32),
                "w2_scale": bytes_of(E, L, 2 * W // 32),
            },
            "SHAPE_MISMATCH",
            "stored width of one expert is 64",
        ),
        (
            {"dtype": torch.float16, "shared_gate_up": (), "shared_down": None},
            "DTYPE_MISMATCH",
            "dtype of the rows is float16",
        ),
        ({"extras": ("LoRA",)}, "OP_MISMATCH", "features is LoRA"),
        ({"routing": replace(ROUTING, top_k=4)}, "SHAPE_MISMATCH", "experts a token is 4"),
        ({"routing": replace(ROUTING, scoring="softmax")}, "ATTR_MISMATCH", "scoring is softmax"),
        ({"routing": replace(ROUTING, renormalise=False)}, "ATTR_MISMATCH", "renormalised"),
        ({"routing": replace(ROUTING, scale=2.5)}, "ATTR_MISMATCH", "scale of the weights is 2.5"),
        ({"routing": replace(ROUTING, groups=4)}, "ATTR_MISMATCH", "expert groups is 4"),
        ({"routing": replace(ROUTING, custom="own")}, "ATTR_MISMATCH", "routing is own"),
        (
            {"routing": replace(ROUTING, bias=torch.zeros(E, dtype=torch.bfloat16))},
            "DTYPE_MISMATCH",
            "dtype of correction bias is bfloat16",
        ),
        (
            {"layout": of_method(method("FLASHINFER_TRTLLM_MXFP4_MXFP8"))},
            "STRIDE_OR_ALIGN",
            "permuted within 128 rows",
        ),
        ({"w13": bytes_of(E, 2 * W, L)}, "SHAPE_MISMATCH", "shape of w13"),
        ({"w2": bytes_of(E, W // 2, L).mT}, "STRIDE_OR_ALIGN", "strides of w2"),
        ({"w13_scale": None}, "DTYPE_MISMATCH", "w13_scale is no tensor"),
        ({"w2_scale": torch.zeros(E, L, 1)}, "DTYPE_MISMATCH", "dtype of w2_scale is float32"),
        (
            {"w2": bytes_of(E * L * (W // 2) + 1)[1:].view(E, L, W // 2)},
            "STRIDE_OR_ALIGN",
            "address of w2",
        ),
        (
            {"shared_down": torch.zeros(L, W, dtype=torch.float8_e4m3fn)},
            "DTYPE_MISMATCH",
            "dtype of the shared expert is float8_e4m3fn",
        ),
    ],
)
def test_each_guard(change: dict[str, Any], code: str, text: str) -> None:
    found = objections(replace(LAYER, **change), WANTED)
    assert [r.code.value for r in found] == [code]
    assert text in found[0].sentence
    assert found[0].expected != found[0].actual
    assert found[0].sentence.startswith("model.layers.1.experts: ")


def test_another_width_is_refused() -> None:
    assert codes(LAYER, replace(WANTED, width=2 * W)) == ["SHAPE_MISMATCH"]
    assert codes(replace(LAYER, tp=2), replace(WANTED, width=2 * W)) == []


def test_counts_of_experts() -> None:
    assert codes(replace(LAYER, local=E // 2, extras=("expert parallelism",)))[:2] == [
        "SHAPE_MISMATCH",
        "OP_MISMATCH",
    ]
    assert "SHAPE_MISMATCH" in codes(LAYER, replace(WANTED, experts=2 * E))


def test_bf16_experts_are_covered_where_wanted() -> None:
    plain = replace(
        LAYER,
        w13=torch.zeros(E, 2 * W, L, dtype=torch.bfloat16),
        w2=torch.zeros(E, L, W, dtype=torch.bfloat16),
        w13_scale=None,
        w2_scale=None,
        layout=of_method(method("TRITON", "unquantized_backend")),
    )
    assert codes(plain, replace(WANTED, packed=False)) == []
    assert set(codes(plain)) == {"DTYPE_MISMATCH", "SHAPE_MISMATCH"}
    assert codes(LAYER, replace(WANTED, packed=False)) != []


@pytest.mark.parametrize(
    ("name", "field", "layout"),
    [
        ("EMULATION", "mxfp4_backend", "rows"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", "mxfp4_backend", "up_first"),
        ("MARLIN", "mxfp4_backend", "marlin"),
        ("TRITON", "mxfp4_backend", "freed"),
        ("TRITON", "unquantized_backend", "rows"),
        ("CPU", "unquantized_backend", "cpu_tiles"),
        ("SOMETHING_NEW", "mxfp4_backend", "unknown"),
        ("FP8", "fp8_backend", "unknown"),
    ],
)
def test_layout_by_backend(name: str, field: str, layout: str) -> None:
    found = of_method(method(name, field))
    assert found.name == layout
    assert name in found.backend or layout == "unknown"


def test_a_registry_without_the_layer_is_refused() -> None:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a": object()}, static_all_moe_layers=["a"]
        )
    )
    with pytest.raises(Refusal, match="no MoE layer 'a'"):
        experts.survey(config)
    assert experts.report(config)["reasons"][0]["code"] == "ENGINE_UNSUPPORTED"
    config.compilation_config.static_all_moe_layers = []
    assert experts.report(config) == {"layers": 0, "kinds": [], "reasons": []}


def test_a_layer_of_another_form_is_refused() -> None:
    with pytest.raises(Refusal, match="another form"):
        experts.read("a", SimpleNamespace(routed_experts=object(), moe_config=object()))

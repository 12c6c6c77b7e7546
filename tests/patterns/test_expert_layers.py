"""What keeps one of vLLM's MoE layers from a kernel: each guard with a control that passes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert_layer import k3_layer
from k3fuse.patterns.experts_partials import objections
from k3fuse.rewriter.reasons import Refusal
from k3fuse_vllm import experts
from k3fuse_vllm.expert_layout import of_method

LAYER = k3_layer()


def method(name: str, field: str = "mxfp4_backend") -> Any:
    return SimpleNamespace(**{field: SimpleNamespace(name=name)})


def routed(**changes: Any) -> dict[str, Any]:
    return {"routing": replace(LAYER.routing, **changes)}


def shared(**changes: Any) -> dict[str, Any]:
    assert LAYER.shared is not None
    return {"shared": replace(LAYER.shared, **changes)}


@pytest.mark.parametrize("tp", [8, 16])
def test_a_layer_as_published_is_covered(tp: int) -> None:
    assert objections(k3_layer(tp=tp)) == []
    assert LAYER.packed


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"activation": "silu"} | shared(activation="silu"), "ATTR_MISMATCH", "activation = silu"),
        ({"beta": 1.0} | shared(beta=1.0), "ATTR_MISMATCH", "betas = 1, 25"),
        (shared(beta=1.0), "ATTR_MISMATCH", "shared_activation = other"),
        ({"extras": ("LoRA",)}, "OP_MISMATCH", "features = LoRA"),
        (routed(top_k=4), "SHAPE_MISMATCH", "top_k = 4"),
        (routed(scoring="softmax"), "ATTR_MISMATCH", "scoring = softmax"),
        (routed(renormalise=False), "ATTR_MISMATCH", "renormalised = no"),
        (routed(scale=2.5), "ATTR_MISMATCH", "scale = 2.5"),
        (routed(groups=4), "ATTR_MISMATCH", "expert_groups = 4"),
        (routed(custom="own"), "ATTR_MISMATCH", "routing = own"),
        (routed(router="CustomRouter"), "ATTR_MISMATCH", "routing = CustomRouter"),
        (
            routed(bias=torch.empty(896, dtype=torch.bfloat16, device="meta")),
            "DTYPE_MISMATCH",
            "bias_dtype = bfloat16",
        ),
        (
            {"layout": replace(LAYER.layout, name="up_first")},
            "STRIDE_OR_ALIGN",
            "layout = up_first",
        ),
        ({"layout": replace(LAYER.layout, activations="")}, "DTYPE_MISMATCH", "not known"),
        ({"w13_scale": None}, "STRIDE_OR_ALIGN", "w13_scale is not there"),
        ({"local": 448}, "SHAPE_MISMATCH", "E_rank = 448"),
        (
            shared(down=torch.empty(7168, 768, dtype=torch.float8_e4m3fn, device="meta")),
            "DTYPE_MISMATCH",
            "shared_dtype = mixed",
        ),
    ],
)
def test_each_guard(change: dict[str, Any], code: str, text: str) -> None:
    found = objections(replace(LAYER, **change))
    assert code in [r.code.value for r in found]
    assert any(text in r.sentence or text in f"{r.actual}" for r in found), found
    assert all(r.expected != r.actual for r in found)
    assert objections(LAYER) == []  # the control


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

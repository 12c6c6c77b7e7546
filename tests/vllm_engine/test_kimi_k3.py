"""vLLM 0.33's own Kimi K3 through the regional route; needs its wheel unpacked in $K3FUSE_VLLM."""

from __future__ import annotations

import os
from typing import Any

import pytest

from k3fuse.patterns.models.config import KimiK3Config

FOLDER = os.environ.get("K3FUSE_VLLM", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="K3FUSE_VLLM names no unpacked vLLM 0.33")


SINGLE, MODEL, WHOLE = "0,1,3,12,92:layers", "5:layers", "5:model"
SITES = {
    "attention_projection": 5,
    "output_projection": 5,
    "router": 4,
    "experts": 4,
    "attn_res": 6,
}


@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize(
    ("job", "graphs"),
    [
        # Five forms and the last AttnRes, whatever the token count.
        (SINGLE, [6, 6, 6, 6]),
        # Dense KDA, KDA, MLA (the two other KDA layers share a graph), and the last AttnRes.
        (MODEL, [4, 4, 4, 4]),
        # The whole text model in one graph.
        (WHOLE, [1, 1, 1, 1]),
    ],
)
def test_every_site_of_every_form(script: Any, job: str, graphs: list[int], tp: int) -> None:
    found = script("k3_layers.py", str(tp), SINGLE, MODEL, WHOLE)[job]
    assert found["refused"] == found["refused_sites"] == []
    # The weights behind vLLM's op are not loaded here.
    assert found["near"] == [["experts_partials", "ENGINE_UNSUPPORTED"]]
    assert found["route"] == "regional"
    assert found["totals"] == SITES
    assert found["graphs"] == graphs  # after steps of 5, 1, 8 and 64 tokens


@pytest.mark.nightly
def test_all_93_layers(script: Any) -> None:
    """24 forms and the last AttnRes, whatever the token count."""
    found = script("k3_layers.py", "8", "93:layers")["93:layers"]
    assert found["refused"] == found["refused_sites"] == []
    assert found["near"] == [["experts_partials", "ENGINE_UNSUPPORTED"]]
    assert found["totals"] == KimiK3Config().expected_sites(93)
    assert found["graphs"] == [25, 25, 25, 25]


@pytest.mark.parametrize(("tp", "stored"), [(8, 384), (16, 256)])
def test_experts_are_read_where_they_lie(script: Any, tp: int, stored: int) -> None:
    """vLLM's own parameters, found by layer name, judged by what a kernel covers."""
    found = script("k3_experts.py", str(tp), "marlin", "")
    for layer in found.values():
        assert layer["same"]
        assert layer["experts"] == 896
        assert layer["top_k"] == 16
        assert layer["betas"] == [4.0, 25.0]
        assert layer["shared betas"] == ["situ", 4.0, 25.0]
        assert layer["routing"] == ["sigmoid", True, 1.0, 1]
        assert layer["router"] == "GroupedTopKRouter"
        assert layer["extras"] == []
        assert "have no memory" in layer["not loaded"]
        assert layer["shapes"]["bias"] == [896, "torch.float32"]
        assert layer["shapes"]["shared"] == [[2 * 6144 // tp, 7168], [7168, 6144 // tp]]
        assert layer["widths"] == [stored, 3072 // tp]
        assert "no MoE layer 'model.layers.0.mlp'" in layer["missing"]
    packed, plain = found["marlin"], found[""]
    assert (packed["layout"], plain["layout"]) == ("marlin", "rows")
    assert packed["shapes"]["w13"] == [896, 2 * stored, 1792]
    assert packed["shapes"]["w2_scale"] == [896, 3584, stored // 32]
    # vLLM pads the 192 columns of TP16 to 256. Its TRTLLM order has the padding at the end of the
    # rows; in the checkpoint's order it lies between gate and up, where the kernel reads none.
    padded = ["STRIDE_OR_ALIGN"] * (tp == 16)
    assert codes(packed, "by_trtllm") == []
    assert codes(packed, "by_rows") == padded
    assert codes(packed) == ["STRIDE_OR_ALIGN", "DTYPE_MISMATCH", *padded]
    assert codes(plain) == ["DTYPE_MISMATCH", "DTYPE_MISMATCH", "STRIDE_OR_ALIGN"]
    assert packed["report"]["kinds"][0]["layers"] == packed["report"]["layers"] == 1


def codes(layer: dict[str, Any], kind: str = "objections") -> list[str]:
    """Reason codes of a layer's objections."""
    return [text.split()[0] for text in layer[kind]]


def test_what_vllm_makes_of_the_engine_arguments(script: Any) -> None:
    """vLLM's own configuration code decides the mode; each way to ask ends somewhere."""
    found = script("k3_configs.py")
    modes = {name: (c["mode"], c["full_graphs"], c["route"]) for name, c in found.items()}
    reasons = {name: " ".join(c["reasons"]) for name, c in found.items()}
    # Breakable CUDA graphs, vLLM's default for Kimi K3, force mode 0 whatever was given.
    assert modes["asked"] == modes["backend and asked"] == (0, True, "regional")
    assert modes["not asked"] == (0, True, "not asked")
    assert modes["eager"] == (0, False, "regional")
    assert "because enforce_eager is set" in reasons["eager"]
    for name, mode in (("backend alone", 0), ("pass alone", 0), ("pass alone, breakable off", 3)):
        assert modes[name] == (mode, True, "none")
        assert reasons[name].startswith("COMPILE_NOT_REACHED")
        assert "never compiles its Kimi K3 classes" in reasons[name]
    # With breakable graphs off the backend is reached, and the engine captures no decode graph.
    assert modes["backend, breakable off"] == (1, False, "backend")
    assert "not captured as FULL CUDA graphs" in reasons["backend, breakable off"]
    assert modes["asked, breakable off"] == (3, True, "regional")
    for name in ("asked", "not asked", "backend and asked", "asked, breakable off"):
        assert reasons[name] == ""

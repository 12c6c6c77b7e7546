"""Kimi K3's experts as an engine would have loaded them: shapes and strides, without memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3fuse.kernels.experts.config import stored_width
from k3fuse.rewriter.report import Report
from k3fuse_vllm import experts as registry
from k3fuse_vllm.expert_layout import Layout
from k3fuse_vllm.expert_parts import SharedExpert
from k3fuse_vllm.experts import ExpertLayer, Routing

BACKEND = "Mxfp4MoEMethod FLASHINFER_TRTLLM_MXFP4_MXFP8"
NAME = "model.layers.1.block_sparse_moe.experts"
PATTERN = "experts_partials"


def without_registry(report: Report) -> int:
    """Near misses and refusals of all patterns but the one that needs an engine's registry."""
    counts = {n: c for n, c in report.counts().items() if n != PATTERN}
    return sum(c.near + c.refused for c in counts.values())


def k3_layer(name: str = NAME, tp: int = 8, **changes: Any) -> ExpertLayer:
    """One rank's MXFP4 experts in vLLM's order for its TRTLLM kernels, with `changes`."""
    width = 3072 // tp
    stored = stored_width(width)

    def bytes_of(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16, scales = torch.bfloat16, torch.float8_e4m3fn
    layer = ExpertLayer(
        name,
        bytes_of(896, 2 * stored, 1792),
        bytes_of(896, 3584, stored // 2),
        bytes_of(896, 2 * stored, 112, dtype=scales),
        bytes_of(896, 3584, stored // 32, dtype=scales),
        Routing(
            16, "sigmoid", True, 1.0, 1, 1, bytes_of(896, dtype=torch.float32),
            router="GroupedTopKRouter",
        ),
        activation="situ",
        beta=4.0,
        linear_beta=25.0,
        experts=896,
        local=896,
        latent=3584,
        width=stored,
        width_used=width,
        tp=tp,
        dtype=bf16,
        layout=Layout("trtllm", "", "", BACKEND, "mxfp8"),
        shared=SharedExpert(
            (bytes_of(2 * 6144 // tp, 7168, dtype=bf16),), bytes_of(7168, 6144 // tp, dtype=bf16),
            "situ", 4.0, 25.0,
        ),
    )  # fmt: skip
    return replace(layer, **changes)


def as_loaded(monkeypatch: pytest.MonkeyPatch, tp: int = 8, **changes: Any) -> None:
    """Let every layer that a graph names be such a layer."""
    monkeypatch.setattr(registry, "find", lambda name: k3_layer(name, tp, **changes))

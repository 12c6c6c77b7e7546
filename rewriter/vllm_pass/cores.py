"""KDA's and MLA's attention cores as two mutating operators of ours.

A core reads the forward context (metadata, caches) as Python values, which a trace would fix to the
traced batch. Behind an operator it reads them when it runs: metadata, caches and weights are vLLM's
own, found through its layer registry by the layer's name, in its layouts, without copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3fuse_vllm.layer_ref import layer_ref, name_of

NAMESPACE = "k3fuse_vllm"
# Bodies of vLLM's methods before they were replaced, by operator.
_BODIES: dict[str, Callable[..., None]] = {}


def _layer(ref: Any) -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[name_of(ref)]


def define(kda_body: Callable[..., None], mla_body: Callable[..., None]) -> None:
    """Register both operators, once a process. The bodies are vLLM's own methods."""
    if _BODIES:
        return
    _BODIES.update(kda=kda_body, mla=mla_body)
    ref: Any = layer_ref()

    def kda_core(
        mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor, layer: Any
    ) -> None:
        _BODIES["kda"](_layer(layer), mixed_qkv, g1, g2, beta, core_attn_out)

    def mla_core(
        positions: Tensor,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        attn_out: Tensor,
        layer: Any,
    ) -> None:
        _BODIES["mla"](_layer(layer), positions, q, kv_c_normed, k_pe, attn_out)

    for function, written in ((kda_core, "core_attn_out"), (mla_core, "attn_out")):
        annotations = {**dict.fromkeys(function.__annotations__, Tensor), "layer": ref}
        function.__annotations__ = {**annotations, "return": None}
        op = torch.library.custom_op(
            f"{NAMESPACE}::{function.__name__}", function, mutates_args=(written,)
        )
        op.register_fake(lambda *args: None)


def kda_core(*args: Any) -> None:
    """Call the KDA operator: mixed_qkv, g1, g2, beta, core_attn_out (written), layer."""
    torch.ops.k3fuse_vllm.kda_core(*args)


def mla_core(*args: Any) -> None:
    """Call the MLA operator: positions, q, kv_c_normed, k_pe, attn_out (written), layer."""
    torch.ops.k3fuse_vllm.mla_core(*args)

"""Decode state: one row a request, written in place by every step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from k3fuse.patterns.models.config import KimiK3Config


class KdaState(NamedTuple):
    """State of one KDA layer.

    conv: BF16 [M, 3, 3 D], the last three raw rows of [q | k | v], oldest first.
    recurrent: FP32 [M, heads per rank, value dim, key dim].
    """

    conv: Tensor
    recurrent: Tensor


class MlaState(NamedTuple):
    """State of one MLA layer: BF16 latent rows [M, max_len, kv_lora_rank + rope dim]."""

    latent: Tensor


class DecodeState(NamedTuple):
    """State of M independent requests; `positions` int64 [M] is the row the next step writes."""

    layers: list[KdaState | MlaState]
    positions: Tensor


def new_state(
    config: KimiK3Config,
    m: int,
    max_len: int,
    *,
    tp_size: int = 1,
    num_layers: int | None = None,
    device: torch.device | str | None = None,
) -> DecodeState:
    """Zeroed state for `m` requests of at most `max_len` tokens on one of `tp_size` ranks.

    Raises ValueError for counts below 1 and for a geometry that `tp_size` does not divide.
    """
    for name, value in (("m", m), ("max_len", max_len)):
        if value < 1:
            raise ValueError(f"{name}={value} is not usable: use an integer of at least 1")
    config.check_tp(tp_size)
    heads, dim = config.linear_num_heads // tp_size, config.linear_head_dim
    taps = config.short_conv_kernel_size - 1
    layers: list[KdaState | MlaState] = []
    for layer in range(config.layer_count(num_layers)):
        if config.is_kda(layer):
            conv = torch.zeros(m, taps, 3 * heads * dim, dtype=torch.bfloat16, device=device)
            recurrent = torch.zeros(m, heads, dim, dim, dtype=torch.float32, device=device)
            layers.append(KdaState(conv, recurrent))
        else:
            shape = (m, max_len, config.latent_row)
            layers.append(MlaState(torch.zeros(shape, dtype=torch.bfloat16, device=device)))
    return DecodeState(layers, torch.zeros(m, dtype=torch.int64, device=device))


def mark_dynamic_rows(rows: Tensor, state: DecodeState) -> None:
    """Mark the request dimension of a step's inputs as dynamic, so that one graph serves every M.

    Narrower than torch.compile(dynamic=True), which also turns the model's float constants
    (norm epsilon, SiTU betas) into run-time inputs of the graph.
    """
    tensors = [rows, state.positions, *(tensor for layer in state.layers for tensor in layer)]
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)

"""The Kimi K3 decoder: one decode step of M independent requests, in plain PyTorch.

Written from the published config and the published numerics; no weights or code of another
implementation. The step is free of data-dependent Python, so it compiles as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3fuse.patterns.models.attn_res import AttnRes, AttnResForm, Blocks
from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.models.kda import KimiDeltaAttention
from k3fuse.patterns.models.mla import GatedLatentAttention
from k3fuse.patterns.models.moe import GatedMlp, LatentMoe, Selection
from k3fuse.patterns.models.parallel import (
    Linear,
    Piece,
    ShardedModule,
    TensorParallel,
    Vector,
    dense,
)
from k3fuse.patterns.models.state import DecodeState, KdaState, MlaState, new_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class KimiK3Layer(nn.Module):
    """AttnRes, attention, AttnRes, MLP or mixture of experts."""

    self_attn: KimiDeltaAttention | GatedLatentAttention
    mlp: GatedMlp | LatentMoe

    def __init__(
        self,
        config: KimiK3Config,
        tp: TensorParallel,
        layer: int,
        merged: bool,
        selection: Selection,
    ) -> None:
        super().__init__()
        key, hidden, eps = f"layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.writes_block = config.is_block_write(layer)
        self.self_attention_res = AttnRes(tp, f"{key}.self_attention_res", hidden, eps)
        self.input_layernorm = Vector(tp, f"{key}.input_layernorm", hidden)
        attention = KimiDeltaAttention if config.is_kda(layer) else GatedLatentAttention
        self.self_attn = attention(config, tp, f"{key}.self_attn", merged)
        self.mlp_res = AttnRes(tp, f"{key}.mlp_res", hidden, eps)
        self.post_attention_layernorm = Vector(tp, f"{key}.post_attention_layernorm", hidden)
        if config.is_moe(layer):
            self.mlp = LatentMoe(config, tp, f"{key}.mlp", merged, selection)
        else:
            self.mlp = GatedMlp(config, tp, f"{key}.mlp", config.intermediate_size, merged)

    def forward(
        self,
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Blocks,
        state: KdaState | MlaState,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Running prefix and the previous layer's delta, BF16 [M, H], to the next such pair.

        A block-write layer stores the prefix after the first mix and starts a new prefix from
        its attention output. `blocks` and `state` are updated in place.
        """
        if delta is not None:
            prefix = prefix + delta
        hidden = self.self_attention_res(blocks, prefix, self.input_layernorm.weight)
        if self.writes_block:
            blocks.write(prefix)
        attention = self.self_attn(hidden, state, positions)
        prefix = attention if self.writes_block else prefix + attention
        hidden = self.mlp_res(blocks, prefix, self.post_attention_layernorm.weight)
        return prefix, self.mlp(hidden)


class KimiK3(nn.Module):
    """The decoder, or its first `num_layers` layers, as one rank of `tp_size` sees it.

    group: process group or name for the all-reduces; needed where tp_size > 1.
    attn_res: block rows in a Python "list", or in one "bank" tensor written in place.
    merged_projections: one attention input linear and one gate/up linear, or separate weights.
    embed_and_head: take token ids and return FP32 logits, both replicated on every rank.
    selection: "topk", or "sort" to give exact routing ties to the lower id.
    Parameters are empty: fill them with `init_weights`. Raises ValueError for values that do not
    fit together (argument, value, fix).
    """

    def __init__(
        self,
        config: KimiK3Config,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        group: str | ProcessGroup | None = None,
        num_layers: int | None = None,
        attn_res: AttnResForm = "list",
        merged_projections: bool = True,
        embed_and_head: bool = False,
        selection: Selection = "topk",
    ) -> None:
        super().__init__()
        if attn_res not in ("list", "bank"):
            raise ValueError(f"attn_res={attn_res!r} is not usable: use 'list' or 'bank'")
        if selection not in ("topk", "sort"):
            raise ValueError(f"selection={selection!r} is not usable: use 'topk' or 'sort'")
        config.check_tp(tp_size)
        tp = TensorParallel.of(tp_size, tp_rank, group)
        self.config = config
        self.tp = tp
        self.attn_res: AttnResForm = attn_res
        self.num_layers = config.layer_count(num_layers)
        self.embed_and_head = embed_and_head
        hidden = config.hidden_size
        if embed_and_head:
            self.embed_tokens = Embedding(tp, config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            KimiK3Layer(config, tp, layer, merged_projections, selection)
            for layer in range(self.num_layers)
        )
        self.output_attn_res = AttnRes(tp, "output_attn_res", hidden, config.rms_norm_eps)
        self.norm = Vector(tp, "norm", hidden)
        if embed_and_head:
            self.lm_head = Linear(tp, dense("lm_head", config.vocab_size, hidden))

    def new_state(
        self, m: int, max_len: int, device: torch.device | str | None = None
    ) -> DecodeState:
        """Zeroed state for `m` requests of at most `max_len` tokens on this rank."""
        return new_state(
            self.config,
            m,
            max_len,
            tp_size=self.tp.size,
            num_layers=self.num_layers,
            device=device,
        )

    def forward(self, hidden_or_ids: Tensor, state: DecodeState) -> Tensor:
        """One decode step: BF16 rows [M, H] to BF16 normalised rows [M, H].

        With embed_and_head: int64 ids [M] to FP32 logits [M, vocab]. `state` is updated in place:
        each layer's tensors, and `positions` by one.
        """
        prefix = self.embed_tokens(hidden_or_ids) if self.embed_and_head else hidden_or_ids
        blocks = Blocks(self.attn_res, prefix, self.config.num_blocks)
        delta: Tensor | None = None
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            prefix, delta = layer(prefix, delta, blocks, layer_state, state.positions)
        if delta is not None:
            prefix = prefix + delta
        # The stock model rounds this mix to BF16 because its final norm sits in another call.
        out: Tensor = self.output_attn_res(blocks, prefix, self.norm.weight, round_mix=True)
        state.positions.add_(1)
        return self.lm_head(out).float() if self.embed_and_head else out


class Embedding(ShardedModule):
    """Replicated token embedding: int64 [M] to BF16 [M, H]."""

    def __init__(self, tp: TensorParallel, vocab: int, hidden: int) -> None:
        super().__init__(tp)
        self.weight = self.declare("weight", [Piece("embed_tokens", (vocab, hidden))])

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of `ids`."""
        return F.embedding(ids, self.weight)


@torch.no_grad()
def greedy_decode(model: Callable[..., Any], first_ids: Tensor, steps: int) -> Tensor:
    """Greedy continuation of `first_ids` int64 [M] by `steps` tokens: int64 [M, steps].

    `model` is a KimiK3 with embed_and_head, or that model compiled. Raises ValueError otherwise
    and for steps below 1.
    """
    source = getattr(model, "_orig_mod", model)
    if not isinstance(source, KimiK3) or not source.embed_and_head:
        raise ValueError(
            f"model={type(source).__name__} is not usable: build KimiK3(..., embed_and_head=True)"
        )
    if steps < 1:
        raise ValueError(f"steps={steps} is not usable: use an integer of at least 1")
    state = source.new_state(first_ids.shape[0], steps, first_ids.device)
    ids, produced = first_ids, []
    for _ in range(steps):
        ids = model(ids, state).argmax(-1)
        produced.append(ids)
    return torch.stack(produced, dim=1)

"""Gated multi-head latent attention without rotation, in absorbed form, one decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.models.parallel import (
    Linear,
    Piece,
    ShardedModule,
    TensorParallel,
    Vector,
    dense,
    rms_norm,
)
from k3fuse.patterns.models.state import MlaState


def latent_attention(
    query: Tensor, cache: Tensor, positions: Tensor, value_dim: int, scale: float
) -> Tensor:
    """Softmax attention over the latent rows 0..position of each request, FP32 inside.

    query [M, heads, R] BF16; cache [M, L, R] BF16, of which the first `value_dim` elements of a
    row are the values; positions int64 [M]. Returns BF16 [M, heads, value_dim].
    """
    rows = cache.float()
    score = torch.bmm(query.float() * scale, rows.transpose(1, 2))
    seen = torch.arange(cache.shape[1], device=cache.device) <= positions.unsqueeze(-1)
    score = score.masked_fill(~seen.unsqueeze(1), float("-inf"))
    mixed = torch.bmm(torch.softmax(score, -1), rows[:, :, :value_dim])
    return mixed.to(torch.bfloat16)


class GatedLatentAttention(ShardedModule):
    """Projection, latent cache, absorbed attention, output gate and the row-parallel output."""

    def __init__(
        self, config: KimiK3Config, tp: TensorParallel, key: str, merged_projections: bool
    ) -> None:
        super().__init__(tp)
        self.config = config
        self.merged = merged_projections
        self.heads = config.num_attention_heads // tp.size
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent, self.value = config.kv_lora_rank, config.v_head_dim
        heads, hidden = config.num_attention_heads, config.hidden_size
        q_rank = config.q_lora_rank

        q_a = dense(f"{key}.q_a_proj", q_rank, hidden)
        kv_a = dense(f"{key}.kv_a_proj_with_mqa", config.latent_row, hidden)
        gate = dense(f"{key}.g_proj", heads * self.value, hidden, 0)
        if merged_projections:
            self.in_proj = Linear(tp, q_a, kv_a, gate)
        else:
            self.q_a_proj = Linear(tp, q_a)
            self.kv_a_proj_with_mqa = Linear(tp, kv_a)
            self.g_proj = Linear(tp, gate)
        self.q_a_layernorm = Vector(tp, f"{key}.q_a_layernorm", q_rank)
        self.kv_a_layernorm = Vector(tp, f"{key}.kv_a_layernorm", self.latent)
        query = heads * (self.nope + self.rope)
        self.q_b_proj = Linear(tp, dense(f"{key}.q_b_proj", query, q_rank, 0))
        uk = Piece(f"{key}.w_uk", (heads, self.nope, self.latent), 0, scale=self.nope**-0.5)
        uv = Piece(f"{key}.w_uv", (heads, self.latent, self.value), 0, scale=self.latent**-0.5)
        self.w_uk = self.declare("w_uk", [uk])
        self.w_uv = self.declare("w_uv", [uv])
        self.o_proj = Linear(tp, dense(f"{key}.o_proj", hidden, heads * self.value, 1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """BF16 [M, H] to q_a [M, q rank], kv_a [M, latent + rope] and gate [M, D]."""
        if not self.merged:
            return self.q_a_proj(x), self.kv_a_proj_with_mqa(x), self.g_proj(x)
        z = self.in_proj(x)
        low = self.config.q_lora_rank
        gate = low + self.config.latent_row
        return z[:, :low], z[:, low:gate], z[:, gate:]

    def query(self, q_a: Tensor) -> Tensor:
        """Absorbed query rows [M, heads, latent + rope] BF16: W_UK applied to the nope part."""
        eps = self.config.rms_norm_eps
        q = self.q_b_proj(rms_norm(q_a, self.q_a_layernorm.weight, eps))
        q = q.view(-1, self.heads, self.nope + self.rope)
        absorbed = torch.bmm(q[:, :, : self.nope].transpose(0, 1), self.w_uk)
        return torch.cat([absorbed.transpose(0, 1), q[:, :, self.nope :]], dim=-1)

    def append(self, kv_a: Tensor, cache: Tensor, positions: Tensor) -> None:
        """Write this step's [normalised latent | key part] at each request's position."""
        latent = rms_norm(
            kv_a[:, : self.latent], self.kv_a_layernorm.weight, self.config.rms_norm_eps
        )
        row = torch.cat([latent, kv_a[:, self.latent :]], dim=-1)
        requests = torch.arange(kv_a.shape[0], device=kv_a.device)
        cache.index_put_((requests, positions), row)

    def forward(self, x: Tensor, state: MlaState, positions: Tensor) -> Tensor:
        """Normalised rows [M, H] BF16 to the all-reduced attention output [M, H] BF16.

        `positions` int64 [M] must lie inside the cache; `state` is updated in place.
        """
        q_a, kv_a, gate = self.project(x)
        self.append(kv_a, state.latent, positions)
        scale = (self.nope + self.rope) ** -0.5
        mixed = latent_attention(self.query(q_a), state.latent, positions, self.latent, scale)
        value = torch.bmm(mixed.transpose(0, 1), self.w_uv).transpose(0, 1)
        rows = value.reshape(-1, self.heads * self.value).float()
        y = (rows * torch.sigmoid(gate.float())).to(torch.bfloat16)
        return self.tp.all_reduce(self.o_proj(y))

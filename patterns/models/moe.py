"""Dense MLP, shared expert, sigmoid top-k router and the latent MXFP4 mixture of experts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from k3fuse.patterns.models.config import MX_GROUP, KimiK3Config
from k3fuse.patterns.models.mx import mxfp4_dequantise, mxfp8_round
from k3fuse.patterns.models.parallel import (
    Linear,
    Piece,
    ShardedModule,
    TensorParallel,
    Vector,
    dense,
    rms_norm,
    situ,
)

Selection = Literal["topk", "sort"]


def select_experts(
    logits: Tensor,
    correction_bias: Tensor,
    top_k: int,
    scale: float,
    selection: Selection = "topk",
) -> tuple[Tensor, Tensor]:
    """Sigmoid routing: FP32 logits [M, E] to BF16 weights [M, k] and int64 ids [M, k].

    Chosen by sigmoid + bias, weighted by the sigmoid alone, renormalised over the chosen, scaled.
    "topk" leaves the order of exact ties to torch.topk; "sort" gives ties to the lower id.
    """
    score = torch.sigmoid(logits)
    key = score + correction_bias
    if selection == "topk":
        ids = torch.topk(key, top_k, dim=-1)[1]
    else:
        ids = torch.sort(key, dim=-1, descending=True, stable=True)[1][:, :top_k]
    chosen = score.gather(-1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
    return weights.to(torch.bfloat16), ids


class GatedMlp(ShardedModule):
    """gate/up -> SiTU in FP32 rounded to BF16 -> row-parallel down -> all-reduce."""

    def __init__(
        self, config: KimiK3Config, tp: TensorParallel, key: str, width: int, merged: bool
    ) -> None:
        super().__init__(tp)
        self.config = config
        self.merged = merged
        self.width = width // tp.size
        gate = dense(f"{key}.gate_proj", width, config.hidden_size, 0)
        up = dense(f"{key}.up_proj", width, config.hidden_size, 0)
        if merged:
            self.gate_up_proj = Linear(tp, gate, up)
        else:
            self.gate_proj = Linear(tp, gate)
            self.up_proj = Linear(tp, up)
        self.down_proj = Linear(tp, dense(f"{key}.down_proj", config.hidden_size, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """BF16 [M, H] to all-reduced BF16 [M, H]."""
        if self.merged:
            z = self.gate_up_proj(x)
            gate, up = z[:, : self.width], z[:, self.width :]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        beta, linear_beta = (
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
        )
        hidden = situ(gate, up, beta, linear_beta).to(torch.bfloat16)
        return self.tp.all_reduce(self.down_proj(hidden))


class MxExperts(ShardedModule):
    """Every expert's MXFP4 weights, split over ranks by intermediate width."""

    def __init__(self, config: KimiK3Config, tp: TensorParallel, key: str) -> None:
        super().__init__(tp)
        self.config = config
        self.width = config.moe_intermediate_size // tp.size
        experts, full = config.num_experts, config.moe_intermediate_size
        latent = config.routed_expert_hidden_size
        row, groups = (experts, full, latent // 2), (experts, full, latent // MX_GROUP)
        in_scale, out_scale = latent**-0.5, full**-0.5
        self.w13 = self.declare(
            "w13",
            [Piece(f"{key}.{name}", row, 1, "e2m1") for name in ("w1", "w3")],
            torch.uint8,
            dim=1,
        )
        self.w13_scale = self.declare(
            "w13_scale",
            [Piece(f"{key}.{name}_scale", groups, 1, "e8m0", in_scale) for name in ("w1", "w3")],
            torch.uint8,
            dim=1,
        )
        w2 = Piece(f"{key}.w2", (experts, latent, full // 2), 2, "e2m1")
        w2_scale = Piece(
            f"{key}.w2_scale", (experts, latent, full // MX_GROUP), 2, "e8m0", out_scale
        )
        self.w2 = self.declare("w2", [w2], torch.uint8)
        self.w2_scale = self.declare("w2_scale", [w2_scale], torch.uint8)

    def forward(self, latent: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """BF16 latent [M, L] and weights [M, k], int64 ids [M, k] to the BF16 partial [M, L]."""
        tokens, slots = ids.shape
        w13 = mxfp4_dequantise(self.w13[ids], self.w13_scale[ids])
        w2 = mxfp4_dequantise(self.w2[ids], self.w2_scale[ids])
        x = mxfp8_round(latent).unsqueeze(-1)
        both = torch.bmm(w13.flatten(1, 2), x).view(tokens, slots, 2 * self.width)
        gate, up = both[:, :, : self.width], both[:, :, self.width :]
        beta, linear_beta = (
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
        )
        hidden = mxfp8_round(situ(gate, up, beta, linear_beta))
        rows = torch.bmm(w2.flatten(0, 1), hidden.view(-1, self.width, 1))
        rows = rows.view(tokens, slots, -1).to(torch.bfloat16)
        return (rows.float() * weights.float().unsqueeze(-1)).sum(1).to(torch.bfloat16)


class Router(ShardedModule):
    """Replicated gate: BF16 operands, FP32 logits."""

    def __init__(
        self, config: KimiK3Config, tp: TensorParallel, key: str, selection: Selection
    ) -> None:
        super().__init__(tp)
        self.config = config
        self.selection: Selection = selection
        gate = dense(f"{key}.weight", config.num_experts, config.hidden_size)
        self.weight = self.declare("weight", [gate])
        bias = Piece(f"{key}.e_score_correction_bias", (config.num_experts,), scale=0.1)
        self.e_score_correction_bias = self.declare(
            "e_score_correction_bias", [bias], torch.float32
        )

    def logits(self, x: Tensor) -> Tensor:
        """BF16 [M, H] to FP32 [M, E].

        Products of BF16 operands are exact in FP32, so widening first equals a BF16 GEMM with
        FP32 accumulation and output; the CPU has no aten.mm with an output dtype.
        """
        return x.float() @ self.weight.float().t()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """BF16 [M, H] to BF16 weights [M, k] and int64 ids [M, k]."""
        return select_experts(
            self.logits(x),
            self.e_score_correction_bias,
            self.config.num_experts_per_token,
            self.config.routed_scaling_factor,
            self.selection,
        )


class LatentMoe(ShardedModule):
    """Router, experts in the latent space, latent all-reduce and norm, shared expert, sum."""

    def __init__(
        self,
        config: KimiK3Config,
        tp: TensorParallel,
        key: str,
        merged: bool,
        selection: Selection = "topk",
    ) -> None:
        super().__init__(tp)
        self.config = config
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, tp, f"{key}.gate", selection)
        self.latent_down_proj = Linear(tp, dense(f"{key}.latent_down_proj", latent, hidden))
        self.experts = MxExperts(config, tp, f"{key}.experts")
        self.latent_norm = Vector(tp, f"{key}.latent_norm", latent)
        self.latent_up_proj = Linear(tp, dense(f"{key}.latent_up_proj", hidden, latent))
        width = config.shared_intermediate_size
        self.shared_experts = GatedMlp(config, tp, f"{key}.shared_experts", width, merged)

    def forward(self, x: Tensor) -> Tensor:
        """BF16 [M, H] to the layer's delta, BF16 [M, H]."""
        weights, ids = self.gate.route(x)
        partial = self.experts(self.latent_down_proj(x), weights, ids)
        latent = self.tp.all_reduce(partial)
        latent = rms_norm(latent, self.latent_norm.weight, self.config.rms_norm_eps)
        return self.latent_up_proj(latent) + self.shared_experts(x)

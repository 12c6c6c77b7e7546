"""Kimi delta attention, one decode step of M independent requests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.models.parallel import (
    Linear,
    Piece,
    ShardedModule,
    TensorParallel,
    Vector,
    dense,
)
from k3fuse.patterns.models.state import KdaState


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def kda_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One gated delta-rule step, all FP32.

    state [M, H, V, K]; q (scaled), k, decay [M, H, K]; v [M, H, V]; beta [M, H].
    S <- S diag(a); u = beta (v - S k); S <- S + u k^T; o = S q. Returns (o [M, H, V], S).
    """
    row = k.unsqueeze(-2)
    decayed = state * decay.unsqueeze(-2)
    update = beta.unsqueeze(-1) * (v - (decayed * row).sum(-1))
    new = decayed + update.unsqueeze(-1) * row
    return (new * q.unsqueeze(-2)).sum(-1), new


class KimiDeltaAttention(ShardedModule):
    """Projection, short convolution, gated delta rule, gated norm and the row-parallel output."""

    def __init__(
        self, config: KimiK3Config, tp: TensorParallel, key: str, merged_projections: bool
    ) -> None:
        super().__init__(tp)
        self.config = config
        self.merged = merged_projections
        self.heads = config.linear_num_heads // tp.size
        self.dim = config.linear_head_dim
        self.width = self.heads * self.dim
        full, hidden, heads = config.kda_width, config.hidden_size, config.linear_num_heads

        front = [dense(f"{key}.{part}_proj", full, hidden, 0) for part in "qkvg"]
        front.append(dense(f"{key}.f_a_proj", self.dim, hidden))
        front.append(dense(f"{key}.b_proj", heads, hidden, 0))
        if merged_projections:
            used = 4 * self.width + self.dim + self.heads
            pad = config.kda_projection_rows(tp.size) - used
            if pad:
                front.append(Piece(f"{key}.pad", (pad, hidden), None, "zero"))
            self.in_proj = Linear(tp, *front)
        else:
            self.q_proj = Linear(tp, front[0])
            self.k_proj = Linear(tp, front[1])
            self.v_proj = Linear(tp, front[2])
            self.g_proj = Linear(tp, front[3])
            self.f_a_proj = Linear(tp, front[4])
            self.b_proj = Linear(tp, front[5])
        self.f_b_proj = Linear(tp, dense(f"{key}.f_b_proj", full, self.dim, 0))
        taps = config.short_conv_kernel_size
        filters = [Piece(f"{key}.{part}_conv", (full, taps), 0, scale=0.5) for part in "qkv"]
        self.conv_weight = self.declare("conv_weight", filters, torch.float32)
        a_log = Piece(f"{key}.A_log", (heads,), 0, scale=0.3)
        dt_bias = Piece(f"{key}.dt_bias", (full,), 0, "decay_bias")
        self.A_log = self.declare("A_log", [a_log], torch.float32)
        self.dt_bias = self.declare("dt_bias", [dt_bias], torch.float32)
        self.o_norm = Vector(tp, f"{key}.o_norm", self.dim)
        self.o_proj = Linear(tp, dense(f"{key}.o_proj", hidden, full, 1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """BF16 [M, H] to raw qkv [M, 3 D], g [M, D], f_a [M, head dim] and beta [M, heads]."""
        if not self.merged:
            qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
            return qkv, self.g_proj(x), self.f_a_proj(x), self.b_proj(x)
        z = self.in_proj(x)
        gate, low = 3 * self.width, 4 * self.width
        beta = low + self.dim
        return z[:, :gate], z[:, gate:low], z[:, low:beta], z[:, beta : beta + self.heads]

    def convolve(self, qkv: Tensor, conv: Tensor) -> Tensor:
        """Causal depth-wise convolution and SiLU: FP32 [M, 3, heads, head dim].

        conv [M, 3, 3 D] BF16 is shifted by one row in place. The result stays FP32 up to the
        recurrence, as in the fused kernels; the chain of separate kernels rounds it to BF16.
        """
        window = torch.cat([conv, qkv.unsqueeze(1)], dim=1)
        conv.copy_(window[:, 1:])
        mixed = F.silu((window.float() * self.conv_weight.t()).sum(1))
        return mixed.view(-1, 3, self.heads, self.dim)

    def decay(self, f_a: Tensor) -> Tensor:
        """Per-key decay exp(bound * sigmoid(exp(A_log) (r + dt_bias))): FP32 [M, heads, dim]."""
        r = self.f_b_proj(f_a) + self.dt_bias
        rate = torch.exp(self.A_log).unsqueeze(-1) * r.view(-1, self.heads, self.dim)
        return torch.exp(self.config.gate_lower_bound * torch.sigmoid(rate))

    def forward(self, x: Tensor, state: KdaState, positions: Tensor) -> Tensor:
        """Normalised rows [M, H] BF16 to the all-reduced attention output [M, H] BF16.

        `state` is updated in place; `positions` is not read (the recurrence has no index).
        """
        qkv, gate, f_a, beta = self.project(x)
        mixed = self.convolve(qkv, state.conv)
        qk = l2_norm(mixed[:, :2], self.config.l2_norm_eps)
        out, new = kda_step(
            state.recurrent,
            qk[:, 0] * self.dim**-0.5,
            qk[:, 1],
            mixed[:, 2],
            self.decay(f_a),
            torch.sigmoid(beta.float()),
        )
        state.recurrent.copy_(new)
        y = self._gated_norm(out, gate, self.o_norm.weight)
        return self.tp.all_reduce(self.o_proj(y))

    def _gated_norm(self, out: Tensor, gate: Tensor, weight: nn.Parameter) -> Tensor:
        """RMSNorm per head, weight and sigmoid gate in FP32, one rounding: BF16 [M, D]."""
        scale = torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        normed = (out * scale * weight.float()).view(-1, self.width)
        return (normed * torch.sigmoid(gate.float())).to(torch.bfloat16)

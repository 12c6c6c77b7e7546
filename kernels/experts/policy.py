"""Which kernels serve the experts: a persistent grid, the shared expert inside, then the tail."""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table("experts", planned(1, 64, "mx_experts_and_latent_tail", 2))

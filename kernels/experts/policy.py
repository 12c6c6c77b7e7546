"""Which kernel serves the experts: one persistent grid, shared expert and tail included."""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table("experts", planned(1, 64, "mx_experts", 1))

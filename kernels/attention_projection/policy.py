"""Which kernel serves an attention projection: one launch, whatever the number of linears."""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table(
    "attention_projection",
    planned(1, 8, "stationary_gemm", 1),
    planned(9, 64, "stream_gemm", 1),
)

"""Which kernel serves the router front.

One launch up to M = 8, where every CTA reads the mailbox of logits and routes; two above, where the
logits and latent GEMM and the routing are grids of their own.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table(
    "router",
    planned(1, 8, "stationary_gemm_route", 1),
    planned(9, 64, "stream_gemm_and_route", 2),
)

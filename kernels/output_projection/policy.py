"""Which kernel serves an output projection.

One launch up to M = 8, where the projection, the mailbox all-reduce and the residual share one
grid; two above, where the partials are reduced by a second grid.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table(
    "output_projection",
    planned(1, 8, "stationary_gemm_mailbox", 1),
    planned(9, 64, "stream_gemm_and_mailbox_reduce", 2),
)

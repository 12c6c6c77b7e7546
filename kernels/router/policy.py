"""Which kernels serve the router: two launches, whatever M.

The front kernel multiplies this rank's rows of gate and latent weight and sends them to all ranks;
the route kernel takes the rows from the rank's own mailbox. The front kernel is compiled for up to
8, 16, 32 and 64 tokens; partition and order of the sums are the same in all four, so a token has
the same bits in every batch.

`REPLICATED_ROW` is in no table: every rank computes all logits and sends none. It reads 12.85 MB
instead of 1.61 (TP8) or 0.80 (TP16), about 1.4 us of a GB300's memory, and saves no hop, because
the latent row comes from all ranks in the same launch.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

SHARDED = "sharded_front_route"
REPLICATED = "replicated_front_route"


def _row(m_min: int, m_max: int) -> Row:
    reason = f"each rank multiplies its rows of the weights, {m_max} tokens at most; then routing"
    return Row(m_min, m_max, SHARDED, 2, reason, hops=1)


TABLE = table("router", _row(1, 8), _row(9, 16), _row(17, 32), _row(33, 64))
REPLICATED_ROW = Row(
    1, 1, REPLICATED, 2, "every rank computes all logits; the bits are the same", hops=1
)

"""Which kernel serves AttnRes where it stands alone.

A lone token has a cluster of seven CTAs. In a batch two tokens share one, so that the weight
vectors are read half as often: 3 of the 15 rows that a token with 8 blocks takes. A grid is sized
for the most tokens of its row; the rows keep small batches from launching idle clusters.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

CLUSTER = "cluster_attn_res"


def _row(m_min: int, m_max: int) -> Row:
    return Row(m_min, m_max, CLUSTER, 1, f"a cluster for two tokens, a grid for {m_max}")


TABLE = table(
    "attn_res",
    Row(1, 1, CLUSTER, 1, "one cluster"),
    _row(2, 8),
    _row(9, 16),
    _row(17, 32),
    _row(33, 64),
)

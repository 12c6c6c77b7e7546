"""Which kernel serves AttnRes where it stands alone.

A cluster of seven CTAs owns a token, and a grid is sized for the most tokens of its row, so the
rows only keep small batches from launching clusters that have nothing to do.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

CLUSTER = "cluster_attn_res"


def _row(m_min: int, m_max: int) -> Row:
    return Row(m_min, m_max, CLUSTER, 1, f"a cluster a token, a grid for {m_max}")


TABLE = table("attn_res", _row(1, 8), _row(9, 16), _row(17, 32), _row(33, 64))

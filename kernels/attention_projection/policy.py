"""Which kernel serves an attention projection: one launch, whatever the number of linears.

One kernel for all token counts, compiled for up to 8, 16, 32 and 64 tokens. Partition and order of
the sums are the same in all four, so a token has the same bits in every batch.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

STATIONARY = "stationary_gemm"


def _row(m_min: int, m_max: int) -> Row:
    return Row(m_min, m_max, STATIONARY, 1, f"weights pass by once, with {m_max} tokens at most")


TABLE = table("attention_projection", _row(1, 8), _row(9, 16), _row(17, 32), _row(33, 64))

"""Which kernels serve the experts: shared gate and up, the experts, the tail.

One kernel of each for all token counts, compiled for up to 8, 16, 32 and 64 tokens. The experts'
kernel multiplies with mma.sync in BF16, on every architecture; a block-scaled tcgen05 engine of the
same units is planned for the same rows.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

EXPERTS = "mx_experts_and_latent_tail"


def _row(m_min: int, m_max: int) -> Row:
    reason = f"each distinct expert's weights pass by once, with {m_max} tokens at most"
    return Row(m_min, m_max, EXPERTS, 3, reason)


TABLE = table("experts", _row(1, 8), _row(9, 16), _row(17, 32), _row(33, 64))

"""Which kernels serve the partials: the choice of experts, shared gate and up, the experts.

Those of `router` and `experts` without the exchanges: the route kernel on plain logits, then the
two launches that leave the partials. Compiled for up to 8, 16, 32 and 64 tokens.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

PARTIALS = "route_and_mx_experts"


def _row(m_min: int, m_max: int) -> Row:
    reason = f"each distinct expert's weights pass by once, with {m_max} tokens at most"
    return Row(m_min, m_max, PARTIALS, 3, reason)


TABLE = table("experts_partials", _row(1, 8), _row(9, 16), _row(17, 32), _row(33, 64))

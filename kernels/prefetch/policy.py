"""Whether the next weights are prefetched: nowhere, until a time on a GPU says where it pays.

Upstream prefetches up to 8 tokens, beside exchanges, and nothing above, where the experts need the
bandwidth themselves. Its caps are its own measurements, of other kernels: no row is taken from it.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import TP_SIZES, planned

PREFETCH = "l2_prefetch"
ROWS = {f"gb300:tp{tp}": (planned(1, 64, PREFETCH, 1),) for tp in TP_SIZES}


def wanted(target: str, m: int) -> bool:
    """Whether the policy turns the launch on for `m` tokens; False for an unknown target."""
    rows = ROWS.get(target, ())
    return any(row.m_min <= m <= row.m_max and row.kernel == PREFETCH for row in rows)

"""Which kernel serves an output projection.

Up to M = 8 the projection, the mailbox all-reduce and the residual share one grid. Above, a second
grid reduces. There the exchange is one-shot, every rank adding all partial rows itself, until the
partials become the larger cost: a rank then takes in TP x M x 14,336 bytes, 3.7 MB at TP8 with
M = 32 and as much at TP16 with M = 16, against 2 x M x 14,336 bytes of a two-shot exchange, which
costs a hop more. The borders are those byte counts, not measured times. Sums, order and rounding
are the same in all three, so are the bits.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

FUSED = "fused_mailbox"
ONE_SHOT = "split_one_shot"
TWO_SHOT = "split_two_shot"


def _fused(m_min: int, m_max: int) -> Row:
    return Row(m_min, m_max, FUSED, 1, "projection, exchange and residual in one grid")


def _one_shot(m_min: int, m_max: int) -> Row:
    return Row(m_min, m_max, ONE_SHOT, 2, "every rank adds all partial rows: one hop")


def _two_shot(m_min: int, m_max: int) -> Row:
    reason = "owners add their columns: two hops, 2 / TP of the bytes"
    return Row(m_min, m_max, TWO_SHOT, 2, reason, hops=1)


TABLE = table(
    "output_projection",
    _fused(1, 8),
    _one_shot(9, 16),
    _one_shot(17, 32),
    _two_shot(33, 64),
    tp16=(_fused(1, 8), _one_shot(9, 16), _two_shot(17, 32), _two_shot(33, 64)),
)

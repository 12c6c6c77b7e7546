"""Whether and how much of the next weights an op prefetches, where its caller names them.

The rewriter names weights only with its option `prefetch`: whether the launch pays is a question of
time, which only a GPU answers. What is here are the borders within which it can pay at all. They
are counts of bytes and tokens, no measured times.

**Tokens.** Up to 8 tokens an output projection is one grid that ends in polling the other ranks'
rows, and the tail polls as well: what a rank does not read in that time, it waits for afterwards.
Above, the routed experts of the tokens fill the memory's time themselves (16 different experts a
token; 512 of 896 at 32 tokens), so bytes asked for early only come in their way.

**Bytes.** A reader's own first wave is a measure of what it can take up at once: the attention
projection's grid has room for 18 MiB in its rings at M <= 8, in the least of its four shapes (12
places of 96 rows of 128 bytes on 128 SMs, latent attention at TP16). That is a seventh of the
126 MB of a GB300's second-level cache, and at 8 TB/s 2.4 us, about as long as an exchange.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import REFERENCE, TP_SIZES, Row

PREFETCH = "l2_prefetch"
MOST_TOKENS = 8
MOST_BYTES = 18 * 2**20  # of one launch, on one rank

_ROW = Row(1, MOST_TOKENS, PREFETCH, 1, "an exchange is exposed, and the experts leave memory time")
# The reference takes the names of the weights, too, and launches nothing.
ROWS = dict.fromkeys((REFERENCE, *(f"gb300:tp{tp}" for tp in TP_SIZES)), (_ROW,))


def row_of(target: str, m: int) -> Row | None:
    """The row that turns the launch on for `m` tokens; None for none, or an unknown target."""
    return next((row for row in ROWS.get(target, ()) if row.m_min <= m <= row.m_max), None)

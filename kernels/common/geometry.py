"""How the projection and residual kernels divide their work: sizes shared by plans and kernels.

A producer CTA owns ROWS rows of W. Its eight warps are two halves of the rows times PARTS parts of
K; the first REGISTER_K columns of W sit in registers, 96 a thread, the rest in shared memory. A
consumer cluster of CLUSTER CTAs owns a token; CONSUMER_THREADS threads of each CTA own COLUMNS
neighbouring columns each.
"""

from __future__ import annotations

ROWS = 64
PARTS = 4
REGISTER_K = 768
# The 8 lanes of a 16-byte access to shared memory read 64 bytes of 2 rows; they meet 32 different
# banks where the rows are 64 bytes apart modulo 128. Those are neighbouring rows of x, and rows of
# W that are 4 apart.
PAD = 64
UPPER_PAD = 16
# Floats of one token's partial sums: 64 rows, 4 more so that lanes 2 tokens apart differ in bank.
SUM_PITCH = ROWS + 4

CLUSTER = 7
CONSUMER_WARPS = 4
CONSUMER_THREADS = 32 * CONSUMER_WARPS
COLUMNS = 8
HIDDEN = CLUSTER * CONSUMER_THREADS * COLUMNS

LANES = 32


def quads(blocks: int) -> int:
    """Quads of sums that a warp sends for its blocks, two blocks each: 0, 1, 2 or 4."""
    return 0 if blocks < 1 else 1 if blocks < 3 else 2 if blocks < 5 else 4


def exchange_bytes(quads_: int) -> int:
    """Shared memory of one exchange: 16 bytes a quad of each warp of the cluster, up to 32.

    0 quads: a single value, 4 bytes.
    """
    return LANES * (quads_ * 16 or 4)


def residual_bytes(blocks: int) -> int:
    """Shared memory of a consumer CTA: the row's exchange, a single value's, the blocks'.

    The last 32 bytes are mbarriers.
    """
    bank = exchange_bytes(quads(blocks)) if blocks > 0 else 0
    return exchange_bytes(1) + exchange_bytes(0) + bank + 32

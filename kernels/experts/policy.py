"""Which kernels serve the experts: shared gate and up, the experts, the tail.

`TAKING` is the same where a router has made the shared expert's hidden row: gate and up are in its
front kernel, and two launches are left.

One kernel of each for all token counts, compiled for up to 8, 16, 32 and 64 tokens. The experts'
kernel multiplies with mma.sync in BF16, on every architecture; a block-scaled tcgen05 engine of the
same units is planned for the same rows.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import Row, table

EXPERTS = "mx_experts_and_latent_tail"


def _rows(launches: int) -> tuple[Row, ...]:
    reason = "each distinct expert's weights pass by once, with {} tokens at most"
    return tuple(
        Row(most // 2 + 1 if most > 8 else 1, most, EXPERTS, launches, reason.format(most))
        for most in (8, 16, 32, 64)
    )


TABLE = table("experts", *_rows(3))
TAKING = table("experts", *_rows(2))

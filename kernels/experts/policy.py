"""Which kernels serve the experts: shared gate and up, the experts, the tail.

`TAKING` is the same where a router has made the shared expert's hidden row: gate and up are in its
front kernel, and two launches are left.

One kernel of each for all token counts, compiled for up to 8, 16, 32 and 64 tokens. The experts'
kernel has two engines for the same units: products with block scales (tcgen05), where the chip has
them, and their twin, mma.sync in BF16, on every chip. The counts of `docs/kernels/experts.md`
decide: the first needs fewer bytes and fewer instructions at every shape. What it does not take
runs the twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from k3fuse.kernels.common.policy import Row, table

EXPERTS = "mx_experts_and_latent_tail"
BLOCK, TWIN = "block_scaled", "bf16"
# Architecture -> engine of the routed experts; others have the twin.
ENGINES: Mapping[str, str] = MappingProxyType({"sm_100a": BLOCK, "sm_103a": BLOCK})


def _rows(launches: int) -> tuple[Row, ...]:
    reason = "each distinct expert's weights pass by once, with {} tokens at most"
    return tuple(
        Row(most // 2 + 1 if most > 8 else 1, most, EXPERTS, launches, reason.format(most))
        for most in (8, 16, 32, 64)
    )


TABLE = table("experts", *_rows(3))
TAKING = table("experts", *_rows(2))

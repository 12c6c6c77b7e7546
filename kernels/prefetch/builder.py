"""Build the L2 prefetch: up to 16 ranges of weights, in the order in which they will be read.

The ABI: range0 .. (16-byte aligned addresses), then bytes0 .. (i32, multiples of 16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs

MAX_RANGES = 16
# Kernels are built for so many ranges; a launch with fewer leaves the last ones empty.
RANGES = (4, 8, MAX_RANGES)
MAX_CTAS = 64
CHUNK = 16_384  # bytes of one request
THREADS = 32
SHAPE = {"ranges": 8}
CONFIG = {"ctas": 32}


@dataclass(frozen=True)
class Prefetch:
    """Builder of `l2_prefetch`."""

    op: str = "l2_prefetch"
    summary: str = "ranges of weights into L2, in 16 KB requests"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape ranges (1 to 16); config ctas (1 to 64), of a warp each.

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        ranges, ctas = sizes["ranges"], tuning["ctas"]
        need(self.op, 1 <= ranges <= MAX_RANGES, "ranges", ranges, f"1 to {MAX_RANGES}")
        need(self.op, 1 <= ctas <= MAX_CTAS, "ctas", ctas, f"1 to {MAX_CTAS}")
        return Variant(self.op, f"r{ranges}_c{ctas}", arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """One for each of RANGES."""
        return tuple(self.variant(arch, {"ranges": ranges}, {}) for ranges in RANGES)

    def plan(self, variant: Variant) -> Plan:
        """One warp a CTA."""
        ranges = range(variant.size("ranges"))
        return Plan(
            grid=(variant.tuning("ctas"), 1, 1),
            block=(THREADS, 1, 1),
            cluster=(1, 1, 1),
            dynamic_smem=0,
            parameters=(
                *(Parameter(f"range{i}", "pointer") for i in ranges),
                *(Parameter(f"bytes{i}", "i32") for i in ranges),
            ),
            pdl=True,
        )

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.prefetch.device import Prefetch as Kernel

        names = [p.name for p in self.plan(variant).parameters]
        half = len(names) // 2
        return Kernel(variant.tuning("ctas")), arguments(names[:half], names[half:])


BUILDER = Prefetch()

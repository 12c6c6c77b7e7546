"""Launch geometry of the tail's kernel. No DSL here."""

from __future__ import annotations

from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.tail.config import CLUSTER, THREADS, Config


def plan_of(config: Config) -> Plan:
    """Clusters of 8 CTAs; all of the grid waits for all of it."""
    return Plan(
        grid=(config.grid, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=config.total,
        parameters=(
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

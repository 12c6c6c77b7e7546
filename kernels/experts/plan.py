"""Launch geometry of the experts kernel. No DSL here."""

from __future__ import annotations

from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.experts.config import CLUSTER, THREADS, Config


def plan_of(config: Config) -> Plan:
    """One wave of clusters; each takes every `clusters`-th entry of the list."""
    return Plan(
        grid=(CLUSTER * config.clusters, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=config.shared_memory,
        parameters=(
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

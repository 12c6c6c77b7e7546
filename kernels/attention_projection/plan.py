"""Launch geometry of the attention projection's kernel. No DSL here."""

from __future__ import annotations

from k3fuse.kernels.attention_projection.config import Config
from k3fuse.kernels.build.variant import Parameter, Plan


def plan_of(config: Config) -> Plan:
    """Up to 16 clusters of 8 CTAs, a warp for each of a cluster's tiles."""
    geometry = config.geometry
    return Plan(
        grid=(geometry.ctas, 1, 1),
        block=(32 * geometry.warps, 1, 1),
        cluster=(geometry.cluster, 1, 1),
        dynamic_smem=geometry.shared,
        parameters=(
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

"""Launch geometry of the attention projection's kernels. No DSL here."""

from __future__ import annotations

from k3fuse.kernels.attention_projection.config import Config
from k3fuse.kernels.attention_projection.stream_config import (
    BLOCK,
    CLUSTER,
    ELEMENT,
    WARPS,
    StreamConfig,
)
from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.common.tensor_map import TileMap


def plan_of(config: Config) -> Plan:
    """The stationary kernel: up to 16 clusters of 8 CTAs, a warp for each of a cluster's tiles."""
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


def stream_plan_of(config: StreamConfig) -> Plan:
    """The stream kernel: up to 16 clusters of 8 CTAs; each launch gives the rows of x and of W."""

    def tiles(rows: int, box: int) -> TileMap:
        return TileMap("bf16", (config.k, rows), (config.k * ELEMENT,), (BLOCK, box), 128)

    weights = zip(config.weight_maps, config.rows, strict=True)
    return Plan(
        grid=(CLUSTER * config.clusters, 1, 1),
        block=(32 * WARPS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=config.shared,
        parameters=(
            Parameter("x", "tensor_map", tiles(config.m, config.tokens), True),
            *(Parameter(n, "tensor_map", tiles(r, config.tile), True) for n, r in weights),
            *(Parameter(name, "pointer") for name in config.out_pointers),
            Parameter("m", "i32"),
        ),
        pdl=True,
    )

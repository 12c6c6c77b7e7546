"""Launch geometry of the experts kernel. No DSL here."""

from __future__ import annotations

from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.experts.block_config import BlockConfig
from k3fuse.kernels.experts.config import CLUSTER, MAX_EXPERTS, THREADS, Config


def plan_of(config: Config) -> Plan:
    """One wave of clusters; each takes every `clusters`-th entry of the list.

    Tensor maps of weights and of given MXFP8 rows: each launch gives the number of rows.
    """
    maps: tuple[Parameter, ...] = ()
    if isinstance(config, BlockConfig):
        maps = tuple(
            Parameter(
                name,
                "tensor_map",
                config.tiles(name, MAX_EXPERTS),
                name != "x8_tiles" or config.mxfp8,
            )
            for name in config.maps
        )
    return Plan(
        grid=(CLUSTER * config.clusters, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=config.shared_memory,
        parameters=(
            *maps,
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

"""A builder of one's own, as `cluster_builder:BUILDER`: clusters, distributed memory, a number.

y[i] = factor * (sum of x[i] over the CTAs of a cluster), FP32, 32 elements a CTA, two clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs


@dataclass(frozen=True)
class ClusterBuilder:
    op: str = "cluster_builder:BUILDER"
    summary: str = "y = factor * the sum of x over each cluster"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        check_arch(arch)
        size = {"cluster": 4, **shape}["cluster"]
        if not 1 <= size <= 8:
            raise VariantError(f"cluster={size}; use 1 to 8")
        return Variant(self.op, f"c{size}", arch, pairs({"cluster": size}), pairs(config))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        return (self.variant(arch, {}, {}),)

    def plan(self, variant: Variant) -> Plan:
        size = variant.size("cluster")
        return Plan(
            (2 * size, 1, 1), (32, 1, 1), (size, 1, 1), 128,
            (Parameter("x", "pointer"), Parameter("y", "pointer"), Parameter("factor", "i32")),
        )  # fmt: skip

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import cluster_device

        size = variant.size("cluster")
        return cluster_device.ClusterSum(size), cluster_device.arguments(size)


BUILDER = ClusterBuilder()

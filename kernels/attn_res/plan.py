"""Launch geometry and shared memory of AttnRes where it stands alone. No DSL here."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.attn_res.config import Config
from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.common.geometry import CLUSTER, COLUMNS, CONSUMER_THREADS, residual_bytes

PART = 2 * COLUMNS * CONSUMER_THREADS  # bytes of a CTA's columns of a vector


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA: byte offsets, 16-byte aligned.

    First what each token exchanges. Then, where tokens share them, the weight vectors and the
    mbarrier that counts their bytes.
    """

    config: Config

    @property
    def shares(self) -> bool:
        """Whether the weight vectors come through shared memory."""
        return self.config.tokens > 1 and bool(self.config.vectors)

    @property
    def vectors(self) -> int:
        """The CTA's columns of the vectors, one after the other."""
        return self.config.tokens * residual_bytes(self.config.blocks)

    @property
    def vector_bytes(self) -> int:
        """Bytes of all of them."""
        return PART * len(self.config.vectors)

    @property
    def there(self) -> int:
        """The mbarrier."""
        return self.vectors + self.vector_bytes

    @property
    def total(self) -> int:
        """Bytes."""
        return self.there + 16 if self.shares else self.vectors


def plan_of(config: Config) -> Plan:
    """A cluster of 7 CTAs a token, or two."""
    return Plan(
        grid=(CLUSTER * config.clusters, 1, 1),
        block=(CONSUMER_THREADS * config.tokens, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=Shared(config).total,
        parameters=(
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

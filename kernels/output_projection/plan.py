"""Launch geometry and shared memory of the output projection's kernels. No DSL here."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.common.geometry import (
    CLUSTER,
    CONSUMER_THREADS,
    PAD,
    PARTS,
    REGISTER_K,
    ROWS,
    SUM_PITCH,
    UPPER_PAD,
    residual_bytes,
)
from k3fuse.kernels.common.mailbox import PRODUCERS
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER, Config

PRODUCER_THREADS = 256
FUSED_THREADS = PRODUCER_THREADS + CONSUMER_THREADS
FUSED_TOKENS = 8
GROUP = 16  # tokens that a producer takes at a time

# The first bytes of a producer's shared memory: an mbarrier for each buffer of x, one for the
# columns of W beyond the registers, and the number of the call.
X_THERE = 0
UPPER_THERE = 32
CALL = 40
HEADER = 64


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA: byte offsets, 16-byte aligned."""

    config: Config

    @property
    def tokens(self) -> int:
        """Tokens of one group."""
        return FUSED_TOKENS if self.config.stage == FUSED else GROUP

    @property
    def buffers(self) -> int:
        """Groups of x that fit at once: all of them, or two beside the upper half of W."""
        if self.config.stage == FUSED:
            return 1
        groups = -(-self.config.m // GROUP)
        return min(groups, 4 if self.config.k == REGISTER_K else 2)

    @property
    def reuses(self) -> bool:
        """Whether a buffer of x takes a second group."""
        return self.config.m > self.buffers * self.tokens

    @property
    def upper(self) -> int:
        """Columns of W beyond the registers."""
        return HEADER

    @property
    def x(self) -> int:
        """Rows of x: `buffers` groups of `tokens`."""
        rows = ROWS * (2 * (self.config.k - REGISTER_K) + UPPER_PAD)
        return self.upper + (rows if self.config.k > REGISTER_K else 0)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of x."""
        return self.tokens * pitch(self.config.k)

    @property
    def sums(self) -> int:
        """Partial sums."""
        return self.x + self.buffers * self.group_bytes

    @property
    def residual(self) -> int:
        """What the consumer exchanges."""
        return self.sums + PARTS * self.tokens * SUM_PITCH * 4

    @property
    def total(self) -> int:
        """Bytes."""
        if self.config.stage == CONSUMER:
            return residual_bytes(self.config.blocks)
        rest = residual_bytes(self.config.blocks) if self.config.stage == FUSED else 0
        return self.residual + rest


def pitch(k: int) -> int:
    """Bytes of a row of x in shared memory."""
    return 2 * k + PAD


def plan_of(config: Config) -> Plan:
    """The launch."""
    threads = {
        FUSED: FUSED_THREADS, PRODUCER: PRODUCER_THREADS, CONSUMER: CONSUMER_THREADS,
    }[config.stage]  # fmt: skip
    return Plan(
        grid=(CLUSTER * config.m if config.stage == CONSUMER else PRODUCERS, 1, 1),
        block=(threads, 1, 1),
        cluster=(CLUSTER, 1, 1),
        dynamic_smem=Shared(config).total,
        parameters=(
            *(Parameter(name, "pointer") for name in config.addresses),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )

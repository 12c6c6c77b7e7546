"""Build the attention projection: all linears of one row in one grid.

The ABI is the plan's parameter list (`config.py`):

    x [m, k] BF16, rows x_pitch apart
    weight0 .. [n_i, k] BF16, contiguous    up to eight
    out0 .. [m, n_i] BF16, contiguous       written; must not overlap an input
    m, x_pitch                              i32; the pitch in elements, a multiple of 8

All addresses are 16-byte aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.attention_projection.config import (
    CLUSTER,
    CLUSTERS,
    MAX_WEIGHTS,
    Config,
)
from k3fuse.kernels.attention_projection.plan import plan_of
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.gemm import BLOCK, MAX_OWNED
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES

# Rows of x start 64 bytes apart modulo 128 where a CTA's columns are a multiple of 64.
K_STEP = 2 * BLOCK * CLUSTER
SHAPE = {"m": 8, "k": HIDDEN, **{f"n{i}": 0 for i in range(MAX_WEIGHTS)}}
ROWS = (6288,)  # KDA on eight ranks, merged: what a variant without rows has


@dataclass(frozen=True)
class AttentionProjection:
    """Builder of `attention_projection`."""

    op: str = "attention_projection"
    summary: str = "y_i[M,N_i] = x[M,K] W_i[N_i,K]^T for up to 8 weights, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), k, n0 to n7 (rows of each weight, 0 behind the last one).

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        if config:
            raise VariantError(
                f"attention_projection has no config {min(config)!r}; it has none at all"
            )
        sizes = merged(self.op, "shape", SHAPE, shape)
        if not any(sizes[f"n{i}"] for i in range(MAX_WEIGHTS)):
            sizes |= rows_shape(ROWS)
        need(self.op, 1 <= sizes["m"] <= MAX_M, "m", sizes["m"], f"1 to {MAX_M}")
        k = sizes["k"]
        need(
            self.op,
            k % K_STEP == 0 and 0 < k <= HIDDEN,
            "k",
            k,
            f"a multiple of {K_STEP} up to {HIDDEN}",
        )
        given = [sizes[f"n{i}"] for i in range(MAX_WEIGHTS)]
        count = given.index(0) if 0 in given else MAX_WEIGHTS
        for i, rows in enumerate(given):
            need(
                self.op,
                rows > 0 if i < count else rows == 0,
                f"n{i}",
                rows,
                "rows, 0 behind the last",
            )
        made = _config(sizes)
        room = f"fewer rows: {MAX_OWNED * CLUSTERS} tiles of 32 fit, fewer for many tokens"
        need(self.op, made.geometry.fits, "rows", sum(made.rows), room)
        return Variant(self.op, made.name, arch, pairs(sizes), ())

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """The four merged weights of Kimi K3, for few and for many tokens."""
        return tuple(
            self.variant(arch, {"m": m, **rows_shape((rows,))}, {})
            for tp in TP_SIZES
            for rows in (sum(KDA[tp][0]), sum(MLA[tp][0]))
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """Up to 16 clusters of 8 CTAs."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.attention_projection import device
        from k3fuse.kernels.common.device.abi import arguments

        config = config_of(variant)
        return device.Gemm(config), arguments(config.addresses, config.sizes)


# Rows of Kimi K3's weights by group size, merged and apart. The merged KDA weight is padded to a
# multiple of 16. Source: the published shapes, as `patterns/attention_projection.py` has them.
KDA = {
    8: ((6288,), (1536, 1536, 1536, 1536, 128, 12)),
    16: ((3216,), (768, 768, 768, 768, 128, 6)),
}
MLA = {8: ((3648,), (1536, 576, 1536)), 16: ((2880,), (1536, 576, 768))}


def rows_shape(rows: Sequence[int]) -> dict[str, int]:
    """The part of a shape that holds the weights' rows."""
    return {f"n{i}": n for i, n in enumerate(rows)}


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `AttentionProjection.variant` made."""
    return _config(dict(variant.shape))


def _config(sizes: Mapping[str, int]) -> Config:
    rows = tuple(sizes[f"n{i}"] for i in range(MAX_WEIGHTS) if sizes[f"n{i}"])
    return Config(sizes["m"], sizes["k"], rows)


BUILDER = AttentionProjection()

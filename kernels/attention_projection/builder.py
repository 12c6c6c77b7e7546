"""Build the attention projection: all linears of one row in one grid, by one of two engines.

The stationary kernel (mma.sync, every chip) has the parameters

    x [m, k] BF16, rows x_pitch apart
    weight0 .. [n_i, k] BF16, contiguous    up to eight
    out0 .. [m, n_i] BF16, contiguous       written; must not overlap an input
    m, x_pitch                              i32; the pitch in elements, a multiple of 8

The stream kernel (tcgen05, sm_100a and sm_103a) has tensor maps of x and of the weights in their
place, whose rows may lie apart by multiples of 16 bytes, then the outputs and m.

All addresses are 16-byte aligned. The plans (`plan.py`) are the ABI.
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
from k3fuse.kernels.attention_projection.plan import plan_of, stream_plan_of
from k3fuse.kernels.attention_projection.stream_config import MAX_EARLY, MAX_STAGES, StreamConfig
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.gemm import BLOCK, MAX_OWNED
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES

# Rows of x start 64 bytes apart modulo 128 where a CTA's columns are a multiple of 64.
K_STEP = 2 * BLOCK * CLUSTER
SHAPE = {"m": 8, "k": HIDDEN, **{f"n{i}": 0 for i in range(MAX_WEIGHTS)}}
ROWS = (6288,)  # KDA on eight ranks, merged: what a variant without rows has
# Chips with tensor memory, which have the stream kernel and use it unless told otherwise.
STREAM_ARCHS = ("sm_100a", "sm_103a")
LIMITS = {"clusters": CLUSTERS, "stages": MAX_STAGES, "early": MAX_EARLY}


@dataclass(frozen=True)
class AttentionProjection:
    """Builder of `attention_projection`."""

    op: str = "attention_projection"
    summary: str = "y_i[M,N_i] = x[M,K] W_i[N_i,K]^T for up to 8 weights, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), k, n0 to n7 (rows of each weight, 0 behind the last one).

        config: stream, 1 for the stream kernel (where the chip has it, the default), 0 for the
        stationary one. Of the stream kernel also clusters (1 to 16), stages (1 to 14) and early (0
        to 32): the most clusters, blocks of W under way, and tiles whose sums do not wait for the
        end. Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
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
        has_stream = arch in STREAM_ARCHS
        tuning = merged(self.op, "config", {"stream": int(has_stream), **LIMITS}, config)
        engines = "0 or 1" if has_stream else f"0: {arch} has no tcgen05"
        need(self.op, tuning["stream"] in (0, int(has_stream)), "stream", tuning["stream"], engines)
        for name, most in LIMITS.items():
            least = 0 if name == "early" else 1
            value, fits = tuning[name], f"{least} to {most}"
            if not tuning["stream"]:
                least, fits = most, f"{most}, it limits the stream kernel alone"
            need(self.op, least <= value <= most, name, value, fits)
        made = _config(sizes, tuning)
        self._check_room(made)
        kept = tuning if tuning["stream"] else {"stream": 0}
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(kept))

    def _check_room(self, made: Config | StreamConfig) -> None:
        if isinstance(made, StreamConfig):
            fits, room = made.fits, "fewer rows or tokens: 512 columns of sums a CTA are the limit"
        else:
            fits = made.geometry.fits
            room = f"fewer rows: {MAX_OWNED * CLUSTERS} tiles of 32 fit, fewer for many tokens"
        need(self.op, fits, "rows", sum(made.rows), room)

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """The four merged weights of Kimi K3, for few and for many tokens, by each engine."""
        return tuple(
            self.variant(arch, {"m": m, **rows_shape((rows,))}, {"stream": stream})
            for stream in ((1, 0) if arch in STREAM_ARCHS else (0,))
            for tp in TP_SIZES
            for rows in (sum(KDA[tp][0]), sum(MLA[tp][0]))
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """Up to 16 clusters of 8 CTAs."""
        config = config_of(variant)
        return stream_plan_of(config) if isinstance(config, StreamConfig) else plan_of(config)

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        config = config_of(variant)
        if isinstance(config, StreamConfig):
            from k3fuse.kernels.attention_projection import stream_device

            return stream_device.Stream(config), stream_device.arguments(config)
        from k3fuse.kernels.attention_projection import device
        from k3fuse.kernels.common.device.abi import arguments

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


def config_of(variant: Variant) -> Config | StreamConfig:
    """The configuration of a variant that `AttentionProjection.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config | StreamConfig:
    rows = tuple(sizes[f"n{i}"] for i in range(MAX_WEIGHTS) if sizes[f"n{i}"])
    if tuning["stream"]:
        limits = (tuning[name] for name in LIMITS)
        return StreamConfig(sizes["m"], sizes["k"], rows, *limits)
    return Config(sizes["m"], sizes["k"], rows)


BUILDER = AttentionProjection()

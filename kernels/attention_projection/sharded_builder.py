"""Build the row-sharded attention projection: a share of the rows, one exchange, one launch.

The engines are those of `builder.py`; `share.py` says what a rank multiplies and how the rows meet.
The ABI is the plan's parameter list:

    x [m, k] BF16, equal on all ranks    a tensor map (stream), or an address (stationary)
    weight0 ..                           the parts of the weights, as `Share.parts` has them
    out0 .. [m, n_i] BF16, contiguous    written: one a weight, all its columns
    mailbox                              this rank's
    multicast, or mailbox0 ..            where to publish
    m, rank                              i32; of the stationary kernel then x_pitch, in elements

All addresses are 16-byte aligned. Every rank launches the same variant with the same m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3fuse.kernels.attention_projection.builder import (
    BUILDER as WHOLE,
)
from k3fuse.kernels.attention_projection.builder import (
    LIMITS,
    MLA,
    SHAPE,
    STREAM_ARCHS,
    config_of,
    rows_shape,
)
from k3fuse.kernels.attention_projection.config import MAX_WEIGHTS, Config
from k3fuse.kernels.attention_projection.plan import plan_of, stream_plan_of
from k3fuse.kernels.attention_projection.share import OWN, PIECE, Share
from k3fuse.kernels.attention_projection.stream_config import StreamConfig
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.gemm import MAX_OWNED
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES

OP = "attention_projection_sharded"
MAX_TP = 16
SIZES = {**SHAPE, "tp": 8, **{f"s{i}": 0 for i in range(MAX_WEIGHTS)}}
CONFIG = {"multicast": 1, "timeout": 0, "max_m": MAX_M, **LIMITS}
# Rows of Kimi K3's latent attention that all ranks have: q_a 1536, kv_a 512 + 64; by the rows of
# each weight, merged and apart. Source: the published shapes.
Q_A, KV_A = 1536, 576
SPLIT = {
    rows: ((Q_A + KV_A,) if len(rows) == 1 else (Q_A, KV_A, 0))
    for tp in TP_SIZES
    for rows in MLA[tp]
}


@dataclass(frozen=True)
class Sharded:
    """One kernel. engine: the configuration for the parts' rows. share: which rows those are."""

    engine: Config | StreamConfig
    share: Share

    @property
    def name(self) -> str:
        """Readable and unique."""
        engine = self.engine
        kind, less = ("stream_", engine.less) if isinstance(engine, StreamConfig) else ("", "")
        return f"{kind}m{engine.m}_k{engine.k}_{self.share.name}{less}"


@dataclass(frozen=True)
class ShardedProjection:
    """Builder of `attention_projection_sharded`."""

    op: str = OP
    summary: str = (
        "attention_projection, the rows that all ranks have split over them, one exchange"
    )

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m, k, n0 to n7 as `attention_projection` has them, tp, and s0 to s7: the leading
        rows of each weight that all ranks have alike.

        config: that of `attention_projection`, and multicast, timeout, max_m as `Share` has them.
        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SIZES, shape)
        if not any(sizes[f"n{i}"] for i in range(MAX_WEIGHTS)):
            sizes |= {**rows_shape(MLA[8][0]), **split_shape(SPLIT[MLA[8][0]])}
        has_stream = int(arch in STREAM_ARCHS)
        tuning = merged(self.op, "config", {"stream": has_stream, **CONFIG}, config)
        need(self.op, 1 <= sizes["tp"] <= MAX_TP, "tp", sizes["tp"], f"1 to {MAX_TP}")
        self._check_rows(sizes)
        need(self.op, tuning["multicast"] in (0, 1), "multicast", tuning["multicast"], "0 or 1")
        need(self.op, tuning["timeout"] >= 0, "timeout", tuning["timeout"], "0 or more")
        most = tuning["max_m"]
        need(self.op, sizes["m"] <= most <= MAX_M, "max_m", most, f"m to {MAX_M}")
        made = _config(arch, sizes, tuning)
        # The stationary kernel's last barrier's place holds the number of the call.
        if isinstance(made.engine, Config) and made.engine.geometry.owned >= MAX_OWNED:
            raise VariantError(f"{self.op}: {sum(made.engine.rows)} rows a rank; use fewer")
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(tuning))

    def _check_rows(self, sizes: Mapping[str, int]) -> None:
        unit = OWN * sizes["tp"]
        unit *= 1 if unit % PIECE == 0 else 2
        count = _count(sizes)
        for i in range(MAX_WEIGHTS):
            rows, split = sizes[f"n{i}"], sizes[f"s{i}"]
            fits = rows > 0 if i < count else rows == 0
            need(self.op, fits, f"n{i}", rows, "rows, 0 behind the last")
            fits = 0 <= split <= rows and split % unit == 0
            said = f"a multiple of {unit} up to n{i}={rows}: {OWN} rows a rank"
            need(self.op, fits, f"s{i}", split, said)
            need(self.op, not split or rows % PIECE == 0, f"n{i}", rows, f"a multiple of {PIECE}")
        need(self.op, any(sizes[f"s{i}"] for i in range(MAX_WEIGHTS)), "s0", 0, "rows to split")

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """Kimi K3's merged latent attention, for few and for many tokens."""
        return tuple(
            self.variant(
                arch,
                {"m": m, "tp": tp, **rows_shape(MLA[tp][0]), **split_shape(SPLIT[MLA[tp][0]])},
                {},
            )
            for tp in TP_SIZES
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """Up to 16 clusters of 8 CTAs, all resident at once."""
        made = sharded_of(variant)
        engine, share = made.engine, made.share
        streams = isinstance(engine, StreamConfig)
        plan = stream_plan_of(engine) if isinstance(engine, StreamConfig) else plan_of(engine)
        read = [p for p in plan.parameters if p.name == "x" or p.name.startswith("weight")]
        sizes = ("m", "rank") if streams else ("m", "rank", "x_pitch")
        parameters = (
            *read,
            *(Parameter(name, "pointer") for name in share.pointers),
            *(Parameter(name, "i32") for name in sizes),
        )
        return replace(plan, parameters=parameters)

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.attention_projection import sharded_device

        made = sharded_of(variant)
        if isinstance(made.engine, StreamConfig):
            kernel = sharded_device.ShardedStream(made.engine, made.share)
            return kernel, sharded_device.stream_arguments(made.engine, made.share)
        gemm = sharded_device.ShardedGemm(made.engine, made.share)
        return gemm, sharded_device.arguments(made.engine, made.share)


def split_shape(split: Sequence[int]) -> dict[str, int]:
    """The part of a shape that holds the rows which all ranks have."""
    return {f"s{i}": n for i, n in enumerate(split)}


def sharded_of(variant: Variant) -> Sharded:
    """The configuration of a variant that `ShardedProjection.variant` made."""
    return _config(variant.arch, dict(variant.shape), dict(variant.config))


def _count(sizes: Mapping[str, int]) -> int:
    """How many weights there are."""
    return next((i for i in range(MAX_WEIGHTS) if not sizes[f"n{i}"]), MAX_WEIGHTS)


def _config(arch: str, sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Sharded:
    count = _count(sizes)
    share = Share(
        sizes["tp"],
        tuple(sizes[f"n{i}"] for i in range(count)),
        tuple(sizes[f"s{i}"] for i in range(count)),
        bool(tuning["multicast"]),
        tuning["timeout"],
        tuning["max_m"],
    )
    shape = {"m": sizes["m"], "k": sizes["k"], **rows_shape([p.rows for p in share.parts])}
    limits = {name: tuning[name] for name in ("stream", *LIMITS)}
    return Sharded(config_of(WHOLE.variant(arch, shape, limits)), share)


BUILDER = ShardedProjection()

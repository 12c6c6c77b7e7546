"""Build the experts kernel: routed MXFP4 experts and the shared expert's down-projection.

The ABI is the plan's parameter list (`config.py`):

    x [m, latent] BF16, rows x_pitch apart             or, with config mxfp8,
    x [m, latent] E4M3 and x_scale [m, latent / 32] E8M0, u8, contiguous
    ids [m, top_k] i64 (i32), weights [m, top_k] BF16 (FP32), contiguous
    w13 [experts, 2 inter, latent / 2], w13_scale [experts, 2 inter, latent / 32] u8: gate, then up
    w2 [experts, latent, inter / 2], w2_scale [experts, latent, inter / 32] u8
                                       or all four as `layouts.py` has them (config shuffled)
    rows [m, top_k, latent] BF16       scratch: what was in it does not matter
    arrivals [m, 8, 7] i32             scratch: zeros before the first launch, and after each one
    routed [m, latent] BF16            written: the weighted sum of the rows in slot order
    shared_x [m, shared] BF16, rows shared_pitch apart
    shared_down [hidden, shared] BF16, contiguous
    shared_out [m, hidden] BF16        written
    m, experts, x_pitch                i32; pitches in elements, multiples of 8; no x_pitch with
                                       mxfp8
    beta, linear_beta                  i32, the bits of FP32
    shared_pitch                       i32

All addresses are 16-byte aligned; outputs and scratch overlap nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES
from k3fuse.kernels.experts.block_config import BlockConfig, fits_block
from k3fuse.kernels.experts.block_shuffled import ShuffledBlockConfig, fits_shuffled
from k3fuse.kernels.experts.config import (
    CLUSTER,
    CLUSTERS,
    GROUP,
    SHARED_ROWS,
    TOP_K,
    WARPS,
    Config,
)
from k3fuse.kernels.experts.plan import plan_of

# Kimi K3's latent row, and the widths of its routed and shared experts over all ranks.
LATENT, INTER, SHARED = 3584, 3072, 6144
SHAPE = {"m": 8, "tp": 8, "latent": LATENT, "hidden": HIDDEN, "top_k": TOP_K}
CONFIG = {
    "clusters": CLUSTERS, "floor": 0, "float_weights": 0, "wide_ids": 1, "shuffled": 0, "mxfp8": 0,
    "block": 0,
}  # fmt: skip
# Architectures with tcgen05, which have the block-scaled engine.
BLOCK_ARCHS = ("sm_100a", "sm_103a")
# Architectures without packed FP32 arithmetic.
SCALAR = ("sm_90a",)
LATENT_STEP = 16 * CLUSTER * WARPS
INTER_STEP = 8 * CLUSTER
MAX_LATENT = 4 * LATENT_STEP  # a lane adds up two columns, a warp 64
SHARED_STEP = 192


@dataclass(frozen=True)
class ExpertsBuilder:
    """Builder of `experts`."""

    op: str = "experts"
    summary: str = "MXFP4 experts of x[M,L] with SiTU, summed over slots; shared down beside them"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), tp, latent, inter, hidden, shared (0: without), top_k.

        tp: ranks, which say how wide inter and shared are where those are not given.
        config: clusters; floor, float_weights, wide_ids, shuffled, mxfp8 (0, 1). Raises
        VariantError naming the value and what would fit.
        """
        check_arch(arch)
        tp = shape.get("tp", SHAPE["tp"])
        need(self.op, tp in TP_SIZES, "tp", tp, " or ".join(map(str, TP_SIZES)))
        sizes = merged(self.op, "shape", {**SHAPE, **k3(tp, SHAPE["m"])}, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        m, latent, inter = sizes["m"], sizes["latent"], sizes["inter"]
        need(self.op, 1 <= m <= MAX_M, "m", m, f"1 to {MAX_M}")
        fits = latent % LATENT_STEP == 0 and 0 < latent <= MAX_LATENT
        need(self.op, fits, "latent", latent, f"a multiple of {LATENT_STEP} up to {MAX_LATENT}")
        fits = inter % INTER_STEP == 0 and 0 < inter <= LATENT
        need(self.op, fits, "inter", inter, f"a positive multiple of {INTER_STEP}")
        need(self.op, 1 <= sizes["top_k"] <= TOP_K, "top_k", sizes["top_k"], f"1 to {TOP_K}")
        clusters = tuning["clusters"]
        need(self.op, 1 <= clusters <= CLUSTERS, "clusters", clusters, f"1 to {CLUSTERS}")
        for flag in ("floor", "float_weights", "wide_ids", "shuffled", "mxfp8", "block"):
            need(self.op, tuning[flag] in (0, 1), flag, tuning[flag], "0 or 1")
        if tuning["block"]:
            need(self.op, arch in BLOCK_ARCHS, "block", 1, f"0: {arch} has no tcgen05")
            step = "a multiple of 64 up to 512 with block=1"
            need(self.op, fits_block(latent, inter), "inter", inter, step)
            fits = not tuning["shuffled"] or fits_shuffled(latent, inter)
            step = (
                "192 or a multiple of 128 with block=1 and shuffled=1, and latent a multiple of "
                f"{CLUSTER * GROUP}, which {latent} has to be"
            )
            need(self.op, fits, "inter", inter, step)
        if sizes["shared"] == 0:
            sizes["hidden"] = 0
        else:
            rows = SHARED_ROWS * CLUSTER * clusters
            need(self.op, sizes["hidden"] == rows, "hidden", sizes["hidden"], f"{rows} rows")
            fits = sizes["shared"] > 0 and sizes["shared"] % SHARED_STEP == 0
            step = f"a multiple of {SHARED_STEP}, or 0"
            need(self.op, fits, "shared", sizes["shared"], step)
        made = _config(arch, sizes, tuning)
        need(self.op, made.fits, "inter", inter, "a narrower expert: two stages have to fit")
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """Kimi K3 on 8 and on 16 ranks, for few and for many tokens.

        Both orders of weights where the block-scaled engine is.
        """
        forms = [(0, 0), (1, 0), (1, 1)] if arch in BLOCK_ARCHS else [(0, 0)]
        return tuple(
            self.variant(arch, k3(tp, m), {"mxfp8": mxfp8, "block": engine, "shuffled": order})
            for engine, order in forms
            for mxfp8 in (0, 1)
            for tp in TP_SIZES
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """16 clusters of 8 CTAs."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        config = config_of(variant)
        if isinstance(config, BlockConfig):
            from k3fuse.kernels.experts import block_device

            return block_device.BlockExperts(config), block_device.arguments(config)
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.experts import device

        return device.Experts(config), arguments(config.addresses, config.sizes)


def k3(tp: int, m: int) -> dict[str, int]:
    """The shape of Kimi K3 on `tp` ranks, for up to m tokens."""
    return {"m": m, "tp": tp, "inter": INTER // tp, "shared": SHARED // tp}


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `ExpertsBuilder.variant` made."""
    return _config(variant.arch, dict(variant.shape), dict(variant.config))


def _config(arch: str, sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    kind = Config
    if tuning["block"]:
        kind = ShuffledBlockConfig if tuning["shuffled"] else BlockConfig
    return kind(
        **{name: size for name, size in sizes.items() if name != "tp"},
        clusters=tuning["clusters"],
        floor=bool(tuning["floor"]),
        float_weights=bool(tuning["float_weights"]),
        wide_ids=bool(tuning["wide_ids"]),
        shuffled=bool(tuning["shuffled"]),
        mxfp8=bool(tuning["mxfp8"]),
        packed=arch not in SCALAR,
    )


BUILDER = ExpertsBuilder()

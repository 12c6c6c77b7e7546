"""Build AttnRes where it stands alone: a cluster of seven CTAs a token, or two.

The ABI is the plan's parameter list (`config.py`):

    prefix, delta [m, 7168] BF16, prefix_pitch and delta_pitch apart    delta 0 without one
    score_norm, score_proj, out_norm [7168] BF16                        out_norm 0 without a norm
    out, new_prefix [m, 7168] BF16, contiguous                          new_prefix 0 without a delta
    block0 .. [m, 7168] BF16, block_pitch apart
    m, pitches in elements (multiples of 8), eps, out_eps               i32, eps as bits of a float

All addresses are 16-byte aligned; outputs must not overlap inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.attn_res.config import Config
from k3fuse.kernels.attn_res.plan import Shared, plan_of
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.mailbox import MAX_M

SHAPE = {"m": 8, "blocks": 8}
CONFIG = {"delta": 1, "norm": 1, "round_mix": 0, "packed": 1}
MAX_BLOCKS = 8
SCALAR = ("sm_90a",)  # architectures without f32x2


@dataclass(frozen=True)
class AttnRes:
    """Builder of `attn_res`."""

    op: str = "attn_res"
    summary: str = "score, mix and norm of up to 8 blocks and a prefix, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), blocks (0..8); config delta, norm, round_mix, packed (0, 1).

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        need(self.op, 1 <= sizes["m"] <= MAX_M, "m", sizes["m"], f"1 to {MAX_M}")
        need(
            self.op,
            0 <= sizes["blocks"] <= MAX_BLOCKS,
            "blocks",
            sizes["blocks"],
            f"0 to {MAX_BLOCKS}",
        )
        if "packed" not in config:
            tuning["packed"] = int(arch not in SCALAR)
        need(self.op, not (tuning["packed"] and arch in SCALAR), "packed", 1, f"0 on {arch}")
        for name in CONFIG:
            need(self.op, tuning[name] in (0, 1), name, tuning[name], "0 or 1")
        name = _config(sizes, tuning).name
        return Variant(self.op, name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """0, 4 and 8 blocks at M = 8, and the largest batch."""
        made = [self.variant(arch, {"blocks": blocks}, {}) for blocks in (0, 4, 8)]
        return (*made, self.variant(arch, {"m": MAX_M}, {}))

    def plan(self, variant: Variant) -> Plan:
        """A cluster of 7 CTAs a token, or two."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.attn_res import device
        from k3fuse.kernels.common.device.abi import arguments

        config = config_of(variant)
        return device.AttnRes(config, Shared(config)), arguments(config.addresses, config.sizes)


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `AttnRes.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    return Config(sizes["m"], sizes["blocks"], *(bool(tuning[name]) for name in CONFIG))


BUILDER = AttnRes()

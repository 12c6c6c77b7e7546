"""Build the output projection's kernels: fused, or producer and consumer.

The ABI is the plan's parameter list (`config.py`): addresses, then 32-bit integers.

    x [m, k] BF16, rows x_pitch elements apart         this rank's heads
    weight [7168, k] BF16, contiguous                  16-byte aligned, as all addresses are
    mailbox                                            this rank's, `kernels/common/mailbox.py`
    prefix [m, 7168] BF16, prefix_pitch apart          residual stream (0 without a prefix)
    score_norm, score_proj, out_norm [7168] BF16       weights (0 where the form has none)
    out, new_prefix [m, 7168] BF16, contiguous         written; must not overlap an input
    block0 .. [m, 7168] BF16, block_pitch apart        AttnRes blocks
    multicast, or mailbox0 .. of all ranks             where to publish
    m, rank, x_pitch, prefix_pitch, block_pitch        i32, pitches in elements
    eps, out_eps                                       i32, the bits of a float

Pitches are multiples of 8 elements. Every rank launches the same variant with the same m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.geometry import REGISTER_K
from k3fuse.kernels.common.mailbox import MAX_M
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER, Config
from k3fuse.kernels.output_projection.plan import FUSED_TOKENS, Shared, plan_of

RANKS = (8, 16)
SHAPE = {"m": FUSED_TOKENS, "tp": 8, "k": 0}
FLAGS = ("prefix", "norm", "round_mix", "round_before", "multicast", "two_shot", "packed")
CONFIG = {
    "stage": FUSED, "blocks": 8, "prefix": 1, "norm": 1, "round_mix": 0, "round_before": 0,
    "multicast": 1, "two_shot": 0, "max_m": MAX_M, "timeout": 0, "packed": 1,
}  # fmt: skip
MAX_BLOCKS = 8
SCALAR = ("sm_90a",)  # architectures without f32x2


@dataclass(frozen=True)
class OutputProjection:
    """Builder of `output_projection`."""

    op: str = "output_projection"
    summary: str = "o-proj, mailbox all-reduce, then AttnRes or add + RMSNorm, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), tp (8, 16), k (12288 / tp by default); config as `Config`.

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        if "packed" not in config:
            tuning["packed"] = int(arch not in SCALAR)
        need(self.op, not (tuning["packed"] and arch in SCALAR), "packed", 1, f"0 on {arch}")
        stage = tuning["stage"]
        need(self.op, stage in (FUSED, PRODUCER, CONSUMER), "stage", stage, "0, 1 or 2")
        need(self.op, sizes["tp"] in RANKS, "tp", sizes["tp"], "8 or 16")
        sizes["k"] = sizes["k"] or 16 * REGISTER_K // sizes["tp"]
        need(self.op, sizes["k"] in (REGISTER_K, 2 * REGISTER_K), "k", sizes["k"], "768 or 1536")
        most = FUSED_TOKENS if stage == FUSED else MAX_M
        need(self.op, 1 <= sizes["m"] <= most, "m", sizes["m"], f"1 to {most}")
        for name in FLAGS:
            need(self.op, tuning[name] in (0, 1), name, tuning[name], "0 or 1")
        blocks = tuning["blocks"]
        need(self.op, -1 <= blocks <= MAX_BLOCKS, "blocks", blocks, f"-1 to {MAX_BLOCKS}")
        fits = blocks >= 0 or (tuning["prefix"] and tuning["norm"])
        need(
            self.op,
            bool(fits),
            "blocks",
            blocks,
            "prefix=1 and norm=1 with blocks=-1 (add + RMSNorm)",
        )
        fits = blocks < 0 or not tuning["round_before"]
        need(self.op, bool(fits), "round_before", 1, "it with blocks=-1 (add + RMSNorm)")
        need(
            self.op,
            not (stage == FUSED and tuning["two_shot"]),
            "two_shot",
            1,
            "it with stage 1 and 2",
        )
        need(self.op, sizes["m"] <= tuning["max_m"] <= MAX_M, "max_m", tuning["max_m"], "m to 64")
        need(self.op, tuning["timeout"] >= 0, "timeout", tuning["timeout"], "0 or more")
        made = _config(sizes, tuning)
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """The kernels of one layer: fused; producer and consumer, both ways of exchange."""
        made = []
        for tp in RANKS:
            made.append(self.variant(arch, {"tp": tp}, {}))
            for two_shot in (0, 1):
                for stage in (PRODUCER, CONSUMER):
                    tuning = {"stage": stage, "two_shot": two_shot}
                    made.append(self.variant(arch, {"tp": tp, "m": MAX_M}, tuning))
        return tuple(made)

    def plan(self, variant: Variant) -> Plan:
        """112 CTAs in clusters of 7, or a cluster of 7 a token."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.output_projection import device, split_device

        config = config_of(variant)
        kinds: dict[int, Any] = {
            FUSED: device.Fused, PRODUCER: split_device.Producer, CONSUMER: split_device.Consumer,
        }  # fmt: skip
        kernel = kinds[config.stage](config, Shared(config))
        return kernel, arguments(config.addresses, config.sizes)


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `OutputProjection.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    values: dict[str, Any] = {name: bool(tuning[name]) for name in FLAGS}
    values |= {name: tuning[name] for name in ("stage", "blocks", "max_m", "timeout")}
    return Config(m=sizes["m"], tp=sizes["tp"], k=sizes["k"], **values)


BUILDER = OutputProjection()

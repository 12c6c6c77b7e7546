"""Build the tail's kernel.

The ABI is the plan's parameter list (`config.py`): addresses, then 32-bit integers.

    routed [m, 3584] BF16, rows routed_pitch apart     this rank's sum over its experts
    shared [m, H] BF16, rows shared_pitch apart        this rank's part of the shared expert
    norm [3584] BF16                                   weight of the latent's RMSNorm
    weight [H, 3584] BF16, contiguous                  up-projection; H / tp rows of it are read
    out [m, H] BF16, contiguous                        written; must not overlap an input
    mailbox                                            this rank's, `kernels/tail/mailbox.py`
    multicast (if so built), mailbox0 ..               where to publish, by rank
    m, rank, routed_pitch, shared_pitch                i32, pitches in elements, multiples of 8
    eps                                                i32, the bits of a float

With blocks >= 0 the next layer's AttnRes follows, of which `out` is the delta:

    prefix [m, H] BF16, rows prefix_pitch apart        the residual stream
    score_norm, score_proj, out_norm [H] BF16          out_norm 0 without a norm
    mixed, new_prefix [m, H] BF16, contiguous          written; must not overlap an input
    block0 .. [m, H] BF16, rows block_pitch apart
    prefix_pitch, block_pitch, mix_eps, out_eps        i32, as above

All addresses are 16-byte aligned. Every rank launches the same variant with the same m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.geometry import CONSUMER_WARPS, HIDDEN, ROWS
from k3fuse.kernels.common.mailbox import MAX_M
from k3fuse.kernels.tail.config import CLUSTER, WARPS, Config
from k3fuse.kernels.tail.mailbox import CTAS
from k3fuse.kernels.tail.plan import plan_of

RANKS = (2, 4, 8, 16)
SHAPE = {"m": 8, "tp": 8, "rows": 0}
FLAGS = ("two_shot", "round_before", "multicast", "packed", "norm", "round_mix")
CONFIG = {
    "units": 0, "two_shot": 0, "round_before": 1, "multicast": 1, "max_m": MAX_M, "timeout": 0,
    "packed": 1, "blocks": -1, "norm": 1, "round_mix": 0,
}  # fmt: skip
MAX_BLOCKS = 8
MIXED_TOKENS = 8  # that AttnRes may follow in the same launch
SCALAR = ("sm_90a",)  # architectures without f32x2
MOST_ROWS = CTAS // CLUSTER * ROWS
# Up to so many tokens a rank of eight takes 14 clusters, above 7: each reads the latent rows again.
MANY_CLUSTERS = 8


@dataclass(frozen=True)
class Tail:
    """Builder of `tail`."""

    op: str = "tail"
    summary: str = (
        "latent all-reduce, RMSNorm, up-projection, shared add, all-gather, BF16, M <= 64; "
        "AttnRes behind it, M <= 8"
    )

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), tp, rows (this rank's, 7168 / tp by default); config as `Config`.

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        if "packed" not in config:
            tuning["packed"] = int(arch not in SCALAR)
        need(self.op, not (tuning["packed"] and arch in SCALAR), "packed", 1, f"0 on {arch}")
        m, tp = sizes["m"], sizes["tp"]
        need(self.op, tp in RANKS, "tp", tp, "2, 4, 8 or 16")
        rows = sizes["rows"] = sizes["rows"] or HIDDEN // tp
        need(self.op, 1 <= m <= MAX_M, "m", m, f"1 to {MAX_M}")
        for name in FLAGS:
            need(self.op, tuning[name] in (0, 1), name, tuning[name], "0 or 1")
        units = tuning["units"] = tuning["units"] or default_units(m, rows)
        need(self.op, units in (1, 2), "units", units, "1 or 2")
        fits = 0 < rows <= units * MOST_ROWS and rows % (ROWS * units) == 0
        room = f"a multiple of {ROWS * units} up to {units * MOST_ROWS}"
        need(self.op, fits, "rows", rows, room)
        need(self.op, m <= tuning["max_m"] <= MAX_M, "max_m", tuning["max_m"], "m to 64")
        need(self.op, tuning["timeout"] >= 0, "timeout", tuning["timeout"], "0 or more")
        blocks = tuning["blocks"]
        need(self.op, -1 <= blocks <= MAX_BLOCKS, "blocks", blocks, f"-1 to {MAX_BLOCKS}")
        if blocks >= 0:
            made = _config(sizes, tuning)
            most = min(MIXED_TOKENS, made.clusters * (WARPS // CONSUMER_WARPS))
            need(self.op, m <= most, "m", m, f"1 to {most} with blocks={blocks}")
            need(
                self.op, made.hidden == HIDDEN, "rows", rows, f"{HIDDEN} / tp where AttnRes follows"
            )
        return Variant(self.op, _config(sizes, tuning).name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """The kernels of few and of many tokens, one-shot and two-shot."""
        made = []
        for tp in (8, 16):
            for m in (8, 16, 32, MAX_M):
                made.append(self.variant(arch, {"tp": tp, "m": m}, {}))
        made.append(self.variant(arch, {"tp": 16, "m": MAX_M}, {"two_shot": 1}))
        made += [self.variant(arch, {"tp": tp}, {"blocks": MAX_BLOCKS}) for tp in (8, 16)]
        return tuple(made)

    def plan(self, variant: Variant) -> Plan:
        """7 or 14 clusters of 8 CTAs of 448 threads."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.tail.device import Tail as Kernel

        config = config_of(variant)
        return Kernel(config), arguments(config.addresses, config.sizes)


def default_units(m: int, rows: int) -> int:
    """Times 64 rows that a cluster has: two where there are tokens enough and rows for it."""
    return 2 if rows % (2 * ROWS) == 0 and m > MANY_CLUSTERS else 1


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `Tail.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    values: dict[str, Any] = {name: bool(tuning[name]) for name in FLAGS}
    values |= {name: tuning[name] for name in ("units", "max_m", "timeout", "blocks")}
    return Config(m=sizes["m"], tp=sizes["tp"], rows=sizes["rows"], **values)


BUILDER = Tail()

"""Build the route kernel: the choice of experts from the front kernel's rows, or from plain logits.

The ABI is the plan's parameter list (`route_config.py`), those of these that the form has:

    mailbox                              this rank's, `layout.py`
    logits [m, E] FP32                   local_logits: read instead of the mailbox
    latent_in [m, L] BF16                local_latent: likewise
    bias [E] FP32                        correction bias
    weights [m, k] BF16 or FP32          written, as all below
    ids [m, k] int64
    logits_out [m, E] FP32               gather (top_k = 0)
    latent [m, L] BF16                   where it comes from the mailbox
    latent_q [m, L], latent_scale [m, L / 32] uint8     quantize
    plan int32 [PLAN_WORDS]              plan; only as far as its units go
    arrivals                             plan: a word of this rank, 0 before the first call
    m, scale, eps                        i32, the latter the bits of floats; m alone for gather

All tensors are contiguous, all addresses but that of arrivals 16-byte aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.mailbox import MAX_M
from k3fuse.kernels.router.layout import EXPERTS, LATENT
from k3fuse.kernels.router.route_config import (
    BLOCK,
    EACH,
    MAX_EXPERTS,
    MAX_TOP_K,
    PIECE,
    Config,
    plan_of,
)
from k3fuse.kernels.router.units import MAX_UNITS

SHAPE = {"m": 8, "e": EXPERTS, "l": LATENT, "k": 16, "tp": 8}
CONFIG = {
    "local_logits": 0, "local_latent": 0, "softmax": 0, "bias": 1, "renormalize": 1, "wide": 0,
    "quantize": 0, "plan": 0, "max_m": MAX_M, "timeout": 0,
}  # fmt: skip
FLAGS = tuple(name for name in CONFIG if name not in ("max_m", "timeout"))


@dataclass(frozen=True)
class Route:
    """Builder of `router_route`."""

    op: str = "router_route"
    summary: str = "top k of up to 1024 experts, weights, latent row in BF16 and MXFP8, expert plan"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), e (experts), l (latent columns, 0 for none), k (0: gather), tp.

        config as `route_config.Config`. Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        for name in FLAGS:
            need(self.op, tuning[name] in (0, 1), name, tuning[name], "0 or 1")
        experts, latent, top_k = sizes["e"], sizes["l"], sizes["k"]
        need(self.op, 1 <= sizes["m"] <= MAX_M, "m", sizes["m"], f"1 to {MAX_M}")
        need(self.op, 1 <= experts <= MAX_EXPERTS, "e", experts, f"1 to {MAX_EXPERTS}")
        most = min(MAX_TOP_K, experts)
        need(self.op, 0 <= top_k <= most, "k", top_k, f"1 to {most}, 0 for gather")
        need(self.op, sizes["tp"] >= 1, "tp", sizes["tp"], "1 or more")
        step = BLOCK if tuning["quantize"] else PIECE
        need(self.op, latent >= 0 and latent % step == 0, "l", latent, f"a multiple of {step}")
        self._sources(sizes, tuning)
        need(self.op, sizes["m"] <= tuning["max_m"] <= MAX_M, "max_m", tuning["max_m"], "m to 64")
        need(self.op, tuning["timeout"] >= 0, "timeout", tuning["timeout"], "0 or more")
        made = _config(sizes, tuning)
        need(self.op, made.roles > 0, "k", top_k, "k=16: nothing is left to do")
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(tuning))

    def _sources(self, sizes: Mapping[str, int], tuning: Mapping[str, int]) -> None:
        """Refuse columns that the ranks do not share out in whole pieces, and flags without use."""
        experts, latent, tp = sizes["e"], sizes["l"], sizes["tp"]
        each = EACH * tp
        whole = tuning["local_logits"] or experts % each == 0
        need(self.op, bool(whole), "e", experts, f"a multiple of {each} with a mailbox")
        whole = tuning["local_latent"] or latent % (PIECE * tp) == 0
        need(self.op, bool(whole), "l", latent, f"a multiple of {PIECE * tp} with a mailbox")
        if tuning["quantize"] and not latent:
            raise VariantError(f"{self.op}: quantize=1 without a latent row; use quantize=0")
        if tuning["plan"]:
            units = sizes["m"] * sizes["k"]
            need(self.op, 0 < units <= MAX_UNITS, "k", sizes["k"], "m k of 1 to 1024 with plan=1")

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """Kimi K3's forms: eight tokens and the largest batch, gather, plain logits."""
        plain = {"local_logits": 1, "local_latent": 1}
        return (
            self.variant(arch, {}, {"quantize": 1}),
            self.variant(arch, {"tp": 16}, {"quantize": 1}),
            self.variant(arch, {"m": MAX_M}, {"quantize": 1, "plan": 1}),
            self.variant(arch, {"k": 0}, {}),
            self.variant(arch, {"m": 1}, {**plain, "quantize": 1}),
        )

    def plan(self, variant: Variant) -> Plan:
        """One or two CTAs a token."""
        return plan_of(config_of(variant))

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.router import route_device

        config = config_of(variant)
        return route_device.Route(config), arguments(config.pointers, config.sizes)


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `Route.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    values: dict[str, Any] = {name: bool(tuning[name]) for name in FLAGS}
    return Config(
        m=sizes["m"], experts=sizes["e"], latent=sizes["l"], tp=sizes["tp"], top_k=sizes["k"],
        max_m=tuning["max_m"], timeout=tuning["timeout"], **values,
    )  # fmt: skip


BUILDER = Route()

"""Build the front kernel: logits, latent row and shared hidden row in one grid.

The ABI is the plan's parameter list (`front_config.py`): addresses, then 32-bit integers.

    x [m, k] BF16, rows x_pitch elements apart     the row behind attention, equal on all ranks
    mailbox                                        this rank's, `layout.py`
    gate_weight [E, k] BF16, contiguous            the whole weight; rank r reads its E / tp rows
    latent_weight [L, k] BF16, contiguous          likewise
    shared_gate, shared_up [S, k] BF16, contiguous this rank's; halves of one weight or apart
    hidden [m, S] BF16, contiguous                 written: SiTU of gate and up
    multicast, or mailbox0 .. of all ranks         where to publish
    m, rank, x_pitch                               i32
    beta, linear_beta                              i32, the bits of a float

All addresses are 16-byte aligned, x_pitch is a multiple of 8. Every rank launches the same variant
with the same m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.gemm import BLOCK, MAX_OWNED
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES
from k3fuse.kernels.router.front_config import CLUSTER, Config
from k3fuse.kernels.router.layout import EXPERTS, LATENT

SHARED = 6144  # columns of Kimi K3's shared hidden row, over all ranks
K_STEP = 2 * BLOCK * CLUSTER
SHAPE = {"m": 8, "tp": 8, "k": HIDDEN, "experts": EXPERTS, "latent": LATENT, "shared": 0}
CONFIG = {"multicast": 1, "replicated": 0, "max_m": MAX_M}
MAX_TP = 16


@dataclass(frozen=True)
class Front:
    """Builder of `router_front`."""

    op: str = "router_front"
    summary: str = "logits, latent row, shared SiTU of one row, sharded over ranks, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), tp, k, experts, latent, shared; config as `Config`.

        Raises VariantError naming the value and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        tp, k = sizes["tp"], sizes["k"]
        need(self.op, 1 <= sizes["m"] <= MAX_M, "m", sizes["m"], f"1 to {MAX_M}")
        need(self.op, 1 <= tp <= MAX_TP, "tp", tp, f"1 to {MAX_TP}")
        fits = k % K_STEP == 0 and 0 < k <= HIDDEN
        need(self.op, fits, "k", k, f"a multiple of {K_STEP} up to {HIDDEN}")
        for name, least in (("experts", 1), ("latent", 0)):
            fits = sizes[name] >= least and sizes[name] % (4 * tp) == 0
            need(self.op, fits, name, sizes[name], f"a multiple of {4 * tp}, 4 columns a rank")
        fits = sizes["shared"] >= 0 and sizes["shared"] % 2 == 0
        need(self.op, fits, "shared", sizes["shared"], "an even number of columns, or 0")
        for name in ("multicast", "replicated"):
            need(self.op, tuning[name] in (0, 1), name, tuning[name], "0 or 1")
        most = tuning["max_m"]
        need(self.op, sizes["m"] <= most <= MAX_M, "max_m", most, f"m to {MAX_M}")
        made = _config(sizes, tuning)
        # The last barrier's place holds the number of the call.
        fits = made.geometry.fits and made.geometry.owned < MAX_OWNED
        if not fits:
            raise VariantError(
                f"{self.op}: {sum(made.rows)} rows are outside the kernel; use fewer rows or tokens"
            )
        return Variant(self.op, made.name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """The kernels of Kimi K3, with and without the shared expert, for few and many tokens."""
        return tuple(
            self.variant(arch, {"m": m, "tp": tp, "shared": shared}, {})
            for tp in TP_SIZES
            for shared in (0, SHARED // tp)
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """Clusters of 16 CTAs, a warp for each of a cluster's tiles."""
        config = config_of(variant)
        geometry = config.geometry
        return Plan(
            grid=(geometry.ctas, 1, 1),
            block=(32 * geometry.warps, 1, 1),
            cluster=(geometry.cluster, 1, 1),
            dynamic_smem=geometry.shared,
            parameters=(
                *(Parameter(name, "pointer") for name in config.addresses),
                *(Parameter(name, "i32") for name in config.sizes),
            ),
            pdl=True,
        )

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.router import front_device

        config = config_of(variant)
        return front_device.Front(config), arguments(config.addresses, config.sizes)


def config_of(variant: Variant) -> Config:
    """The configuration of a variant that `Front.variant` made."""
    return _config(dict(variant.shape), dict(variant.config))


def _config(sizes: Mapping[str, int], tuning: Mapping[str, int]) -> Config:
    whole = {name: sizes[name] for name in ("m", "tp", "k", "experts", "latent", "shared")}
    return Config(
        **whole,
        max_m=tuning["max_m"],
        multicast=bool(tuning["multicast"]),
        replicated=bool(tuning["replicated"]),
    )


BUILDER = Front()

"""Build gate and up of the shared expert: SiTU(x gate^T, x up^T), where no other kernel makes it.

The ABI is the plan's parameter list:

    x [m, k] BF16, rows x_pitch apart
    gate, up [width, k] BF16, contiguous    halves of one weight or apart
    hidden [m, width] BF16, contiguous      written
    m, x_pitch                              i32; the pitch in elements, a multiple of 8
    beta, linear_beta                       i32, the bits of FP32

All addresses are 16-byte aligned. The work is divided as `common/gemm.py` says; a tile holds 16
rows of gate and the same 16 of up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs
from k3fuse.kernels.common.gemm import BLOCK, TILE, Geometry
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import MAX_M, TP_SIZES
from k3fuse.kernels.experts.builder import SHARED

CLUSTER = 16  # parts of K
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds one cluster of 16 CTAs.
CLUSTERS = 8
COLUMNS = TILE // 2  # of the hidden row in a tile
K_STEP = 2 * BLOCK * CLUSTER
SHAPE = {"m": 8, "k": HIDDEN, "width": SHARED // 8}

ADDRESSES = ("x", "gate", "up", "hidden")
SIZES = ("m", "x_pitch", "beta", "linear_beta")


@dataclass(frozen=True)
class GateUp:
    """Builder of `shared_gate_up`."""

    op: str = "shared_gate_up"
    summary: str = "SiTU of gate and up of x[M,K], W[S,K] each, BF16, M <= 64"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (most tokens), k, width. Raises VariantError naming the value and what fits."""
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        merged(self.op, "config", {}, config)
        m, k, width = sizes["m"], sizes["k"], sizes["width"]
        need(self.op, 1 <= m <= MAX_M, "m", m, f"1 to {MAX_M}")
        fits = k % K_STEP == 0 and 0 < k <= HIDDEN
        need(self.op, fits, "k", k, f"a multiple of {K_STEP} up to {HIDDEN}")
        fits = width > 0 and width % COLUMNS == 0
        need(self.op, fits, "width", width, f"a positive multiple of {COLUMNS}")
        fits = geometry_of(sizes).fits
        need(self.op, fits, "width", width, "fewer columns, or fewer tokens")
        return Variant(self.op, f"m{m}_k{k}_s{width}", arch, pairs(sizes), ())

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """Kimi K3 on 8 and on 16 ranks, for few and for many tokens."""
        return tuple(
            self.variant(arch, {"m": m, "width": SHARED // tp}, {})
            for tp in TP_SIZES
            for m in (8, MAX_M)
        )

    def plan(self, variant: Variant) -> Plan:
        """Up to 8 clusters of 16 CTAs, a warp for each of a cluster's tiles."""
        geometry = geometry_of(dict(variant.shape))
        return Plan(
            grid=(geometry.ctas, 1, 1),
            block=(32 * geometry.warps, 1, 1),
            cluster=(geometry.cluster, 1, 1),
            dynamic_smem=geometry.shared,
            parameters=(
                *(Parameter(name, "pointer") for name in ADDRESSES),
                *(Parameter(name, "i32") for name in SIZES),
            ),
            pdl=True,
        )

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-ins for its parameters; imports the DSL."""
        from k3fuse.kernels.common.device.abi import arguments
        from k3fuse.kernels.experts import gate_up_device

        sizes = dict(variant.shape)
        kernel = gate_up_device.GateUp(geometry_of(sizes), sizes["width"])
        return kernel, arguments(ADDRESSES, SIZES)


def geometry_of(sizes: Mapping[str, int]) -> Geometry:
    """How the grid divides the work."""
    tiles = sizes["width"] // COLUMNS
    return Geometry(sizes["m"], sizes["k"], tiles, min(CLUSTERS, tiles), CLUSTER, lean=True)


BUILDER = GateUp()

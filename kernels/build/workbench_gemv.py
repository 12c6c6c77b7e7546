"""Describe the workbench's own kernel: a small BF16 GEMV for its tests and figures.

y[M, N] = x[M, K] W[N, K]^T, BF16 in and out, FP32 accumulation, one rounding at the store. A CTA
owns `rows` rows of W and reads each of their 16-byte pieces once; its warps split K. It is no
product kernel: nothing dispatches to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.sizes import merged, need
from k3fuse.kernels.build.variant import Parameter, Plan, Variant, check_arch, pairs

VECTOR = 8  # BF16 elements in one 16-byte load
MAX_M = 8
SHAPE = {"m": 1, "n": 7168, "k": 768}  # K3's output projection on one of 16 ranks
CONFIG = {"rows": 4, "warps": 4, "pdl": 0}
PARAMETERS = (Parameter("x", "pointer"), Parameter("w", "pointer"), Parameter("y", "pointer"))


@dataclass(frozen=True)
class WorkbenchGemv:
    """Builder of `workbench_gemv`."""

    op: str = "workbench_gemv"
    summary: str = "y[M,N] = x[M,K] W[N,K]^T in BF16, M <= 8, FP32 accumulation"

    def variant(self, arch: str, shape: Mapping[str, int], config: Mapping[str, int]) -> Variant:
        """Shape m (1..8), n (multiple of rows), k (multiple of 8); config rows, warps, pdl (0, 1).

        Raises VariantError naming the size and what would fit.
        """
        check_arch(arch)
        sizes = merged(self.op, "shape", SHAPE, shape)
        tuning = merged(self.op, "config", CONFIG, config)
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        rows, warps, pdl = tuning["rows"], tuning["warps"], tuning["pdl"]
        need(self.op, 1 <= m <= MAX_M, "m", m, f"1 to {MAX_M}")
        need(self.op, 1 <= rows <= 16, "rows", rows, "1 to 16")
        need(self.op, 1 <= warps <= 16, "warps", warps, "1 to 16")
        need(self.op, pdl in (0, 1), "pdl", pdl, "0 or 1")
        need(self.op, n >= rows and n % rows == 0, "n", n, f"a positive multiple of rows={rows}")
        need(self.op, k >= VECTOR and k % VECTOR == 0, "k", k, f"a positive multiple of {VECTOR}")
        # 32-bit element offsets into W.
        need(self.op, n * k < 2**31, "n*k", n * k, "below 2**31")
        need(self.op, rows * m <= 32 * warps, "rows*m", rows * m, f"at most 32*warps={32 * warps}")
        name = f"m{m}_n{n}_k{k}_r{rows}_w{warps}" + ("_pdl" if pdl else "")
        return Variant(self.op, name, arch, pairs(sizes), pairs(tuning))

    def variants(self, arch: str) -> tuple[Variant, ...]:
        """M = 1, 2, 4 and 8 at the default shape."""
        return tuple(self.variant(arch, {"m": m}, {}) for m in (1, 2, 4, 8))

    def plan(self, variant: Variant) -> Plan:
        """One CTA for `rows` outputs of each row of x; FP32 partial sums of the warps in SMEM."""
        m, rows, warps = variant.size("m"), variant.tuning("rows"), variant.tuning("warps")
        return Plan(
            grid=(variant.size("n") // rows, 1, 1),
            block=(32 * warps, 1, 1),
            cluster=(1, 1, 1),
            dynamic_smem=4 * warps * rows * m,
            parameters=PARAMETERS,
            pdl=bool(variant.tuning("pdl")),
        )

    def trace(self, variant: Variant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the kernel and stand-in tensors; imports the DSL."""
        from k3fuse.kernels.build import gemv_device

        m, n, k = variant.size("m"), variant.size("n"), variant.size("k")
        kernel = gemv_device.Gemv(
            m, n, k, variant.tuning("rows"), variant.tuning("warps"), bool(variant.tuning("pdl"))
        )
        return kernel, gemv_device.arguments(m, n, k)


BUILDER = WorkbenchGemv()

"""Cases of the workbench's own kernel, at the shapes of K3's output projection."""

from __future__ import annotations

from functools import partial

import torch

from k3fuse.kernels.build.variant import Variant, builder
from k3fuse.kernels.check.case import Case, CheckTarget, Output, Step
from k3fuse.kernels.check.run import Launch
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.simulator import Fresh

OP = "workbench_gemv"
N, K_ALL_RANKS = 7168, 12288  # 96 heads of 128, split over the ranks, to a row of 7168
# CTAs share nothing, so 64 of them under random schedules show what 1792 would; 8 for the race
# checker.
PROTOCOL_N, SMALL_N = 256, 32


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Return one case: the part of one rank. Ranks exchange nothing, so the others are alike."""
    k = K_ALL_RANKS // target.tp
    full, protocol, small = (
        builder(OP).variant(target.arch, {"m": m, "n": n, "k": k}, {})
        for n in (N, PROTOCOL_N, SMALL_N)
    )
    return (
        Case(OP, full.name, partial(step, full), partial(step, protocol), partial(step, small)),
    )


def step(variant: Variant, seed: int) -> Step:
    """Random x and w, the product in FP64 rounded once, and every byte moved once."""
    m, n, k = (variant.size(name) for name in ("m", "n", "k"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).bfloat16()
    w = torch.randn(n, k, generator=generator).bfloat16()
    y = torch.empty(m, n, dtype=torch.bfloat16)
    expected = (x.double() @ w.double().T).bfloat16()
    needed = {"x": x.nbytes, "w": w.nbytes, "y": y.nbytes}
    launch = Launch(variant, [{"x": x, "w": w, "y": Fresh(y)}], needed)
    return Step((launch,), (Output("y", 0, y, expected, tolerance(y.dtype, k)),))

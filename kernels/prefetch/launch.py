"""From weights to the prefetch launch, where the policy turns it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from k3fuse.kernels.common.operands import ALIGNMENT
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.prefetch.builder import BUILDER, MAX_RANGES
from k3fuse.kernels.prefetch.policy import wanted

MOST_BYTES = 2**31 - 2**24  # of one range: 32-bit offsets, and a stride beyond the last one


def table(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(address, bytes) of each weight, in order: 16-byte aligned starts, whole 16 bytes.

    Raises ValueError for more than 16 weights, for one that is not contiguous, and for one of 2 GB.
    """
    if not 1 <= len(weights) <= MAX_RANGES:
        raise ValueError(f"there are {len(weights)} weights; give 1 to {MAX_RANGES}")
    found = []
    for i, weight in enumerate(weights):
        if not weight.is_contiguous() or weight.nbytes > MOST_BYTES:
            raise ValueError(
                f"weights[{i}] has {weight.nbytes} bytes and strides {weight.stride()}; give a "
                f"contiguous one of up to {MOST_BYTES} bytes"
            )
        skipped = -weight.data_ptr() % ALIGNMENT
        size = max(weight.nbytes - skipped, 0) // ALIGNMENT * ALIGNMENT
        found.append((weight.data_ptr() + skipped, size))
    return found


def launch(
    target: str,
    m: int,
    weights: Sequence[Tensor],
    *,
    runtime: Runtime = RUNTIME,
    on: Callable[[str, int], bool] = wanted,
) -> int:
    """Prefetch `weights` where the policy says so; returns the number of launches, 0 or 1.

    Raises LaunchError, and ValueError as `table`.
    """
    if not on(target, m):
        return 0
    arch, _ = chip_of(target)
    ranges = table(weights)
    variant = BUILDER.variant(arch, {"ranges": len(ranges)}, {})
    runtime.kernel(variant)(*(start for start, _ in ranges), *(size for _, size in ranges))
    return 1

"""From weights to the prefetch launch, where the policy has a row for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from k3fuse.kernels.common.operands import ALIGNMENT
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.prefetch.builder import BUILDER, MAX_RANGES, RANGES
from k3fuse.kernels.prefetch.policy import MOST_BYTES, row_of

# What an op that takes a prefetch has behind its other arguments, and what it means.
SCHEMA = "Tensor[]? prefetch=None, int[] prefetch_split=[]"
# Of one range: 32-bit offsets, and a stride beyond the last one.
MOST_OF_A_RANGE = 2**31 - 2**24


@dataclass(frozen=True)
class Ahead:
    """Weights that later ops read, in the order in which they do; no value depends on them.

    split: of each weight the leading rows of which rank r of tp reads the r-th of tp equal shares
    (as the router and row-sharded attention do); rows behind them are read whole. () for no row.
    Raises ValueError for weights that are not contiguous and for rows that they do not have.
    """

    weights: Sequence[Tensor] = ()
    split: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.split and len(self.split) != len(self.weights):
            raise ValueError(
                f"prefetch_split={list(self.split)} for {len(self.weights)} weights; give one "
                "number a weight, or none at all"
            )
        for i, weight in enumerate(self.weights):
            if not weight.is_contiguous():
                raise ValueError(
                    f"prefetch[{i}] has strides {weight.stride()}; give a contiguous weight"
                )
        for i, rows in enumerate(self.split):
            have = self.weights[i].shape[0] if self.weights[i].dim() else 0
            if not 0 <= rows <= have:
                raise ValueError(
                    f"prefetch_split[{i}]={rows}; prefetch[{i}] has {have} rows, name 0 to as many"
                )

    def parts(self, tp: int, rank: int) -> list[Tensor]:
        """The runs of neighbouring rows that rank `rank` of `tp` reads, views in order.

        Raises ValueError for rows that `tp` does not divide.
        """
        found = []
        for i, weight in enumerate(self.weights):
            split = self.split[i] if self.split else 0
            if split % tp:
                raise ValueError(
                    f"prefetch_split[{i}]={split} rows do not divide by {tp} ranks; use a multiple"
                )
            share = split // tp
            if share:
                found.append(weight[rank * share : (rank + 1) * share])
            if not split or split < weight.shape[0]:
                found.append(weight[split:] if split else weight)
        return found


NOTHING = Ahead()


def given(weights: Sequence[Tensor] | None, split: Sequence[int]) -> Ahead:
    """From an op's arguments; ValueError as `Ahead`."""
    return Ahead(weights, split) if weights else Ahead((), split)


def table(weights: Sequence[Tensor], most: int = MOST_BYTES) -> list[tuple[int, int]]:
    """(address, bytes) of each weight, in order: 16-byte aligned starts, whole 16 bytes.

    most: bytes of all of them; where they end, what follows is left out. Raises ValueError for none
    and for more than 16 weights, for one that is not contiguous, and for one of 2 GB.
    """
    if not 1 <= len(weights) <= MAX_RANGES:
        raise ValueError(f"there are {len(weights)} weights; give 1 to {MAX_RANGES}")
    found: list[tuple[int, int]] = []
    for i, weight in enumerate(weights):
        if not weight.is_contiguous() or weight.nbytes > MOST_OF_A_RANGE:
            raise ValueError(
                f"weights[{i}] has {weight.nbytes} bytes and strides {weight.stride()}; give a "
                f"contiguous one of up to {MOST_OF_A_RANGE} bytes"
            )
        if most <= 0:
            break
        skipped = -weight.data_ptr() % ALIGNMENT
        size = max(min(weight.nbytes - skipped, most), 0) // ALIGNMENT * ALIGNMENT
        found.append((weight.data_ptr() + skipped, size))
        most -= weight.nbytes
    return found


def launch(target: str, m: int, ahead: Ahead, rank: int, *, runtime: Runtime = RUNTIME) -> int:
    """Prefetch what `rank` reads of `ahead`, where the policy has a row for `m` tokens.

    Right before the kernel with the exchange: this grid lets the next one start at once, and ends
    behind its predecessor. Returns the number of launches, 0 or 1. Raises LaunchError, and
    ValueError as `table` and `Ahead.parts`.
    """
    if not ahead.weights or row_of(target, m) is None:
        return 0
    arch, tp = chip_of(target)
    found = table(ahead.parts(tp, rank))
    ranges = next(n for n in RANGES if n >= len(found))
    found += [(0, 0)] * (ranges - len(found))
    variant = BUILDER.variant(arch, {"ranges": ranges}, {})
    runtime.kernel(variant)(*(start for start, _ in found), *(size for _, size in found))
    return 1

"""What GPU cases of ops with mailboxes share: launches recorded, a mailbox a rank, their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant, builder
from k3fuse.kernels.common.exchange import Layout, Mapped, Workspace

# Rounds of a poll before it gives up: seconds. Without, a wrong order would hang the device.
TIMEOUT = 1 << 22

Call = tuple[Variant, Sequence[int]]


def exact(generator: torch.Generator, *shape: int, unit: float) -> Tensor:
    """Multiples of `unit` from -3 to 3, BF16: with powers of two their sums have no rounding."""
    drawn = torch.randint(-3, 4, shape, generator=generator, dtype=torch.int8)
    return drawn.to(torch.bfloat16) * unit


class Recorder:
    """A runtime that keeps what would be launched, built for the device at hand."""

    def __init__(self, arch: str, timeout: int) -> None:
        self.arch, self.timeout = arch, timeout
        self.calls: list[Call] = []

    def kernel(self, variant: Variant) -> Callable[..., None]:
        """Keep each launch of a kernel; the device's own packing, the timeout where it has one."""
        config = {name: value for name, value in variant.config if name != "packed"}
        if "timeout" in config:
            config["timeout"] = self.timeout
        here = builder(variant.op).variant(self.arch, dict(variant.shape), config)
        return lambda *values: self.calls.append((here, values))


def workspaces(box: Layout, words: Tensor) -> list[Workspace]:
    """One for each rank: its mailbox in `words` [ranks, words], int32, and the peers' addresses."""
    addresses = tuple(own.data_ptr() for own in words)
    none: Any = None
    return [
        Workspace("emulated", rank, box, own.view(torch.uint8),
                  Mapped(addresses, 0, none), none)
        for rank, own in enumerate(words)
    ]  # fmt: skip


def state(spaces: Sequence[Workspace], control: Tensor) -> str:
    """What is wrong after the steps, "" for nothing: all armed, no poll gave up, counters equal."""
    for space in spaces:
        if (error := space.error()) is not None:
            return f"rank {space.rank}: {error.sentence()}"
        if not space.armed():
            return f"rank {space.rank}: mailbox is not armed"
    low, high = (int(number) for number in control.aminmax())
    return "" if low == high else f"counters of calls differ: {low} to {high}"

"""A stand-in for the one GPU of `k3fuse kernels gpu`: host memory, launches that are counted."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor over host memory."""
    size = dtype.itemsize * math.prod(shape)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class StandIn:
    """What every stand-in does alike; `launch` is its own and appends to `launched`.

    broken: what its kernels do wrong, "" for nothing.
    """

    name, arch, sms, l2_bytes = "stand-in", "sm_90a", 132, 0

    def __init__(self, broken: str = "") -> None:
        self.launched: list[Variant] = []
        self.broken = broken

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def wait(self) -> None:
        pass

    def built(self, variant: Variant) -> Any:
        raise AssertionError("nothing is compiled")

    def together(self, calls: Sequence[tuple[Variant, Sequence[int]]]) -> None:
        raise AssertionError("nobody has to wait: the ranks run one after the other")

    def seconds(self, work: Callable[[], None]) -> float:
        before = len(self.launched)
        work()
        return float(len(self.launched) - before)

"""The parameters that the kernels of a fused op share: addresses, 32-bit sizes, a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream


def arguments(addresses: Sequence[str], sizes: Sequence[str]) -> tuple[Any, ...]:
    """Stand-ins for a kernel's addresses and sizes, by their names, and a stream."""
    return (
        tuple(Int64(0) for _ in addresses),
        tuple(Int32(0) for _ in sizes),
        make_fake_stream(),
    )

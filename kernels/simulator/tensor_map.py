"""Tensor maps as kernel parameters, and how an instruction finds the map that it names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from k3fuse.kernels.common.tensor_map import ALIGNMENT, BYTES, ELEMENTS, TileMap
from k3fuse.kernels.simulator.errors import MemoryAccessError
from k3fuse.kernels.simulator.machine import Group
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_integer import GENERIC_TAGS
from k3fuse.kernels.simulator.translate import PARAMETER_SHIFT
from k3fuse.kernels.simulator.types import Array

_ELEMENT_OF = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int16: "u16",
    torch.int32: "u32",
    torch.int64: "u64",
}  # everything else is bytes


@dataclass(frozen=True)
class TensorMap:
    """A tensor map over a tensor: a parameter of 128 bytes, or of 8 (a pointer to the map).

    box: elements of a tile, dimension 0 (the contiguous one, the tensor's last) first. swizzle: 0,
    32, 64 or 128 bytes. element: a key of `ELEMENTS`, by default that of the tensor's type; 4-bit
    elements need a tensor of bytes. dims and strides (elements, bytes; dimension 0 first) default
    to the tensor's own. fresh: as `Fresh`, the bytes of the tensor are not written yet. rank: the
    rank whose memory holds the tensor, by default the one that passes the map.
    """

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int = 0
    element: str = ""
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = ()
    fill: str = "zero"
    fresh: bool = False
    rank: int | None = None

    @classmethod
    def of(
        cls, tensor: torch.Tensor, tiles: TileMap, *, fresh: bool = False, rank: int | None = None
    ) -> TensorMap:
        """The map `tiles`, of a plan say, over a tensor."""
        return cls(
            tensor, tiles.box, tiles.swizzle, tiles.element, tiles.dims, tiles.strides,
            tiles.element_strides, tiles.fill, fresh, rank,
        )  # fmt: skip

    def tiles(self) -> TileMap:
        """The map without its address; raises ValueError for what `TileMap` refuses."""
        element = self.element or _ELEMENT_OF.get(self.tensor.dtype, "u8")
        size = self.tensor.element_size()
        dims, strides = self.dims, self.strides
        if not dims and element in ELEMENTS:
            shape = list(reversed(self.tensor.shape)) or [1]
            shape[0] = shape[0] * size * 8 // ELEMENTS[element].bits
            dims = tuple(shape)
        if not strides:
            strides = tuple(step * size for step in reversed(self.tensor.stride()[:-1]))
        return TileMap(
            element, dims, strides, self.box, self.swizzle, self.element_strides, self.fill
        )


@lru_cache(maxsize=256)
def _decoded(content: bytes) -> tuple[int, TileMap]:
    return TileMap.decode(content)


def map_at(group: Group, address: int, who: Origin) -> tuple[int, TileMap]:
    """(address of the tensor, map) that lies at a generic address: a parameter, or global memory.

    Raises MemoryAccessError where there is none.
    """
    if address % ALIGNMENT:
        raise MemoryAccessError(
            f"tensor map at {address:#x}, no multiple of {ALIGNMENT}: {who.where(0)}"
        )
    if address >> 61 == GENERIC_TAGS["param"] >> 61:
        content = _parameter(group, address & ~GENERIC_TAGS["param"])
    else:
        places = np.uint64(address) + np.arange(0, BYTES, 8, dtype=np.uint64)
        ctas = np.broadcast_to(who.ctas[:1], (len(places),))
        site = who.at(ctas)
        content = np.asarray(group.memory.load(places, 64, 1, site)[0]).tobytes()
    try:
        return _decoded(content)
    except ValueError as error:
        raise MemoryAccessError(f"{error}: {who.where(0)}") from None


def _parameter(group: Group, offset: int) -> bytes:
    """Up to 128 bytes of one parameter, from an address in parameter space."""
    place, start = offset >> PARAMETER_SHIFT, offset & ((1 << PARAMETER_SHIFT) - 1)
    part: Array = group.parameters[place][start : start + BYTES]
    return part.tobytes()

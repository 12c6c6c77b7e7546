"""Tiles of tensors: where the units of a box lie, and the copies that an instruction names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from k3fuse.kernels.common.tensor_map import ELEMENTS, TileMap
from k3fuse.kernels.simulator.descriptors import PIECE, swizzled
from k3fuse.kernels.simulator.errors import MemoryAccessError, SimulationError
from k3fuse.kernels.simulator.machine import Frame, Group
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.syntax import Address
from k3fuse.kernels.simulator.tensor_map import map_at
from k3fuse.kernels.simulator.translate import Reader, Site
from k3fuse.kernels.simulator.types import Array

_SHARED_ALIGN = 128


@dataclass(frozen=True)
class Tile:
    """Where the units of a box lie. A unit is 16 bytes where the edge of the tensor cuts none, else
    one element (two 4-bit ones); padded elements come in units of 8 bytes.

    `source` and `target` are byte offsets, [units], from the tensor and into the box (before the
    swizzle); `inside` tells which units lie in the tensor. `unit` is the bytes of a unit in global
    memory, `size` those of the box in shared memory.
    """

    source: Array
    target: Array
    inside: Array
    unit: int
    size: int


@lru_cache(maxsize=256)
def tile_of(tiles: TileMap, corner: tuple[int, ...]) -> Tile:
    """The units of the box at a corner, in the order of shared memory."""
    kind = ELEMENTS[tiles.element]
    padded = kind.bits != kind.shared_bits
    edge = tiles.dims[0] * kind.bits % 128 and corner[0] + tiles.box[0] > tiles.dims[0]
    unit = 8 if padded else PIECE if not (edge or corner[0] * kind.bits % 128) else 0
    unit = unit or max(kind.bits // 8, 1)
    per_unit = unit * 8 // kind.bits
    step = 128 if padded else per_unit
    if corner[0] % step:
        raise ValueError(f"coordinate {corner[0]} is no multiple of {step} elements")
    if tiles.swizzle and tiles.row_bytes != tiles.swizzle:
        raise ValueError(
            f"rows of {tiles.row_bytes} bytes in a swizzle of {tiles.swizzle}: not modelled"
        )
    shape, steps = tiles.shape, (1, *tiles.element_strides[1:])
    axes = [np.arange(size) * step for size, step in zip(shape, steps, strict=True)]
    axes[0] = np.arange(shape[0] // per_unit) * per_unit
    grid = np.meshgrid(*reversed(axes), indexing="ij")  # the last of them is dimension 0
    places = [axis.reshape(-1) + at for axis, at in zip(reversed(grid), corner, strict=True)]
    inside = np.ones(len(places[0]), np.bool_)
    for place, size in zip(places, tiles.dims, strict=True):
        inside &= (place >= 0) & (place < size)
    source = places[0] * kind.bits // 8
    for place, stride in zip(places[1:], tiles.strides, strict=True):
        source = source + place * stride
    target = np.arange(len(source)) * (per_unit * kind.shared_bits // 8)
    size = len(source) * (per_unit * kind.shared_bits // 8)
    return Tile(source, target, inside, unit, size)


@dataclass(frozen=True)
class Job:
    """One copy of one thread, and how to reach its ends."""

    group: Group
    tiles: TileMap
    tile: Tile
    tensor: int
    who: Origin

    def shared_places(self, start: int, part: slice) -> Array:
        """Byte offsets into the shared memory of the group, swizzled, of some units."""
        size = self.group.shared.size
        offset = start % size + self.tile.target[part]
        return start // size * size + swizzled(offset, self.tiles.swizzle)

    def addresses(self, part: slice, chosen: Array) -> Array:
        """Global addresses of the chosen ones of some units."""
        places: Array = (self.tensor + self.tile.source[part][chosen]).astype(np.uint64)
        return places

    def global_run(self) -> list[tuple[Any, Array, int]]:
        """The units in global memory, for the race checker: buffer, byte offsets, bytes of each."""
        inside = np.flatnonzero(self.tile.inside)
        if not len(inside):
            return []
        addresses = self.addresses(slice(None), inside)
        unit, site = self.tile.unit, self.origin(len(inside))
        return [
            (buffer, offset[None], unit)
            for buffer, _, offset in self.group.memory.resolve(addresses, unit, site, "access")
        ]

    def shared_run(self, start: int) -> list[tuple[Any, Array, int]]:
        """The units of the tile in shared memory that lie in the tensor."""
        inside = np.flatnonzero(self.tile.inside)
        places = self.shared_places(start, slice(None))[inside]
        return [(self.group.shared, places[None], self.tile.unit)] if len(inside) else []

    def origin(self, count: int) -> Origin:
        """The issuing thread, for `count` accesses."""
        return self.who.at(np.broadcast_to(self.who.ctas[:1], (count,)))


def words_of(unit: int) -> tuple[int, int]:
    """(bits, number) of the words of a unit."""
    return min(unit, 8) * 8, max(unit // 8, 1)


Finder = Callable[[Frame, Origin], list[Job]]


def finder(site: Site, operand: int, dimensions: int) -> Finder:
    """Reader of `[map, {c0, c1, ...}]`: one job a lane."""
    where = site.operand(operand)
    if not isinstance(where, Address) or len(where.coordinates) != dimensions:
        raise site.unsupported(f"{dimensions} coordinates are needed")
    pointer = site.pointer(operand, 64)
    reads: list[Reader] = [site.names.reader(item, 32, site) for item in where.coordinates]

    def find(frame: Frame, who: Origin) -> list[Job]:
        maps = frame.array(pointer(frame))
        corners = [frame.array(read(frame)).view(np.int32) for read in reads]
        jobs = []
        for lane in range(frame.count):
            one = who.pick(slice(lane, lane + 1))
            tensor, tiles = map_at(frame.group, int(maps[lane]), one)
            corner = tuple(int(part[lane]) for part in corners)
            if len(tiles.dims) != dimensions:
                raise SimulationError(
                    f"the tensor map has {len(tiles.dims)} dimensions, the copy {dimensions}: "
                    f"{one.where(0)}"
                )
            try:
                tile = tile_of(tiles, corner)
            except ValueError as error:
                raise SimulationError(f"{error}: {one.where(0)}") from None
            jobs.append(Job(frame.group, tiles, tile, tensor, one))
        return jobs

    return find


def places_of(frame: Frame, pointer: Reader, jobs: list[Job], who: Origin, verb: str) -> Array:
    """Where the tiles lie in shared memory, checked for alignment and bounds."""
    shared = frame.group.shared
    address = frame.array(pointer(frame))
    places = shared.locate(address, frame.ctas(), PIECE, who, verb, True)
    for lane, job in enumerate(jobs):
        offset = int(places[lane]) % shared.size
        end = offset + job.tile.size
        if offset % _SHARED_ALIGN or end > shared.limit:
            raise MemoryAccessError(
                f"{verb} of a tile of {end - offset} bytes at byte {offset - 1024} of shared "
                f"memory, not aligned to {_SHARED_ALIGN} or beyond its {shared.limit - 1024} "
                f"bytes: {who.where(lane)}"
            )
    return places

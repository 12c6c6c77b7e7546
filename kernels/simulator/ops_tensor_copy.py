"""`cp.async.bulk.tensor` in tile mode, 1 to 5 dimensions, both directions, and its reductions.

A tile arrives row by row, dimension 0 fastest, swizzled; what lies outside the tensor is filled.
Towards global memory what lies outside is left out. The mbarrier counts the bytes of the whole box
(PTX ISA, "cp.async.bulk.tensor"; for u4_padded the packed bytes, as CUTLASS expects them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.common.tensor_map import ELEMENTS, TileMap
from k3fuse.kernels.simulator.descriptors import PIECE, swizzled
from k3fuse.kernels.simulator.errors import MemoryAccessError, SimulationError
from k3fuse.kernels.simulator.machine import Copy, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_atomic import apply_atomic
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.syntax import Address
from k3fuse.kernels.simulator.tensor_map import map_at
from k3fuse.kernels.simulator.translate import Reader, Site
from k3fuse.kernels.simulator.types import UNSIGNED, Array, PtxType, parse_type

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Copies

_PIECES = 4  # a tile lands in this many pieces when delivery is random
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
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
class _Job:
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


def _words(unit: int) -> tuple[int, int]:
    """(bits, number) of the words of a unit."""
    return min(unit, 8) * 8, max(unit // 8, 1)


def _fill(tiles: TileMap, width: int) -> int:
    """What a word outside the tensor holds."""
    if tiles.fill == "zero":
        return 0
    bits = ELEMENTS[tiles.element].bits
    return sum(_NAN[tiles.element] << shift for shift in range(0, width, bits))


def _fetch(job: _Job, part: slice) -> list[Array]:
    """The words of some units, filled where they lie outside the tensor."""
    inside = np.flatnonzero(job.tile.inside[part])
    width, count = _words(job.tile.unit)
    empty = np.full(len(job.tile.inside[part]), _fill(job.tiles, width), UNSIGNED[width])
    values = [empty.copy() for _ in range(count)]
    if len(inside):
        site = job.origin(len(inside))
        loaded = job.group.memory.load(job.addresses(part, inside), width, count, site)
        for value, some in zip(values, loaded, strict=True):
            value[inside] = some
    return values


def land(
    job: _Job,
    fetched: dict[int, list[Array]],
    start: int,
    barrier: int,
    part: slice,
    amount: int,
    copies: Copies | None,
) -> None:
    """Some units arrive in one CTA, and its mbarrier hears of it.

    A multicast reads global memory once, when the first CTA gets its copy: `fetched`.
    """
    first = part.start or 0
    if first not in fetched:
        fetched[first] = _fetch(job, part)
    width, _ = _words(job.tile.unit)
    job.group.shared.write(job.shared_places(start, part), width, fetched[first])
    if copies is not None:
        copies.land()
    one = np.array([barrier])
    job.group.shared.arrive(one, one * 0, one * 0 - amount, job.who.unchecked())


def _leave(job: _Job, start: int, kind: PtxType | None, name: str) -> None:
    """A tile goes to global memory, stored or combined with what is there."""
    inside, whole = np.flatnonzero(job.tile.inside), slice(None)
    if not len(inside):
        return
    places = job.shared_places(start, whole)[inside]
    addresses = job.addresses(whole, inside)
    if kind is None:
        width, count = _words(job.tile.unit)
        site = job.origin(len(inside))
        job.group.memory.store(
            addresses, width, job.group.shared.read(places, width, count, site), site
        )
        return
    step, amount = kind.width // 8, job.tile.unit // (kind.width // 8)
    places = (places[:, None] + np.arange(amount) * step).reshape(-1)
    wide = (addresses[:, None] + np.arange(0, job.tile.unit, step, dtype=np.uint64)).reshape(-1)
    combine(job.group, wide, places, kind, name, job.origin(len(wide)))


def combine(
    group: Group, addresses: Array, places: Array, kind: PtxType, name: str, site: Origin
) -> None:
    """Combine elements of shared memory with those at global addresses, in order."""
    values = group.shared.read(places, kind.width, 1, site)[0]
    for view, chosen, index in group.memory.update(addresses, kind.width, site):
        part = slice(None) if chosen is None else chosen
        apply_atomic(view, index, name, kind, [values[part]])


Finder = Callable[[Frame, Origin], list[_Job]]


def _finder(site: Site, operand: int, dimensions: int) -> Finder:
    """Reader of `[map, {c0, c1, ...}]`: one job a lane."""
    where = site.operand(operand)
    if not isinstance(where, Address) or len(where.coordinates) != dimensions:
        raise site.unsupported(f"{dimensions} coordinates are needed")
    pointer = site.pointer(operand, 64)
    reads: list[Reader] = [site.names.reader(item, 32, site) for item in where.coordinates]

    def find(frame: Frame, who: Origin) -> list[_Job]:
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
            jobs.append(_Job(frame.group, tiles, tile, tensor, one))
        return jobs

    return find


def _places(frame: Frame, pointer: Reader, jobs: list[_Job], who: Origin, verb: str) -> Array:
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


def tensor_copy(site: Site) -> Step:
    """What follows `cp.async.bulk.tensor`."""
    rank = site.take("1d", "2d", "3d", "4d", "5d")
    if rank is None:
        raise site.unsupported("number of dimensions")
    target = site.take("shared::cluster", "shared::cta", "global")
    source = site.take("global", "shared::cta")
    site.take("tile")
    hint = site.take("L2::cache_hint")
    multicast = site.take("multicast::cluster")
    if target == "global":
        if source != "shared::cta" or not site.take("bulk_group"):
            raise site.unsupported("direction or completion")
        site.done()
        return tile_out(site, int(rank[0]), None, "")
    complete = site.take("mbarrier::complete_tx::bytes")
    site.take("cta_group::1")
    site.done()
    if target is None or source != "global" or not complete:
        raise site.unsupported("direction or completion")
    if site.count != 3 + bool(multicast) + bool(hint):
        raise site.unsupported("operands")
    return _tile_in(site, int(rank[0]), multicast is not None)


def _tile_in(site: Site, rank: int, multicast: bool) -> Step:
    target, find = site.pointer(0, 32), _finder(site, 1, rank)
    barrier = barrier_places(site, 2, True)
    mask = site.bits(3, 16) if multicast else None
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        jobs = find(frame, who)
        places, barriers = _places(frame, target, jobs, who, "write"), barrier(frame, who)
        masks = None if mask is None else frame.array(mask(frame))
        for lane, job in enumerate(jobs):
            starts, ends = places[lane : lane + 1], barriers[lane : lane + 1]
            if masks is not None:
                cta, bits = int(frame.ctas()[lane]), int(masks[lane])
                starts = group.shared.spread(int(places[lane]), bits, cta, job.who)
                ends = group.shared.spread(int(barriers[lane]), bits, cta, job.who)
            group.delivery.send(group, _pieces(job, starts, ends))

    return run


def _pieces(job: _Job, starts: Array, barriers: Array) -> list[Callable[[], None]]:
    """The landings of a tile: one for each CTA, or several parts when delivery is random."""
    count, total = len(job.tile.source), job.tiles.transfer_bytes
    step = count if job.group.delivery.random is None else -(-count // _PIECES)
    fetched: dict[int, list[Array]] = {}
    pieces: list[Callable[[], None]] = []
    for start, barrier in zip(starts.tolist(), barriers.tolist(), strict=True):
        copies = None
        if job.group.races is not None:
            whole = job.shared_places(start, slice(None))
            copies = job.group.races.copy(
                job.who, job.group.shared, np.array([barrier]), parts=-(-count // step),
                writes=[(job.group.shared, whole[None], job.tile.unit)], reads=job.global_run(),
            )  # fmt: skip
        pieces += [
            partial(
                land, job, fetched, start, barrier, slice(first, first + step),
                min(step, count - first) * total // count, copies,
            )
            for first in range(0, count, step)
        ]  # fmt: skip
    return pieces


def tile_out(site: Site, rank: int, kind: PtxType | None, name: str) -> Step:
    """Shared to global; the source is read when the lane waits for the group, or at the end."""
    find, source = _finder(site, 0, rank), site.pointer(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        jobs = find(frame, who)
        places = _places(frame, source, jobs, who, "read")
        send_out(frame, jobs, places, [kind] * len(jobs), name)

    return run


def send_out(
    frame: Frame, jobs: list[_Job], places: Array, kinds: list[PtxType | None], name: str
) -> None:
    """Note tiles that go to global memory when their group is waited for.

    A reduction may meet others, so the race checker does not check its target.
    """
    races = frame.group.races

    def runs(lane: int) -> dict[str, Any]:
        job = jobs[lane]
        writes = job.global_run() if kinds[lane] is None else []
        return {"reads": job.shared_run(int(places[lane])), "writes": writes}

    for lane, job in enumerate(jobs):
        inside = np.flatnonzero(job.tile.inside)
        site, where = job.origin(len(inside)), job.addresses(slice(None), inside)
        job.group.memory.announce(where, job.tile.unit, site, write=True)
        if races is not None:
            races.start_copy(job.who, **runs(lane))

    def perform(chosen: Array) -> None:
        for lane in chosen.tolist():
            _leave(jobs[lane], int(places[lane]), kinds[lane], name)
            if races is not None:
                races.finish_copy(jobs[lane].who, **runs(lane))

    number = np.full(frame.count, -1, np.int64)
    frame.group.copies.append(Copy("bulk", frame.lanes.copy(), number, perform))


def tensor_reduce(site: Site) -> Step:
    """What follows `cp.reduce.async.bulk.tensor`; the type is that of the map.

    Only adding, minimum and maximum are modelled, and all lanes must use maps of one type.
    """
    rank = site.take("1d", "2d", "3d", "4d", "5d")
    site.take("global")
    source = site.take("shared::cta")
    name = site.take("add", "min", "max")
    site.take("tile")
    group = site.take("bulk_group")
    site.take("L2::cache_hint")
    site.done()
    if rank is None or source is None or name is None or group is None:
        raise site.unsupported("form of the reduction")
    find, pointer = _finder(site, 0, int(rank[0])), site.pointer(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        jobs = find(frame, who)
        kinds = [parse_type(job.tiles.element) for job in jobs]
        if None in kinds or any(kind and kind.name == "f16" for kind in kinds):
            raise SimulationError(f"reduction of this element type: {who.where(0)}")
        send_out(frame, jobs, _places(frame, pointer, jobs, who, "read"), kinds, name)

    return run


def tensor_prefetch(site: Site) -> Step:
    """`cp.async.bulk.prefetch.tensor`: a hint; the map and the number of dimensions are checked."""
    rank = site.take("1d", "2d", "3d", "4d", "5d")
    site.take("L2")
    site.take("global")
    site.take("tile")
    site.take("L2::cache_hint")
    site.done()
    if rank is None:
        raise site.unsupported("number of dimensions")
    find = _finder(site, 0, int(rank[0]))
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        find(frame, frame.origin(line, text))

    return run

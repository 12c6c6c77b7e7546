"""`cp.async.bulk.tensor` in tile mode, 1 to 5 dimensions, and its prefetch.

A tile arrives row by row, dimension 0 fastest, swizzled; what lies outside the tensor is filled.
The mbarrier counts the bytes of the whole box (PTX ISA, "cp.async.bulk.tensor"; for u4_padded the
packed bytes, as CUTLASS expects them). The other direction is in ops_tensor_out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.common.tensor_map import ELEMENTS, TileMap
from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.ops_tensor_out import tile_out
from k3fuse.kernels.simulator.tensor_tiles import Job, finder, places_of, words_of
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import UNSIGNED, Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Copies

_PIECES = 4  # a tile lands in this many pieces when delivery is random
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


def _fill(tiles: TileMap, width: int) -> int:
    """What a word outside the tensor holds."""
    if tiles.fill == "zero":
        return 0
    bits = ELEMENTS[tiles.element].bits
    return sum(_NAN[tiles.element] << shift for shift in range(0, width, bits))


def _fetch(job: Job, part: slice) -> list[Array]:
    """The words of some units, filled where they lie outside the tensor."""
    inside = np.flatnonzero(job.tile.inside[part])
    width, count = words_of(job.tile.unit)
    empty = np.full(len(job.tile.inside[part]), _fill(job.tiles, width), UNSIGNED[width])
    values = [empty.copy() for _ in range(count)]
    if len(inside):
        site = job.origin(len(inside))
        loaded = job.group.memory.load(job.addresses(part, inside), width, count, site)
        for value, some in zip(values, loaded, strict=True):
            value[inside] = some
    return values


def land(
    job: Job,
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
    width, _ = words_of(job.tile.unit)
    job.group.shared.write(job.shared_places(start, part), width, fetched[first])
    if copies is not None:
        copies.land()
    one = np.array([barrier])
    job.group.shared.arrive(one, one * 0, one * 0 - amount, job.who.unchecked())


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
    target, find = site.pointer(0, 32), finder(site, 1, rank)
    barrier = barrier_places(site, 2, True)
    mask = site.bits(3, 16) if multicast else None
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        jobs = find(frame, who)
        places, barriers = places_of(frame, target, jobs, who, "write"), barrier(frame, who)
        masks = None if mask is None else frame.array(mask(frame))
        for lane, job in enumerate(jobs):
            starts, ends = places[lane : lane + 1], barriers[lane : lane + 1]
            if masks is not None:
                cta, bits = int(frame.ctas()[lane]), int(masks[lane])
                starts = group.shared.spread(int(places[lane]), bits, cta, job.who)
                ends = group.shared.spread(int(barriers[lane]), bits, cta, job.who)
            group.delivery.send(group, _pieces(job, starts, ends))

    return run


def _pieces(job: Job, starts: Array, barriers: Array) -> list[Callable[[], None]]:
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
    find = finder(site, 0, int(rank[0]))
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        find(frame, frame.origin(line, text))

    return run

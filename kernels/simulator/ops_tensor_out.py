"""Tiles from shared to global memory: `cp.async.bulk.tensor` that way, and its reductions.

What lies outside the tensor is left out (PTX ISA, "cp.reduce.async.bulk.tensor").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3fuse.kernels.simulator.errors import SimulationError
from k3fuse.kernels.simulator.machine import Copy, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_atomic import apply_atomic
from k3fuse.kernels.simulator.tensor_tiles import Job, finder, places_of, words_of
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import Array, PtxType, parse_type


def _leave(job: Job, start: int, kind: PtxType | None, name: str) -> None:
    """A tile goes to global memory, stored or combined with what is there."""
    inside, whole = np.flatnonzero(job.tile.inside), slice(None)
    if not len(inside):
        return
    places = job.shared_places(start, whole)[inside]
    addresses = job.addresses(whole, inside)
    if kind is None:
        width, count = words_of(job.tile.unit)
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


def tile_out(site: Site, rank: int, kind: PtxType | None, name: str) -> Step:
    """Shared to global; the source is read when the lane waits for the group, or at the end."""
    find, source = finder(site, 0, rank), site.pointer(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        jobs = find(frame, who)
        places = places_of(frame, source, jobs, who, "read")
        send_out(frame, jobs, places, [kind] * len(jobs), name)

    return run


def send_out(
    frame: Frame, jobs: list[Job], places: Array, kinds: list[PtxType | None], name: str
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
    find, pointer = finder(site, 0, int(rank[0])), site.pointer(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        jobs = find(frame, who)
        kinds = [parse_type(job.tiles.element) for job in jobs]
        if None in kinds or any(kind and kind.name == "f16" for kind in kinds):
            raise SimulationError(f"reduction of this element type: {who.where(0)}")
        send_out(frame, jobs, places_of(frame, pointer, jobs, who, "read"), kinds, name)

    return run

"""Bulk copies into shared memory, counted by mbarriers: of one CTA, a peer, or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.errors import MemoryAccessError
from k3fuse.kernels.simulator.machine import Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Copies

_PIECES = 4  # a bulk copy lands in this many pieces when delivery is random


def bulk_in(site: Site, source: str, multicast: bool) -> Step:
    """A run of bytes into shared memory (own or peer CTA), counted by an mbarrier there.

    With multicast: to the same place of every CTA in the mask, each with its own mbarrier; the
    source is read once.
    """
    target, size = site.pointer(0, 32), site.bits(2, 32)
    from_global = source == "global"
    origin = site.pointer(1, 64 if from_global else 32)
    barrier = barrier_places(site, 3, True)
    mask = site.bits(4, 16) if multicast else None
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        places = group.shared.locate(
            frame.array(target(frame)), frame.ctas(), 16, who, "bulk write", True
        )
        starts = frame.array(origin(frame))
        if not from_global:
            starts = group.shared.locate(starts, frame.ctas(), 16, who, "bulk read")
        barriers, sizes = barrier(frame, who), frame.array(size(frame))
        masks = None if mask is None else frame.array(mask(frame))
        if masks is None and from_global and group.delivery.random is None and not group.races:
            _whole(group, places, starts, barriers, sizes, who)
            return
        for lane in range(frame.count):
            amount = int(sizes[lane])
            one = who.pick(slice(lane, lane + 1))
            check_run(group, int(places[lane]), amount, one)
            shifts = [0]
            if masks is not None:
                shifts = _shifts(group, int(places[lane]), int(masks[lane]))
            # Of a multicast copy, each CTA gets its bytes at a time of its own; one reads them.
            read: dict[int, Array] = {}
            cuts = cut(amount, group.delivery.random is not None)
            pieces = []
            for shift in shifts:
                at, place = barriers[lane : lane + 1] + shift, int(places[lane]) + shift
                copies = None
                if group.races is not None:
                    steps = np.arange(0, amount, 16)[None]
                    copies = group.races.copy(
                        one, group.shared, at,
                        writes=[(group.shared, place + steps, 16)],
                        reads=[source_of(group, int(starts[lane]), steps, from_global, one)],
                        parts=len(cuts),
                    )  # fmt: skip
                pieces += [
                    _piece(group, int(starts[lane]), place, first, length, at, from_global,
                           one.unchecked(), copies, read)
                    for first, length in cuts
                ]  # fmt: skip
            group.delivery.send(group, pieces)

    return run


def _whole(
    group: Group, places: Array, starts: Array, barriers: Array, sizes: Array, who: Origin
) -> None:
    """Land the copies of all lanes at once: what a kernel with a copy a token spends its time on.

    Copies of one mbarrier still arrive one after the other, since each may end a phase.
    """
    for amount in np.unique(sizes):
        lanes = np.flatnonzero(sizes == amount)
        worst = lanes[np.argmax(places[lanes] % group.shared.size)]
        check_run(group, int(places[worst]), int(amount), who.pick(slice(worst, worst + 1)))
        steps = np.arange(0, int(amount), 16)
        every = who.at(np.repeat(who.ctas[lanes], len(steps)))
        addresses = (starts[lanes, None] + steps.astype(np.uint64)).reshape(-1)
        values = group.memory.load(addresses, 64, 2, every)
        group.shared.write((places[lanes, None] + steps).reshape(-1), 64, values)
    turns = _occurrence(barriers)
    for turn in range(int(turns.max()) + 1):
        lanes = np.flatnonzero(turns == turn)
        bytes_ = -sizes[lanes].astype(np.int64)
        group.shared.arrive(barriers[lanes], np.zeros_like(bytes_), bytes_, who.pick(lanes))


def _occurrence(values: Array) -> Array:
    """How many equal values come before each."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(values)), 0))
    result = np.empty(len(values), np.int64)
    result[order] = np.arange(len(values)) - starts
    return result


def _shifts(group: Group, place: int, mask: int) -> list[int]:
    """How far from `place` the same place of each CTA of a cluster mask is."""
    shared = group.shared
    cta = place // shared.size
    members = [rank for rank in range(group.cluster_size) if mask >> rank & 1]
    if mask >> group.cluster_size or not members:
        raise MemoryAccessError(f"multicast to CTAs {mask:#x} of a cluster of {group.cluster_size}")
    base = int(shared.cluster_base[cta])
    return [(base + rank - cta) * shared.size for rank in members]


def source_of(
    group: Group, start: int, steps: Array, from_global: bool, who: Origin
) -> tuple[Any, Array, int]:
    """What a bulk copy reads, for the race checker: memory, byte offsets, bytes at each."""
    if not from_global:
        return group.shared, start + steps, 16
    addresses = np.uint64(start) + steps[0].astype(np.uint64)
    every = who.at(np.repeat(who.ctas, len(addresses)))
    for buffer, _, offset in group.memory.resolve(addresses, 16, every, "read"):
        return buffer, offset[None], 16
    raise MemoryAccessError(f"bulk copy of no bytes: {who.where(0)}")


def check_run(group: Group, place: int, amount: int, who: Origin) -> None:
    """Raise for a size that is no multiple of 16, or that ends beyond shared memory."""
    offset = place % group.shared.size
    if amount % 16 or amount <= 0:
        raise MemoryAccessError(f"bulk copy of {amount} bytes, no multiple of 16: {who.where(0)}")
    if offset + amount > group.shared.limit:
        raise MemoryAccessError(
            f"out-of-bounds bulk copy of {amount} bytes, "
            f"{offset + amount - group.shared.limit} past the end of shared memory: {who.where(0)}"
        )


def cut(amount: int, torn: bool) -> list[tuple[int, int]]:
    """(first byte, length) of the pieces of a copy, multiples of 16."""
    if not torn:
        return [(0, amount)]
    step = -(-amount // 16 // _PIECES) * 16
    return [(first, min(step, amount - first)) for first in range(0, amount, step)]


def _piece(
    group: Group,
    start: int,
    place: int,
    first: int,
    length: int,
    barrier: Array,
    from_global: bool,
    who: Origin,
    copies: Copies | None,
    read: dict[int, Array],
) -> Callable[[], None]:
    def fetch() -> Array:
        if from_global:
            return read_run(group, start + first, length, who)
        marks = group.shared.written[start + first : start + first + length]
        if not marks.all():
            error = MemoryAccessError(f"bulk copy of unwritten shared memory: {who.where(0)}")
            if group.races is None:
                raise error
            group.races.hold(error)
        content: Array = group.shared.data[start + first : start + first + length].copy()
        return content

    def land() -> None:
        if first not in read:
            read[first] = fetch()
        group.shared.write_bytes(place + first, read[first])
        if copies is not None:
            copies.land()
        group.shared.arrive(barrier, np.zeros(1, np.int64), np.array([-length]), who)

    return land


def read_run(group: Group, address: int, length: int, who: Origin) -> Array:
    """`length` bytes of global memory from an address, a multiple of 16."""
    places = np.uint64(address) + np.arange(0, length, 16, dtype=np.uint64)
    ctas = np.broadcast_to(who.ctas[:1], (len(places),))
    values = group.memory.load(places, 64, 2, who.at(ctas))
    return np.stack(values, axis=1).reshape(-1).view(np.uint8)

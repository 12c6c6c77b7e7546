"""Bulk reductions into global memory or a peer CTA, and `red.async`.

For the race checker they read their source; what they combine may be combined by others, too, so
their target is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.bulk_in import check_run, cut
from k3fuse.kernels.simulator.errors import MemoryAccessError
from k3fuse.kernels.simulator.machine import Copy, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_atomic import apply_atomic
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.ops_tensor_out import combine, tensor_reduce
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import Array, PtxType

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Copies

_REDUCIBLE = ("f32", "bf16", "f64", "u32", "s32", "u64", "b32", "b64")


def reduce_async(site: Site) -> Step:
    """`cp.reduce.async.bulk`: shared memory combined with global memory or with a peer CTA."""
    site.take("async")
    site.take("bulk")
    if site.take("tensor"):
        return tensor_reduce(site)
    kind = site.take_type()
    target = site.take("global", "shared::cluster")
    source = site.take("shared::cta")
    group_ = site.take("bulk_group", "mbarrier::complete_tx::bytes")
    site.take("L2::cache_hint")
    name = site.take("add", "min", "max", "and", "or", "xor", "inc", "dec")
    site.take("noftz")
    site.done()
    if kind.name not in _REDUCIBLE or source is None or name is None:
        raise site.unsupported("form of the reduction")
    if (target, group_) == ("global", "bulk_group"):
        return _reduce_out(site, kind, name)
    if (target, group_) == ("shared::cluster", "mbarrier::complete_tx::bytes"):
        return _reduce_peer(site, kind, name)
    raise site.unsupported("direction")


def _reduce_out(site: Site, kind: PtxType, name: str) -> Step:
    """The source is read when the lane waits for the group, or at the end."""
    target, source, size = site.pointer(0, 64), site.pointer(1, 32), site.bits(2, 32)
    line, text, step = site.instruction.line, site.instruction.text, kind.width // 8

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        starts = group.shared.locate(frame.array(source(frame)), frame.ctas(), 16, who, "bulk read")
        goals = frame.array(target(frame)).copy()
        sizes = frame.array(size(frame)).astype(np.int64)

        def runs(lane: int) -> dict[str, Any]:
            steps = np.arange(0, int(sizes[lane]), 16)[None]
            return {"reads": [(group.shared, starts[lane] + steps, 16)]}

        for lane in range(frame.count):
            one = who.pick(slice(lane, lane + 1))
            check_run(group, int(starts[lane]), int(sizes[lane]), one)
            if int(goals[lane]) % 16:
                raise MemoryAccessError(f"misaligned bulk reduction: {who.where(lane)}")
            run_ = goals[lane] + np.arange(0, int(sizes[lane]), 16, dtype=np.uint64)
            ctas = np.broadcast_to(who.ctas[lane], (len(run_),))
            group.memory.announce(run_, 16, who.at(ctas), write=True)
            if group.races is not None:
                group.races.start_copy(one, **runs(lane))

        def perform(chosen: Array) -> None:
            for lane in chosen:
                steps = np.arange(0, int(sizes[lane]), step)
                ctas = np.broadcast_to(who.ctas[lane], (len(steps),))
                origin = who.at(ctas)
                addresses = goals[lane] + steps.astype(np.uint64)
                combine(group, addresses, starts[lane] + steps, kind, name, origin)
                if group.races is not None:
                    one = who.pick(slice(lane, lane + 1))
                    group.races.finish_copy(one, **runs(int(lane)))

        number = np.full(frame.count, -1, np.int64)
        group.copies.append(Copy("bulk", frame.lanes.copy(), number, perform))

    return run


def _update(
    group: Group, places: Array, values: Array, kind: PtxType, name: str, who: Origin
) -> None:
    """Combine values with elements of shared memory."""
    shared = group.shared
    shared.read(places, kind.width, 1, who)
    index = places >> (kind.width.bit_length() - 4)
    apply_atomic(shared.views[kind.width], index, name, kind, [values])
    shared.version += 1


def _reduce_peer(site: Site, kind: PtxType, name: str) -> Step:
    """Own shared memory combined with that of a CTA of the cluster, counted by its mbarrier."""
    target, source, size = site.pointer(0, 32), site.pointer(1, 32), site.bits(2, 32)
    barrier = barrier_places(site, 3, True)
    line, text, step = site.instruction.line, site.instruction.text, kind.width // 8

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        shared = group.shared
        goals = shared.locate(
            frame.array(target(frame)), frame.ctas(), 16, who, "bulk update", True
        )
        starts = shared.locate(frame.array(source(frame)), frame.ctas(), 16, who, "bulk read")
        barriers, sizes = barrier(frame, who), frame.array(size(frame))
        for lane in range(frame.count):
            amount = int(sizes[lane])
            one = who.pick(slice(lane, lane + 1))
            check_run(group, int(goals[lane]), amount, one)
            check_run(group, int(starts[lane]), amount, one)
            cuts, copies = cut(amount, group.delivery.random is not None), None
            if group.races is not None:
                steps = np.arange(0, amount, 16)[None]
                copies = group.races.copy(
                    one, shared, barriers[lane : lane + 1], parts=len(cuts),
                    reads=[(shared, starts[lane] + steps, 16)],
                )  # fmt: skip
            pieces: list[Callable[[], None]] = [
                partial(
                    _combine_peer, group, int(starts[lane]) + first, int(goals[lane]) + first,
                    length, step, barriers[lane : lane + 1], kind, name, one.unchecked(), copies,
                )
                for first, length in cuts
            ]  # fmt: skip
            group.delivery.send(group, pieces)

    return run


def _combine_peer(
    group: Group,
    start: int,
    goal: int,
    length: int,
    step: int,
    barrier: Array,
    kind: PtxType,
    name: str,
    who: Origin,
    copies: Copies | None,
) -> None:
    steps = np.arange(0, length, step)
    origin = who.at(np.broadcast_to(who.ctas[:1], (len(steps),)))
    values = group.shared.read(start + steps, kind.width, 1, origin)[0]
    _update(group, goal + steps, values, kind, name, origin)
    if copies is not None:
        copies.land()
    group.shared.arrive(barrier, barrier * 0, np.array([-length]), who)


def reduce_element_async(site: Site) -> Step:
    """`red.async`: one element of a peer CTA, counted by an mbarrier there."""
    site.take("async")
    kind = site.take_type()
    while site.take("relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"):
        pass
    name = site.take("add", "min", "max", "and", "or", "xor", "inc", "dec")
    site.done()
    if name is None or kind.name not in ("u32", "s32", "u64", "b32", "b64", "s64"):
        raise site.unsupported("red.async form")
    target, value = site.pointer(0, 32), site.bits(1, kind.width)
    barrier = barrier_places(site, 2, True)
    line, text, size = site.instruction.line, site.instruction.text, kind.width // 8

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        places = group.shared.locate(
            frame.array(target(frame)), frame.ctas(), size, who, "update", True
        )
        barriers, values = barrier(frame, who), frame.array(value(frame)).copy()
        parts = [slice(None)]
        if group.delivery.random is not None:
            parts = [slice(lane, lane + 1) for lane in range(frame.count)]
        copies, late = None, who.unchecked()
        if group.races is not None:
            copies = group.races.copy(who, group.shared, barriers, parts=len(parts))

        def land(part: slice) -> None:
            _update(group, places[part], values[part], kind, name, late)
            if copies is not None:
                copies.land()
            count = np.zeros(len(places[part]), np.int64)
            group.shared.arrive(barriers[part], count, count - size, late)

        group.delivery.send(group, [partial(land, part) for part in parts])

    return run

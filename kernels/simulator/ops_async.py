"""Asynchronous copies: cp.async, cp.async.bulk with mbarriers or bulk groups, st.async.

Tiles of tensors are in ops_tensor_copy, reductions and copies to several CTAs in ops_bulk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from k3fuse.kernels.simulator.bulk_in import bulk_in, check_run, source_of
from k3fuse.kernels.simulator.errors import MemoryAccessError
from k3fuse.kernels.simulator.machine import Copy, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.order import Order
from k3fuse.kernels.simulator.syntax import Constant
from k3fuse.kernels.simulator.translate import Reader, Site, operation
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    pass

_LEVEL_HINTS = ("L2::128B", "L2::64B", "L2::256B", "L2::cache_hint")


@operation("cp", selective=True)
def copy_async(site: Site) -> Step:
    """The `cp.async` and `cp.reduce.async` families."""
    if site.take("reduce"):
        from k3fuse.kernels.simulator.ops_bulk import reduce_async

        return reduce_async(site)
    site.take("async")
    if site.take("bulk"):
        return _bulk(site)
    if site.take("commit_group"):
        site.done()
        return lambda frame: commit(frame, "element")
    if site.take("wait_all"):
        site.done()
        return lambda frame: wait_group(frame, "element", 0, uncommitted=True)
    if site.take("wait_group"):
        site.done()
        return _wait_step(site, "element")
    if site.take("mbarrier"):
        return _arrive_after_copies(site)
    return _element(site)


def _wait_step(site: Site, kind: str) -> Step:
    keep = site.operand(0)
    if not isinstance(keep, Constant):
        raise site.unsupported("the number of groups must be a constant")
    return lambda frame: wait_group(frame, kind, keep.value)


def _element(site: Site) -> Step:
    """`cp.async`: 4, 8 or 16 bytes a lane, read and written only when the lane waits for them."""
    hint = 0
    while found := site.take("ca", "cg", *_LEVEL_HINTS):
        hint += found == "L2::cache_hint"
    site.take("shared", "shared::cta")
    site.take("global")
    site.done()
    size = site.operand(2)
    if not isinstance(size, Constant) or size.value not in (4, 8, 16):
        raise site.unsupported("copy size")
    bytes_ = size.value
    target, source = site.pointer(0, 32), site.pointer(1, 64)
    # A cache policy is the last operand, behind the number of bytes where that is given.
    given: Reader | None = site.bits(3, 32) if site.count - hint > 3 else None
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        place = group.shared.locate(
            frame.array(target(frame)), frame.ctas(), bytes_, who, "asynchronous write"
        )
        address = frame.array(source(frame)).copy()
        valid = None
        if given is not None:
            valid = np.minimum(frame.array(given(frame)).astype(np.int64), bytes_)
        # The bytes are read at the wait, but may be read from now on.
        asked = np.ones(frame.count, np.bool_) if valid is None else valid == bytes_
        group.memory.announce(address[asked], bytes_, who.at(who.ctas[asked]), write=False)
        perform = _element_copy(group, place, address, valid, bytes_, who)
        if group.races is not None:
            group.races.start_copy(who, writes=[(group.shared, place, bytes_)])
        number = np.full(frame.count, -1, np.int64)
        group.copies.append(Copy("element", frame.lanes.copy(), number, perform))

    return run


def _element_copy(
    group: Group, place: Array, address: Array, valid: Array | None, size: int, who: Origin
) -> Callable[[Array], None]:
    width = 32 if size == 4 else 64
    count = size * 8 // width

    def perform(chosen: Array) -> None:
        site = who.pick(chosen)
        if valid is None:
            values = group.memory.load(address[chosen], width, count, site)
        else:
            values = [np.zeros(len(chosen), np.uint64 if width == 64 else np.uint32)] * count
            for amount in np.unique(valid[chosen]):
                if amount not in (0, size):
                    raise MemoryAccessError(
                        f"cp.async of {amount} of {size} bytes: {site.where(0)}"
                    )
            some = np.flatnonzero(valid[chosen] == size)
            if len(some):
                loaded = group.memory.load(address[chosen][some], width, count, site.pick(some))
                values = [value.copy() for value in values]
                for value, part in zip(values, loaded, strict=True):
                    value[some] = part
        group.shared.write(place[chosen], width, values, site.unchecked())
        if group.races is not None:
            group.races.finish_copy(site, writes=[(group.shared, place[chosen], size)])

    return perform


def commit(frame: Frame, kind: str) -> None:
    """Close a group of the copies that these lanes issued."""
    group = frame.group
    numbers = _numbers(group, kind)
    active = np.zeros(group.size, np.bool_)
    active[frame.lanes] = True
    for copy in group.copies:
        if copy.kind == kind:
            open_ = (copy.number < 0) & active[copy.lanes]
            copy.number[open_] = numbers[copy.lanes[open_]]
    numbers[frame.lanes] += 1


def _numbers(group: Group, kind: str) -> Array:
    if kind not in group.copy_groups:
        group.copy_groups[kind] = np.zeros(group.size, np.int64)
    return group.copy_groups[kind]


def wait_group(frame: Frame, kind: str, keep: int, *, uncommitted: bool = False) -> None:
    """Perform the copies of all but the latest `keep` groups: the latest moment that is legal."""
    group = frame.group
    numbers = _numbers(group, kind)
    active = np.zeros(group.size, np.bool_)
    active[frame.lanes] = True
    left = []
    for copy in group.copies:
        due = active[copy.lanes] & (copy.number < numbers[copy.lanes] - keep)
        if copy.kind != kind:
            due[:] = False
        elif not uncommitted:
            due &= copy.number >= 0
        if due.any():
            copy.perform(np.flatnonzero(due))
        if not due.all():
            stay = np.flatnonzero(~due)
            left.append(Copy(kind=copy.kind, lanes=copy.lanes[stay], number=copy.number[stay],
                             perform=_subset(copy.perform, stay)))  # fmt: skip
    group.copies = left


def _subset(perform: Callable[[Array], None], stay: Array) -> Callable[[Array], None]:
    return lambda chosen: perform(stay[chosen])


def _arrive_after_copies(site: Site) -> Step:
    """`cp.async.mbarrier.arrive.noinc`: complete the copies of the lane, then arrive."""
    site.take("arrive")
    if not site.take("noinc"):
        raise site.unsupported("only .noinc is modelled")
    site.take("shared", "shared::cta")
    site.take("b64")
    site.done()
    places = barrier_places(site, 0, False)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text, Order("release", 1))
        wait_group(frame, "element", 0, uncommitted=True)
        ones = np.ones(frame.count, np.int64)
        frame.group.shared.arrive(places(frame, who), ones, ones * 0, who)

    return run


def _bulk(site: Site) -> Step:
    prefetch = site.take("prefetch")
    if site.take("tensor"):
        from k3fuse.kernels.simulator.ops_tensor_copy import tensor_copy, tensor_prefetch

        return tensor_prefetch(site) if prefetch else tensor_copy(site)
    if prefetch:
        return _bulk_prefetch(site)
    if site.take("commit_group"):
        site.done()
        return lambda frame: commit(frame, "bulk")
    if site.take("wait_group"):
        site.take("read")
        site.done()
        return _wait_step(site, "bulk")
    target = site.take("shared::cluster", "shared::cta", "global")
    source = site.take("global", "shared::cta")
    hint, multicast = bool(site.take("L2::cache_hint")), bool(site.take("multicast::cluster"))
    if hint and site.count < 4:
        raise site.unsupported("no cache policy")
    if site.take("bulk_group"):
        site.done()
        if (target, source) != ("global", "shared::cta"):
            raise site.unsupported("direction")
        return _bulk_out(site)
    if not site.take("mbarrier::complete_tx::bytes"):
        raise site.unsupported("completion mechanism")
    site.done()
    if target == "global" or source is None or site.count < 4:
        raise site.unsupported("direction")
    if multicast and (source != "global" or site.count < 5):
        raise site.unsupported("multicast form")
    return bulk_in(site, source, multicast)


def _bulk_prefetch(site: Site) -> Step:
    """A hint: nothing moves that anyone could see. Bounds are checked, its bytes count as read."""
    site.take("L2")
    site.take("global")
    site.take("L2::cache_hint")
    site.done()
    origin, size = site.pointer(0, 64), site.bits(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who, memory = frame.origin(line, text), frame.group.memory
        starts, sizes = frame.array(origin(frame)), frame.array(size(frame))
        for lane in range(frame.count):
            one = who.pick(slice(lane, lane + 1))
            amount = int(sizes[lane])
            if amount % 16:
                raise MemoryAccessError(
                    f"bulk prefetch of {amount} bytes, no multiple of 16: {one.where(0)}"
                )
            steps = int(starts[lane]) + np.arange(0, amount, 16, dtype=np.uint64)
            memory.prefetch(steps, one.at(np.repeat(one.ctas, len(steps))))

    return run


def _bulk_out(site: Site) -> Step:
    """Shared to global; the source is read when the lane waits for the group, or at the end."""
    target, source, size = site.pointer(0, 64), site.pointer(1, 32), site.bits(2, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        starts = group.shared.locate(frame.array(source(frame)), frame.ctas(), 16, who, "bulk read")
        places = frame.array(target(frame)).copy()
        sizes = frame.array(size(frame)).astype(np.int64)

        def runs(lane: int, one: Origin) -> dict[str, Any]:
            steps = np.arange(0, int(sizes[lane]), 16)[None]
            return {
                "reads": [(group.shared, starts[lane] + steps, 16)],
                "writes": [source_of(group, int(places[lane]), steps, True, one)],
            }

        for lane in range(frame.count):
            one = who.pick(slice(lane, lane + 1))
            check_run(group, int(starts[lane]), int(sizes[lane]), one)
            run_ = places[lane] + np.arange(0, int(sizes[lane]), 16, dtype=np.uint64)
            group.memory.announce(run_, 16, who.at(np.repeat(one.ctas, len(run_))), write=True)
            if group.races is not None:
                group.races.start_copy(one, **runs(lane, one))

        def perform(chosen: Array) -> None:
            for lane in chosen:
                steps = np.arange(0, int(sizes[lane]), 16)
                one = who.pick(slice(lane, lane + 1))
                site_ = who.at(np.repeat(one.ctas, len(steps)))
                values = group.shared.read(starts[lane] + steps, 64, 2, site_)
                group.memory.store(places[lane] + steps.astype(np.uint64), 64, values, site_)
                if group.races is not None:
                    group.races.finish_copy(one, **runs(int(lane), one))

        number = np.full(frame.count, -1, np.int64)
        group.copies.append(Copy("bulk", frame.lanes.copy(), number, perform))

    return run


def finish_copies(group: Group) -> None:
    """Perform the bulk copies that nobody waited for: the kernel has ended."""
    for copy in group.copies:
        if copy.kind == "bulk":
            copy.perform(np.arange(len(copy.lanes)))
    group.copies = []

"""tcgen05 on one CTA: allocation, commit, waits and fences; the rest is handed on.

`cta_group::2`, `.ws`, `.sp`, `shift` and `ld.red` are not modelled. Tensor memory is consistent
here, so the fences and `wait::ld` have nothing to do; `wait::st` lands what stores have under way.
The race checker sees what the tensor core reads of shared memory, as reads that are complete when
the instruction is, and a commit as a release of its thread; it does not see tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.errors import TensorMemoryError
from k3fuse.kernels.simulator.machine import WARP, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.ops_tcgen05_copy import copy_in, load, store
from k3fuse.kernels.simulator.ops_tcgen05_mma import multiply
from k3fuse.kernels.simulator.ops_warp import whole_warps
from k3fuse.kernels.simulator.order import order_of
from k3fuse.kernels.simulator.tensor_memory import TensorMemory
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import Array

_RELEASE = order_of("release", "cluster")


@operation("tcgen05", selective=True)
def tensor_core(site: Site) -> Step:
    """The tcgen05 family."""
    if "cta_group::2" in site.left:
        raise site.unsupported("cta_group::2: two CTAs on one tensor operation")
    name = site.left.pop(0) if site.left else ""
    site.take("cta_group::1")
    if name.startswith(("fence::", "wait::")):
        return _order(site, name)
    builder = {
        "alloc": _allocate,
        "dealloc": _free,
        "relinquish_alloc_permit": _relinquish,
        "commit": _commit,
        "ld": load,
        "st": store,
        "cp": copy_in,
        "mma": multiply,
    }.get(name)
    if builder is None:
        raise site.unsupported(f"tcgen05.{name}")
    return builder(site)


def _order(site: Site, name: str) -> Step:
    while site.take("sync", "aligned"):
        pass
    site.done()
    if name not in (
        "fence::before_thread_sync",
        "fence::after_thread_sync",
        "wait::ld",
        "wait::st",
    ):
        raise site.unsupported(f"tcgen05.{name}")

    def land(frame: Frame) -> None:
        if frame.group.tensor is not None:
            frame.group.delivery.flush(frame.group.tensor)

    return land if name == "wait::st" else lambda frame: None


def _warps(frame: Frame, who: Origin) -> Array:
    """The first lane (index in the frame) of each warp, all of whose lanes must be there."""
    if not whole_warps(frame):
        raise TensorMemoryError(f"part of a warp executes a .sync.aligned: {who.where(0)}")
    return np.arange(0, frame.count, WARP)


def open_memory(group: Group) -> TensorMemory:
    """The tensor memory of a group, made at its first allocation."""
    if group.tensor is None:
        group.tensor = TensorMemory(group.ctas, group.cta_numbers, group.rank, group.delivery)
    return group.tensor


def _allocate(site: Site) -> Step:
    """Columns for a CTA; the address goes to shared memory."""
    while site.take("sync", "aligned", "shared::cta", "b32"):
        pass
    site.done()
    target, columns = site.pointer(0, 32), site.bits(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        memory, first = open_memory(group), _warps(frame, who)
        ctas = frame.ctas()[first]
        place = group.shared.locate(frame.array(target(frame))[first], ctas, 4, who, "write")
        counts = frame.array(columns(frame))[first]
        given = [
            memory.allocate(int(cta), int(count), who.at(who.ctas[at:]))
            for cta, count, at in zip(ctas, counts, first, strict=True)
        ]
        group.shared.write(place, 32, [np.array(given, np.uint32)], who.pick(first))

    return run


def _free(site: Site) -> Step:
    while site.take("sync", "aligned", "b32"):
        pass
    site.done()
    address, columns = site.bits(0, 32), site.bits(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        memory, first = open_memory(frame.group), _warps(frame, who)
        places, counts = frame.array(address(frame)), frame.array(columns(frame))
        for at in first:
            one = who.at(who.ctas[at:])
            memory.free(int(frame.ctas()[at]), int(places[at]), int(counts[at]), one)

    return run


def _relinquish(site: Site) -> Step:
    while site.take("sync", "aligned"):
        pass
    site.done()

    def run(frame: Frame) -> None:
        open_memory(frame.group).relinquished[frame.ctas()] = True

    return run


def _commit(site: Site) -> Step:
    """An arrival, once all that the CTA gave its tensor core so far is done."""
    site.take("mbarrier::arrive::one")
    site.take("shared::cluster")
    multicast = site.take("multicast::cluster")
    site.take("b64")
    site.done()
    places = barrier_places(site, 0, True)
    mask = site.bits(1, 16) if multicast else None
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text, _RELEASE)
        memory, ctas = open_memory(group), frame.ctas()
        where = places(frame, who)
        masks = None if mask is None else frame.array(mask(frame))
        for lane in range(frame.count):
            cta, targets = int(ctas[lane]), where[lane : lane + 1]
            if masks is not None:
                one = who.pick(slice(lane, lane + 1))
                targets = group.shared.spread(int(where[lane]), int(masks[lane]), cta, one)
            one = who.pick(np.full(len(targets), lane))
            memory.issue(cta, _arrival(group, targets, one))

    return run


def _arrival(group: Group, places: Array, who: Origin) -> Callable[[], None]:
    def arrive() -> None:
        ones = np.ones(len(places), np.int64)
        group.shared.arrive(places, ones, ones * 0, who)

    return arrive

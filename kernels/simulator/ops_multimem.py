"""`multimem.st` and `multimem.red`: one access to the memories of all ranks of a multicast group.

With random delivery every rank receives every 4-byte word at a time of its own, so a consumer that
tests one word of a fragment sees the others missing. A fence of the sender delivers them all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.machine import Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_atomic import apply_atomic
from k3fuse.kernels.simulator.ops_memory import take_order, take_vector
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import Array, PtxType


@operation("multimem", selective=True)
def multimem(site: Site) -> Step:
    """Stores and additions to a multicast address; `multimem.ld_reduce` is not modelled."""
    kind = site.take_type()
    name = site.take("st", "red")
    site.take("global")
    order = take_order(site, "relaxed" if name == "red" else "weak")
    adds = site.take("add") if name == "red" else None
    count = take_vector(site)
    site.done()
    if name is None or (name == "red" and adds is None) or kind.width != 32:
        raise site.unsupported("multimem form")
    if name == "red" and kind.name not in ("f32", "u32", "s32", "bf16x2"):
        raise site.unsupported("multimem.red type")
    reads = site.item_bits(1, 32)
    if len(reads) != count:
        raise site.unsupported("number of values")
    pointer = site.pointer(0, 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text, order)
        late = who.unchecked()
        address = frame.array(pointer(frame))
        members = group.memory.multicast(address, 4 * count, who)
        if order.releases:
            group.delivery.flush(group)
        pieces = []
        for member in members:
            if group.races is not None:
                group.races.spread(group.memory, member, 4 * count, who, adds is not None)
            for item, read in enumerate(reads):
                value = frame.array(read(frame)).copy()
                place = member + np.uint64(4 * item)
                pieces.append(_landing(group, place, value, kind if adds else None, late))
        group.delivery.send(group, pieces, fenced=True)

    return run


def _landing(
    group: Group, place: Array, value: Array, kind: PtxType | None, who: Origin
) -> Callable[[], None]:
    def land() -> None:
        if kind is None:
            group.memory.store(place, 32, [value], who)
            return
        for view, chosen, index in group.memory.update(place, 32, who):
            part = slice(None) if chosen is None else chosen
            apply_atomic(view, index, "add", kind, [value[part]])

    return land

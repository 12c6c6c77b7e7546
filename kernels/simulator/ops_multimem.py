"""`multimem.st` and `multimem.red`: one access to the memories of all ranks of a multicast group.

With random delivery every rank receives every 4-byte word at a time of its own: one word of each
fragment lands, and the others after somebody has read it, so that a consumer that tests one word
sees the others missing. A fence of the sender delivers them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
        values = [frame.array(read(frame)).copy() for read in reads]
        delivery, done = group.delivery, kind if adds else None
        lanes = np.arange(frame.count)
        for at, member in enumerate(members):
            if group.races is not None:
                group.races.spread(group.memory, member, 4 * count, who, adds is not None)
            if delivery.random is None and not adds:
                group.memory.store(member, 32, values, late)
                continue
            if delivery.random is None or count == 1:
                for item, value in enumerate(values):
                    land = _landing(group, member + np.uint64(4 * item), value, done, late)
                    delivery.send(group, [partial(land, lanes)], fenced=True)
                continue
            # Neighbouring fragments, and the same fragment at neighbouring ranks, begin with
            # different words: whatever word a consumer tests, some fragment begins with it.
            start = (member // np.uint64(4 * count)).astype(np.int64) + at + delivery.turn
            table, parts = np.stack(values), []
            for step in range(count):
                word = (start + step) % count
                place = member + (4 * word).astype(np.uint64)
                value = table[word, lanes]
                parts.append((place, _landing(group, place, value, done, late)))
            delivery.tear(group, parts[0][0], [land for _, land in parts])

    return run


def _landing(
    group: Group, place: Array, value: Array, kind: PtxType | None, who: Origin
) -> Callable[[Array], None]:
    """Land the words of the lanes given: a store, or an addition of type `kind`."""

    def land(lanes: Array) -> None:
        site = who.at(who.ctas[lanes])
        if kind is None:
            group.memory.store(place[lanes], 32, [value[lanes]], site)
            return
        words = value[lanes]
        for view, chosen, index in group.memory.update(place[lanes], 32, site):
            part = slice(None) if chosen is None else chosen
            apply_atomic(view, index, "add", kind, [words[part]])

    return land

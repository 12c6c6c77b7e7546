"""`st.async`: stores to a CTA of the cluster that an mbarrier there counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.simulator.machine import Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_sync import barrier_places
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import Array

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.arrivals import Copies


def store_async(site: Site) -> Step:
    """`st.async`: 4 to 16 bytes into a peer CTA, counted by an mbarrier there."""
    kind = site.take_type()
    vector = site.take("v2", "v4")
    while site.take("weak", "shared::cluster", "mbarrier::complete_tx::bytes"):
        pass
    site.done()
    reads = site.item_bits(1, kind.width)
    if kind.width not in (32, 64) or len(reads) != (int(vector[1:]) if vector else 1):
        raise site.unsupported("st.async form")
    target, barrier = site.pointer(0, 32), barrier_places(site, 2, True)
    line, text, size = site.instruction.line, site.instruction.text, kind.width // 8

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text)
        places = group.shared.locate(
            frame.array(target(frame)), frame.ctas(), size * len(reads), who, "write", True
        )
        barriers = barrier(frame, who)
        copies = None
        if group.races is not None:
            run_ = group.shared, places[:, None], size * len(reads)
            copies = group.races.copy(who, group.shared, barriers, writes=[run_], parts=len(reads))
        pieces = [
            _landing(group, places + item * size, kind.width, frame.array(read(frame)).copy(),
                     barriers, who.unchecked(), copies)
            for item, read in enumerate(reads)
        ]  # fmt: skip
        group.delivery.send(group, pieces)

    return run


def _landing(
    group: Group,
    places: Array,
    width: int,
    value: Array,
    barriers: Array,
    who: Origin,
    copies: Copies | None,
) -> Callable[[], None]:
    def land() -> None:
        group.shared.still_there(places // group.shared.size, None, who)
        group.shared.write(places, width, [value], who)
        if copies is not None:
            copies.land()
        count = np.zeros(len(places), np.int64)
        group.shared.arrive(barriers, count, count - width // 8, who)

    return land

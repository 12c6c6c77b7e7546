"""Barriers that do not block by themselves: named barrier and cluster arrival, mbarriers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.machine import BarrierState, Frame, Group, Step, Wait
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.order import Order, order_of
from k3fuse.kernels.simulator.shared import FIRST_BYTE
from k3fuse.kernels.simulator.syntax import Address
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import B64, PRED, Array


def barrier_state(group: Group, number: int) -> BarrierState:
    """The named barrier `number` of a group."""
    if number not in group.barriers:
        group.barriers[number] = BarrierState(np.zeros(group.ctas, np.int64))
    return group.barriers[number]


@operation("bar", "barrier", selective=True)
def barrier(site: Site) -> Step:
    """`bar.warp.sync` (the scheduler gathers the warp), `bar.arrive`, `barrier.cluster.arrive`."""
    if site.take("warp"):
        site.take("sync")
        site.done()
        return _warp_sync
    cluster, arrive = site.take("cluster"), site.take("arrive")
    if not arrive:
        raise site.unsupported("barrier form")
    relaxed = bool(site.take("relaxed"))
    while site.take("cta", "aligned", "release"):
        pass
    site.done()
    if cluster:
        return lambda frame: _cluster_arrive(frame, relaxed)
    number, count = site.bits(0, 32), site.bits(1, 32)

    def run(frame: Frame) -> None:
        numbers, counts = frame.array(number(frame)), frame.array(count(frame))
        for name in np.unique(numbers):
            chosen = numbers == name
            state = barrier_state(frame.group, int(name))
            state.arrived += frame.group.counts_by_cta(frame.lanes[chosen])
            state.wanted = int(counts[chosen][0])
            if frame.group.races is not None:
                frame.group.races.arrivals.arrive(int(name), frame.threads()[chosen])
        frame.group.shared.version += 1

    return run


def _warp_sync(frame: Frame) -> None:
    """The scheduler has gathered the warp; the race checker learns that its lanes have met."""
    if frame.group.races is not None:
        frame.group.races.clocks.sync_warps(frame.threads())


def _cluster_arrive(frame: Frame, relaxed: bool) -> None:
    group = frame.group
    group.shared.version += 1
    group.cluster_wanted[frame.lanes] += 1
    if group.races is not None:
        phases = group.cluster_wanted[frame.lanes]
        group.races.arrivals.cluster_arrive(frame.threads(), phases, relaxed)
    group.cluster_arrived += group.counts_by_cta(frame.lanes)
    settle_cluster(group)


def settle_cluster(group: Group) -> None:
    """Complete the phase of every cluster whose lanes have all arrived."""
    size = group.cluster_size
    arrived = group.cluster_wanted > group.cluster_phase[group.lane_cta]
    missing = group.counts_by_cta(np.flatnonzero(group.alive & ~arrived))
    some = group.cluster_arrived.reshape(-1, size).sum(axis=1) > 0
    done = np.repeat(some & (missing.reshape(-1, size).sum(axis=1) == 0), size)
    group.cluster_phase[done] += 1
    group.cluster_arrived[done] = 0


@operation("mbarrier", selective=True)
def mbarrier(site: Site) -> Step:
    """The mbarrier family on shared memory."""
    name = site.left.pop(0)
    if site.left and site.left[-1] == "b64":
        site.left.pop()
    space = site.take("shared", "shared::cta", "shared::cluster")
    remote = space == "shared::cluster"
    sem, scope = site.take("release", "acquire", "relaxed"), site.take("cta", "cluster")
    builder = {
        "init": _init,
        "inval": _invalidate,
        "arrive": _arrive,
        "expect_tx": _expect,
        "complete_tx": _expect,
        "try_wait": _wait,
        "test_wait": _wait,
    }.get(name)
    if builder is None:
        raise site.unsupported(f"mbarrier.{name}")
    if name in ("expect_tx", "complete_tx"):
        sem = "relaxed"
    sem = sem or ("acquire" if name.endswith("wait") else "release")
    # Without a scope PTX means .cta, yet the cluster pipelines of compilers leave it out when they
    # signal a peer; only an explicit .cta is taken at its word.
    return builder(site, remote, order_of(sem, scope, "cluster"))


Places = Callable[[Frame, Origin], Array]


def barrier_places(site: Site, place: int, remote: bool) -> Places:
    """Reader of an mbarrier address operand: byte offsets into the shared memory of the group."""
    pointer = site.pointer(place, 32)

    def read(frame: Frame, who: Origin) -> Array:
        address = frame.array(pointer(frame))
        return frame.group.shared.locate(address, frame.ctas(), 8, who, "mbarrier use", remote)

    return read


def _init(site: Site, remote: bool, order: Order) -> Step:
    site.done()
    places, count = barrier_places(site, 0, False), site.bits(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        counts = frame.array(count(frame)).astype(np.int64)
        frame.group.shared.init_barrier(places(frame, who), counts, who)

    return run


def _invalidate(site: Site, remote: bool, order: Order) -> Step:
    site.done()
    places = barrier_places(site, 0, False)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        frame.group.shared.drop_barrier(places(frame, who), who)

    return run


def _arrive(site: Site, remote: bool, order: Order) -> Step:
    with_bytes = site.take("expect_tx")
    if site.take("noComplete", "drop"):
        raise site.unsupported("arrive form")
    site.done()
    returns = not isinstance(site.operand(0), Address)
    at = 1 if returns else 0
    write = site.result(B64) if returns else None
    places = barrier_places(site, at, remote)
    amount = site.bits(at + 1, 32) if site.count > at + 1 else None
    if with_bytes and amount is None:
        raise site.unsupported("no transaction count")
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text, order)
        ones = np.ones(frame.count, np.int64)
        given = ones if amount is None else frame.array(amount(frame)).astype(np.int64)
        count, expect = (ones, given) if with_bytes else (given, ones * 0)
        phase = frame.group.shared.arrive(places(frame, who), count, expect, who)
        if write is not None:
            write(frame, phase)

    return run


def _expect(site: Site, remote: bool, order: Order) -> Step:
    site.done()
    name = site.instruction.parts[1]
    places, amount = barrier_places(site, 0, remote), site.bits(1, 32)
    sign = 1 if name == "expect_tx" else -1
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text, order)
        given = frame.array(amount(frame)).astype(np.int64) * sign
        frame.group.shared.arrive(places(frame, who), given * 0, given, who)

    return run


def _wait(site: Site, remote: bool, order: Order) -> Step:
    parity = site.take("parity")
    site.done()
    places, write = barrier_places(site, 1, False), site.result(PRED)
    wanted = site.bits(2, 32 if parity else 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text, order)
        where = places(frame, who)
        phase = frame.group.shared.phases(where, who)
        given = frame.array(wanted(frame)).astype(np.int64)
        done = (phase & 1) != (given & 1) if parity else phase != given
        if frame.group.races is not None:
            frame.group.races.barrier_wait(who, frame.group.shared, where, done)
        write(frame, done)
        if not done.all():
            blocked = np.flatnonzero(~done)
            frame.group.waits[line] = Wait(
                frame.lanes[blocked],
                _explain(frame.group, where[blocked], line, text),
                frame.group.round,
            )

    return run


def _explain(group: Group, places: Array, line: int, text: str) -> Callable[[int], str]:
    def describe(lane: int) -> str:
        shared = group.shared
        place = int(places[lane])
        offset, cta = place % shared.size, place // shared.size
        barriers = shared.barriers[offset]
        return (
            f"waits for the mbarrier at byte {offset - FIRST_BYTE} of shared memory of CTA "
            f"{int(group.cta_numbers[cta])} (phase {int(barriers.phase[cta])}, "
            f"{int(barriers.pending[cta])} of {int(barriers.expected[cta])} arrivals and "
            f"{int(barriers.bytes[cta])} bytes missing), line {line} `{text}`"
        )

    return describe


@operation("mapa")
def map_address(site: Site) -> Step:
    """`mapa`: the shared address of a peer CTA in the cluster."""
    site.take("shared::cluster")
    kind = site.take_type()
    site.done()
    if kind.width != 32:
        raise site.unsupported("64-bit mapa")
    address, rank, write = site.bits(1, 32), site.bits(2, 32), site.result(kind)

    def run(frame: Frame) -> None:
        offset = address(frame) & np.uint32(0xFFFFFF)
        write(frame, offset | ((rank(frame) + np.uint32(1)) << np.uint32(24)))

    return run

"""Instructions in which the lanes of a warp exchange values: shfl, vote, match, redux, elect."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.errors import BarrierError
from k3fuse.kernels.simulator.machine import WARP, Frame, Step
from k3fuse.kernels.simulator.syntax import Constant
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import B32, PRED, Array, Value


def whole_warps(frame: Frame) -> bool:
    """Whether the active lanes are complete warps."""
    if frame.full:
        return True
    lanes = frame.lanes
    if len(lanes) % WARP:
        return False
    first = lanes[::WARP]
    return not (first & (WARP - 1)).any() and bool((lanes[WARP - 1 :: WARP] == first + 31).all())


def by_warp(frame: Frame, value: Value, fill: Value) -> tuple[Array, Array]:
    """Lay a value out as [warps, 32] with `fill` in inactive lanes; also which are active."""
    if whole_warps(frame):
        rows = frame.array(value).reshape(-1, WARP)
        return rows, np.ones(rows.shape, np.bool_)
    rows_of = frame.lanes >> 5
    names, row = np.unique(rows_of, return_inverse=True)
    table = np.full((len(names), WARP), fill, np.asarray(value).dtype)
    active = np.zeros(table.shape, np.bool_)
    column = frame.lanes & (WARP - 1)
    table[row, column] = frame.array(value)
    active[row, column] = True
    return table, active


def to_lanes(frame: Frame, table: Array) -> Array:
    """The inverse of `by_warp`: one value a warp ([warps]) or a lane ([warps, 32])."""
    if whole_warps(frame):
        return np.repeat(table, WARP) if table.ndim == 1 else table.reshape(-1)
    _, row = np.unique(frame.lanes >> 5, return_inverse=True)
    return table[row] if table.ndim == 1 else table[row, frame.lanes & (WARP - 1)]


@operation("shfl", selective=True)
def shuffle(site: Site) -> Step:
    """`shfl.sync`: source lane by mode, clamp and segment; out of range keeps the own value."""
    site.take("sync")
    mode = site.take("up", "down", "bfly", "idx")
    kind = site.take_type()
    site.done()
    if kind.width != 32 or mode is None:
        raise site.unsupported("shfl form")
    first, second = site.pair()
    write, valid = site.writer(first, B32), site.writer(second, PRED)
    value, offset, clamp = site.bits(1, 32), site.bits(2, 32), site.bits(3, 32)
    line, text = site.instruction.line, site.instruction.text
    fixed = _fixed_sources(site, mode)
    distance = site.operand(2)
    swap = distance.value if mode == "bfly" and isinstance(distance, Constant) else 0
    if swap not in (1, 2, 4, 8, 16):  # else neighbouring runs of so many lanes change places
        swap = 0

    def run(frame: Frame) -> None:
        if fixed is not None and whole_warps(frame):
            source, good = fixed
            lanes = frame.array(value(frame))
            table = lanes.reshape(-1, WARP)
            if swap and good.all():
                halves = lanes.reshape(-1, 2, swap)
                write(frame, np.ascontiguousarray(halves[:, ::-1]).reshape(-1))
            else:
                write(frame, table.take(source, axis=1).reshape(-1))
            if second is not None:
                valid(frame, np.tile(good, len(table)))
            return
        lane = (frame.lanes & (WARP - 1)).astype(np.int64)
        source, good = _sources(
            mode,
            lane,
            frame.array(offset(frame)).astype(np.int64),
            frame.array(clamp(frame)).astype(np.int64),
        )
        table, active = by_warp(frame, value(frame), 0)
        _, row = np.unique(frame.lanes >> 5, return_inverse=True)
        if not active[row, source].all():
            bad = int(np.flatnonzero(~active[row, source])[0])
            raise BarrierError(
                f"shfl reads a lane that does not take part: {frame.origin(line, text).where(bad)}"
            )
        write(frame, table[row, source])
        valid(frame, good)

    return run


def _sources(mode: str, lane: Array, offset: Array, clamp: Array) -> tuple[Array, Array]:
    """Source lane of each lane, and whether it was in range (PTX manual, `shfl.sync`)."""
    offset = offset & 31
    bound, segment = clamp & 31, (clamp >> 8) & 31
    highest = (lane & segment) | (bound & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - offset
        good = source >= highest
    else:
        source = {
            "down": lane + offset,
            "bfly": lane ^ offset,
            "idx": lowest | (offset & ~segment),
        }[mode]
        good = source <= highest
    return np.where(good, source, lane), good


def _fixed_sources(site: Site, mode: str) -> tuple[Array, Array] | None:
    offset, clamp = site.operand(2), site.operand(3)
    if not isinstance(offset, Constant) or not isinstance(clamp, Constant):
        return None
    lane = np.arange(WARP)
    return _sources(mode, lane, np.full(WARP, offset.value), np.full(WARP, clamp.value))


_LANE_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)


def ballot(flags: Array) -> Array:
    """[warps, 32] flags -> one 32-bit mask a warp."""
    masks: Array = (flags * _LANE_BITS).sum(axis=1, dtype=np.uint32)
    return masks


@operation("vote", selective=True)
def vote(site: Site) -> Step:
    """`vote.sync` any, all, uni and ballot."""
    site.take("sync")
    mode = site.take("any", "all", "uni", "ballot")
    kind = site.take_type()
    site.done()
    read, write = site.bits(1, 1), site.result(kind)

    def run(frame: Frame) -> None:
        flags, active = by_warp(frame, np.asarray(read(frame)), False)
        result: Array
        if mode == "ballot":
            result = ballot(flags & active)
        elif mode == "any":
            result = np.any(flags & active, axis=1)
        elif mode == "all":
            result = np.all(flags | ~active, axis=1)
        else:
            result = np.all(flags | ~active, axis=1) | ~np.any(flags & active, axis=1)
        write(frame, to_lanes(frame, result))

    return run


_REDUCE: dict[str, Callable[..., Array]] = {
    "add": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}
_REDUCE_F32: dict[str, Callable[..., Array]] = {"min": np.fmin.reduce, "max": np.fmax.reduce}


@operation("redux", selective=True)
def reduce_warp(site: Site) -> Step:
    """`redux.sync` over integers, and min/max over f32."""
    site.take("sync")
    name = site.take(*_REDUCE)
    absolute, propagate = site.take("abs"), site.take("NaN")
    kind = site.take_type()
    site.done()
    if name is None or absolute or propagate or kind.width != 32:
        raise site.unsupported("redux form")
    function: Callable[..., Array] = _REDUCE[name]
    if kind.name == "f32":
        function = _REDUCE_F32.get(name, function)
    read, write = site.value(1, kind), site.result(kind)

    def run(frame: Frame) -> None:
        value = np.asarray(read(frame))
        table, active = by_warp(frame, value, 0)
        if active.all():
            result = function(table, axis=1)
        else:
            rows = [function(row[on]) for row, on in zip(table, active, strict=True)]
            result = np.array(rows)
        write(frame, to_lanes(frame, result.astype(value.dtype)))

    return run


@operation("elect", selective=True)
def elect(site: Site) -> Step:
    """`elect.sync`: the lowest active lane."""
    site.take("sync")
    site.done()
    first, second = site.pair()
    lane, chosen = site.writer(first, B32), site.writer(second, PRED)

    def run(frame: Frame) -> None:
        _, active = by_warp(frame, np.uint32(0), 0)
        leader = active.argmax(axis=1)
        lane(frame, to_lanes(frame, leader.astype(np.uint32)))
        column = np.arange(WARP) == leader[:, None]
        chosen(frame, to_lanes(frame, column))

    return run


@operation("match", selective=True)
def match(site: Site) -> Step:
    """`match.any.sync`: the mask of lanes that hold the same value."""
    mode = site.take("any", "all")
    site.take("sync")
    kind = site.take_type()
    site.done()
    if mode != "any":
        raise site.unsupported("match form")
    read, write = site.bits(1, kind.width), site.result(B32)

    def run(frame: Frame) -> None:
        table, active = by_warp(frame, read(frame), 0)
        same = (table[:, :, None] == table[:, None, :]) & active[:, None, :]
        masks = (same * _LANE_BITS).sum(axis=2, dtype=np.uint32)
        write(frame, to_lanes(frame, masks))

    return run

"""Atomics, fences, and the hints that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.errors import SimulationError
from k3fuse.kernels.simulator.formats import bf16_to_f32, f32_to_bf16
from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.ops_memory import take_order
from k3fuse.kernels.simulator.order import SCOPES
from k3fuse.kernels.simulator.syntax import Vector
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import Array, PtxType, Value, bits_type

_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
    "inc": lambda old, new: np.where(old >= new, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - np.uint32(1)),
}


@operation("atom", "red", selective=True)
def atomic(site: Site) -> Step:
    """`atom` and `red` on one element; lanes that hit the same address go one after the other."""
    if "async" in site.left:
        from k3fuse.kernels.simulator.ops_bulk import reduce_element_async

        return reduce_element_async(site)
    returns = site.instruction.parts[0] == "atom"
    kind = site.take_type()
    space = site.take("global", "shared", "shared::cta", "shared::cluster") or "global"
    order = take_order(site, "relaxed")
    name = site.take(*_COMBINE, "cas")
    site.take("noftz")
    site.done()
    if name is None or kind.kind in ("f16x2", "f32x2") or kind.name == "f16":
        raise site.unsupported("atomic operation")
    place = 1 if returns else 0
    if isinstance(site.operand(place + 1), Vector):
        raise site.unsupported("vector atomics")
    values = [site.bits(item, kind.width) for item in range(place + 1, site.count)]
    if len(values) != (2 if name == "cas" else 1):
        raise site.unsupported("number of operands")
    raw = bits_type(kind)
    write = site.result(raw) if returns else None
    shared = space.startswith("shared")
    pointer = site.pointer(place, 32 if shared else 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text, order)
        address = frame.array(pointer(frame))
        operands = [frame.array(value(frame)) for value in values]
        if shared:
            memory = frame.group.shared
            offset = memory.locate(address, frame.ctas(), kind.width // 8, who, "update", True)
            if memory.races is not None:
                memory.races.update(memory, offset, kind.width // 8, who, None)
            memory.read(offset, kind.width, 1, who.unchecked())
            memory.version += 1
            index = offset >> (kind.width.bit_length() - 4)
            old = apply_atomic(memory.views[kind.width], index, name, kind, operands)
        else:
            if order.releases:
                frame.group.delivery.flush(frame.group)
            old = np.zeros(frame.count, raw.bits)
            for view, chosen, index in frame.group.memory.update(address, kind.width, who):
                part = slice(None) if chosen is None else chosen
                old[part] = apply_atomic(view, index, name, kind, [x[part] for x in operands])
        if write is not None:
            write(frame, old)

    return run


def apply_atomic(
    view: Array, index: Array, name: str, kind: PtxType, operands: list[Array]
) -> Array:
    """Apply to `view[index]` in lane order; returns the old values. Duplicates are serialised."""
    old = np.empty(len(index), view.dtype)
    left = np.arange(len(index))
    while len(left):
        _, first = np.unique(index[left], return_index=True)
        now = left[np.sort(first)]
        before = view[index[now]]
        old[now] = before
        view[index[now]] = _updated(before, name, kind, [value[now] for value in operands])
        keep = np.ones(len(left), np.bool_)
        keep[first] = False
        left = left[keep]
    return old


def _updated(before: Array, name: str, kind: PtxType, operands: list[Array]) -> Value:
    if name == "cas":
        return np.where(before == operands[0], operands[1], before)
    function = _COMBINE[name]
    if kind.kind == "bf16x2":
        halves = [
            f32_to_bf16(function(bf16_to_f32(half(before)), bf16_to_f32(half(operands[0]))))
            for half in (_low, _high)
        ]
        return halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << np.uint32(16))
    if kind.kind == "bf":
        return f32_to_bf16(function(bf16_to_f32(before), bf16_to_f32(operands[0])))
    result = function(before.view(kind.dtype), operands[0].view(kind.dtype))
    return result.view(before.dtype)


def _low(word: Array) -> Array:
    return word.astype(np.uint16)


def _high(word: Array) -> Array:
    return (word >> np.uint32(16)).astype(np.uint16)


_FENCE_WORDS = [
    "acq_rel",
    "sc",
    "acquire",
    "release",
    "proxy",
    "tensormap::generic",
    "alias",
    "async",
    "mbarrier_init",
    "global",
    "shared::cta",
    "shared::cluster",
    "gl",
    "cta",
    "cluster",
    "gpu",
    "sys",
]


@operation("fence", "membar", selective=True)
def fence(site: Site) -> Step:
    """Fences: memory is sequentially consistent here, so they only deliver multicast stores.

    The race checker sees their scope; a proxy fence is one with .async.
    """
    words = site.left.copy()
    while site.take(*_FENCE_WORDS):
        pass
    site.done()
    strength = _fence_strength(words)

    def run(frame: Frame) -> None:
        frame.group.delivery.flush(frame.group)
        if frame.group.races is not None and strength is not None:
            frame.group.races.fence(frame.threads(), strength)

    return run


def _fence_strength(words: list[str]) -> int | None:
    """1 (cta) to 4 (sys); 0 for the async proxy, -1 for mbarrier_init, None for no order."""
    if "mbarrier_init" in words:
        return -1
    if "proxy" in words:
        return 0 if "async" in words else None
    if "gl" in words:
        return SCOPES.index("gpu")
    return max((SCOPES.index(word) for word in words if word in SCOPES[1:]), default=4)


@operation("prefetch", "prefetchu", "applypriority", "nanosleep", "setmaxnreg")
def no_effect(site: Site) -> Step:
    """Hints: nothing to do."""
    site.left.clear()
    return lambda frame: None


@operation("createpolicy")
def cache_policy(site: Site) -> Step:
    """A cache policy is a hint; its value is 0."""
    kind = site.take_type()
    site.left.clear()
    write = site.result(kind)
    return lambda frame: write(frame, np.uint64(0))


@operation("trap", selective=True)
def trap(site: Site) -> Step:
    """`trap`: the kernel gives up, which is an error of the run."""
    site.done()
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        raise SimulationError(f"trap: {frame.origin(line, text).where(0)}")

    return run

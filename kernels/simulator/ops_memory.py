"""Loads, stores, atomics and fences; parameters, global, shared, cluster, local, generic space."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3fuse.kernels.simulator.errors import MemoryAccessError
from k3fuse.kernels.simulator.machine import Frame, Step, Wait
from k3fuse.kernels.simulator.memory import GlobalMemory
from k3fuse.kernels.simulator.ops_integer import GENERIC_TAGS
from k3fuse.kernels.simulator.order import SCOPES, Order, order_of
from k3fuse.kernels.simulator.syntax import Address, Register, Symbol
from k3fuse.kernels.simulator.translate import Reader, Site, operation
from k3fuse.kernels.simulator.types import UNSIGNED, Array, PtxType, Value, bits_type

_SHARED_TAG, _LOCAL_TAG = (np.uint64(GENERIC_TAGS[name]) for name in ("shared", "local"))
ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
_HINTS = (
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::64B",
    "L2::128B",
    "L2::256B",
)
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const")


def take_order(site: Site, default: str = "weak") -> Order:
    """Take memory order, scope and cache hints; `default` is the order when there is none."""
    name = site.take(*ORDERS) or default
    scope = site.take(*SCOPES[1:])
    while site.take(*_HINTS):
        pass
    return order_of(name, scope)


def take_vector(site: Site) -> int:
    """Take `.v2`, `.v4` or `.v8`; returns the number of elements."""
    name = site.take("v2", "v4", "v8")
    return int(name[1:]) if name else 1


@operation("ld", "ldu", selective=True)
def load(site: Site) -> Step:
    """`ld` in all spaces."""
    kind = site.take_type()
    space = site.take(*SPACES) or "generic"
    order = take_order(site)
    count = take_vector(site)
    site.done()
    if space == "param":
        return _load_parameter(site, kind)
    if space == "const" or kind.width > 64:
        raise site.unsupported(f"loads from .{space}")
    items = site.items(0)
    if len(items) != count:
        raise site.unsupported("number of results")
    raw = bits_type(kind, signed=True)
    writes = [site.writer(item, raw) for item in items]
    fetch = _fetcher(site, space, kind.width, count, order)

    def run(frame: Frame) -> None:
        for write, value in zip(writes, fetch(frame), strict=True):
            write(frame, value.view(raw.dtype))

    return run


def _load_parameter(site: Site, kind: PtxType) -> Step:
    operand = site.operand(1)
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        raise site.unsupported("parameter address")
    name = operand.base.name
    names = [item.name for item in site.names.entry.parameters]
    if name not in names:
        raise site.unsupported(f"parameter {name}")
    index, start, size = names.index(name), operand.offset, kind.width // 8
    items = site.items(0)
    raw = bits_type(kind, signed=True)
    if start + size * len(items) > site.names.entry.parameters[index].size:
        raise site.unsupported("access beyond the parameter")
    writes = [site.writer(item, raw) for item in items]

    def run(frame: Frame) -> None:
        content = frame.group.parameters[index]
        for place, write in enumerate(writes):
            first = start + place * size
            write(frame, content[first : first + size].view(raw.dtype)[0])

    return run


Fetch = Callable[[Frame], list[Value]]


def _fetcher(site: Site, space: str, width: int, count: int, order: Order) -> Fetch:
    line, text = site.instruction.line, site.instruction.text
    if space in ("shared", "shared::cta", "shared::cluster"):
        pointer = site.pointer(1, 32)
        cluster = space == "shared::cluster"

        def from_shared(frame: Frame) -> list[Value]:
            who, shared = frame.origin(line, text, order), frame.group.shared
            place = shared.locate(
                frame.array(pointer(frame)), frame.ctas(), width // 8 * count, who, "read", cluster
            )
            return shared.read(place, width, count, who)

        return from_shared
    if space == "local":
        local = _local_pointer(site, 1)
        return lambda frame: load_local(frame, local(frame), width, count, line, text)
    wide = site.pointer(1, 64)

    def from_generic(frame: Frame) -> list[Value]:
        address = frame.array(wide(frame))
        kind = tag_of(address)
        who = frame.origin(line, text, order)
        if kind == "shared":
            shared = frame.group.shared
            place = shared.locate(
                address.astype(np.uint32), frame.ctas(), width // 8 * count, who, "read", True
            )
            return shared.read(place, width, count, who)
        if kind == "local":
            return load_local(frame, address & ~_LOCAL_TAG, width, count, line, text)
        values = frame.group.memory.load(address, width, count, who)
        if order.strength:
            frame.group.waits[line] = Wait(
                frame.lanes,
                _polled(frame.group.memory, address, values, line, text),
                frame.group.round,
            )
        return values

    return from_generic


def _polled(
    memory: GlobalMemory, address: Array, values: list[Value], line: int, text: str
) -> Callable[[int], str]:
    def describe(lane: int) -> str:
        return (
            f"reads {int(values[0][lane]):#x} from {memory.describe(int(address[lane]))} "
            f"again and again, line {line} `{text}`"
        )

    return describe


def tag_of(address: Array) -> str:
    """The space of generic addresses: "global", "shared" or "local"; all lanes must agree."""
    if not len(address) or int(address.max()) < 1 << 61:
        return "global"
    tags = address >> np.uint64(61)
    if (tags == 2).all():
        return "shared"
    if (tags == 1).all():
        return "local"
    if (tags == 3).all():
        raise MemoryAccessError("a generic access to parameters; use ld.param")
    raise MemoryAccessError("a generic access mixes address spaces among lanes; not modelled")


def _local_pointer(site: Site, place: int) -> Reader:
    base, _ = site.address(place)
    wide = isinstance(base, Register) and site.names.widths[base.name] == 64
    return site.pointer(place, 64 if wide or isinstance(base, Symbol) else 32)


def _local_places(frame: Frame, pointer: Value, size: int, line: int, text: str) -> Array:
    place = frame.array(pointer).astype(np.int64)
    limit = frame.group.local.shape[1]
    if (place < 0).any() or (place + size > limit).any() or (place % size).any():
        raise MemoryAccessError(
            f"local access of {size} bytes outside {limit} bytes or misaligned: "
            f"{frame.origin(line, text).where(0)}"
        )
    return place


def load_local(
    frame: Frame, pointer: Value, width: int, count: int, line: int, text: str
) -> list[Value]:
    """Read local memory, one copy a lane."""
    size = width // 8
    place = _local_places(frame, pointer, size * count, line, text)
    columns = place[:, None] + np.arange(size * count)
    rows = frame.lanes[:, None]
    if not frame.group.local_written[rows, columns].all():
        raise MemoryAccessError(
            f"read of local memory before it was written: {frame.origin(line, text).where(0)}"
        )
    data = np.ascontiguousarray(frame.group.local[rows, columns]).view(UNSIGNED[width])
    return [data[:, item] for item in range(count)]


def store_local(frame: Frame, pointer: Value, values: list[Array], line: int, text: str) -> None:
    """Write local memory, one copy a lane."""
    block = np.stack(values, axis=1)
    raw = np.ascontiguousarray(block).view(np.uint8).reshape(frame.count, -1)
    place = _local_places(frame, pointer, raw.shape[1], line, text)
    columns = place[:, None] + np.arange(raw.shape[1])
    rows = frame.lanes[:, None]
    frame.group.local[rows, columns] = raw
    frame.group.local_written[rows, columns] = True


@operation("st", selective=True)
def store(site: Site) -> Step:
    """`st` in all spaces (`st.async` is in ops_async)."""
    if site.take("async"):
        from k3fuse.kernels.simulator.ops_store_async import store_async

        return store_async(site)
    kind = site.take_type()
    space = site.take(*SPACES) or "generic"
    order = take_order(site)
    count = take_vector(site)
    site.done()
    if space in ("param", "const"):
        raise site.unsupported(f"stores to .{space}")
    reads = site.item_bits(1, kind.width)
    if len(reads) != count:
        raise site.unsupported("number of values")
    line, text, width = site.instruction.line, site.instruction.text, kind.width
    if space in ("shared", "shared::cta", "shared::cluster"):
        pointer, cluster = site.pointer(0, 32), space == "shared::cluster"

        def to_shared(frame: Frame) -> None:
            who, shared = frame.origin(line, text, order), frame.group.shared
            place = shared.locate(
                frame.array(pointer(frame)), frame.ctas(), width // 8 * count, who, "write", cluster
            )
            shared.write(place, width, [frame.array(read(frame)) for read in reads], who)

        return to_shared
    if space == "local":
        local = _local_pointer(site, 0)
        return lambda frame: store_local(
            frame, local(frame), [frame.array(read(frame)) for read in reads], line, text
        )
    wide = site.pointer(0, 64)

    def to_generic(frame: Frame) -> None:
        address = frame.array(wide(frame))
        values = [frame.array(read(frame)) for read in reads]
        kind_of = tag_of(address)
        who = frame.origin(line, text, order)
        if kind_of == "shared":
            shared = frame.group.shared
            place = shared.locate(
                address.astype(np.uint32), frame.ctas(), width // 8 * count, who, "write", True
            )
            shared.write(place, width, values, who)
        elif kind_of == "local":
            store_local(frame, address & ~_LOCAL_TAG, values, line, text)
        else:
            if order.releases:  # earlier multicast stores are part of what it publishes
                frame.group.delivery.flush(frame.group)
            frame.group.memory.store(address, width, values, who)

    return to_generic

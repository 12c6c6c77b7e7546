"""Global memory: named buffers of all ranks, with red zones, poison and written-byte records.

Addresses are virtual. Every buffer starts at a multiple of 1 MiB and is followed by at least 16 MiB
that belong to nobody, so that a row, or a whole tile, too far is always caught and can be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.simulator.counters import Traffic
from k3fuse.kernels.simulator.errors import MemoryAccessError, OverlapError
from k3fuse.kernels.simulator.order import WEAK, Order
from k3fuse.kernels.simulator.types import UNSIGNED, Array, Value

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.grids import Grid
    from k3fuse.kernels.simulator.overlap import Watch
    from k3fuse.kernels.simulator.races import RaceChecker

POISON = 0xFF  # every unwritten byte: NaN in all float formats, -1 in integers
_ALIGN = 1 << 20
_RED_ZONE = 16 << 20
_RANK_SPACE = 1 << 40
_MULTICAST_SPACE = 1 << 52


@dataclass
class Buffer:
    """One tensor in the memory of one rank.

    `written` is None when every byte holds a value; `changed` tells that a kernel stored to it.
    `leads` holds, for each 4-byte word that landed ahead of the rest of a torn store, its number.
    """

    name: str
    rank: int
    base: int
    size: int
    data: Array
    written: Array | None = None
    changed: bool = False
    leads: Array | None = None
    views: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = {width: self.data.view(UNSIGNED[width]) for width in (8, 16, 32, 64)}

    def describe(self) -> str:
        """The buffer in words, for messages."""
        return f"buffer '{self.name}' of rank {self.rank} ({self.size} bytes)"


@dataclass(frozen=True)
class Origin:
    """Who does an access, and how: rank, PTX line and text, CTA of each lane, grid, memory order.

    Accesses without a grid are counted for the first one. `threads` numbers the lanes through all
    groups for the race checker; None: not to be checked.
    """

    rank: int
    line: int
    text: str
    ctas: Array
    grid: Grid | None = None
    order: Order = WEAK
    threads: Array | None = None

    @property
    def strong(self) -> bool:
        """Whether the access is atomic or has an order other than weak."""
        return self.order.strength > 0

    def pick(self, lanes: Array | slice) -> Origin:
        """The same for some of the lanes."""
        threads = None if self.threads is None else self.threads[lanes]
        return replace(self, ctas=self.ctas[lanes], threads=threads)

    def at(self, ctas: Array) -> Origin:
        """The same instruction for other addresses, of which the race checker knows already."""
        return replace(self, ctas=ctas, threads=None)

    def unchecked(self) -> Origin:
        """The same for accesses of which the race checker knows already."""
        return self if self.threads is None else replace(self, threads=None)

    def where(self, lane: int) -> str:
        """Rank, CTA and PTX line of one of the accessing lanes; its launch when there are more."""
        cta = int(self.ctas[lane]) if len(self.ctas) > lane else 0
        launch = f" of {self.grid.label}" if self.grid is not None and self.grid.label else ""
        return f"rank {self.rank}, CTA {cta}, line {self.line} `{self.text}`{launch}"


class GlobalMemory:
    """The buffers of all ranks. Loads and stores take byte addresses (uint64), one per lane."""

    def __init__(self, ranks: int) -> None:
        self.buffers: list[Buffer] = []
        self.starts: Array = np.zeros(0, np.int64)
        self.top = [(rank + 1) * _RANK_SPACE for rank in range(ranks)]
        self.groups: list[tuple[int, int, list[Buffer]]] = []
        self.traffic = Traffic()
        self.version = 0
        self.races: RaceChecker | None = None
        self.seen_leads: set[int] = set()

    def add(self, name: str, rank: int, content: Array, fresh: bool = False) -> Buffer:
        """Place bytes (uint8) in the memory of `rank`; `fresh` poisons them as unwritten."""
        size = len(content)
        base = self.top[rank]
        self.top[rank] = -(-(base + size + _RED_ZONE) // _ALIGN) * _ALIGN
        data = np.empty(-(-max(size, 1) // 16) * 16, np.uint8)
        if not fresh:
            data[:size] = content
        data[0 if fresh else size :] = POISON
        written = np.zeros(len(data), np.uint8) if fresh else None
        buffer = Buffer(name, rank, base, size, data, written)
        self.buffers.append(buffer)
        self.buffers.sort(key=lambda item: item.base)
        self.starts = np.array([item.base for item in self.buffers], np.int64)
        return buffer

    def add_multicast(self, buffers: list[Buffer]) -> int:
        """A multicast address range over buffers of equal size; returns its first address."""
        base = _MULTICAST_SPACE + len(self.groups) * _RANK_SPACE
        self.groups.append((base, buffers[0].size, buffers))
        return base

    def multicast(self, address: Array, size: int, site: Origin) -> list[Array]:
        """The unicast addresses, one array per member, that multicast addresses stand for."""
        place = address.view(np.int64)
        for base, length, buffers in self.groups:
            if len(place) and base <= int(place[0]) < base + _RANK_SPACE:
                bad = (place < base) | (place + size > base + length)
                if bad.any():
                    lane = int(np.flatnonzero(bad)[0])
                    raise MemoryAccessError(
                        f"multimem access of {size} bytes outside its {length} bytes: "
                        f"{site.where(lane)}"
                    )
                return [(place - base + item.base).view(np.uint64) for item in buffers]
        raise MemoryAccessError(f"not a multicast address: {site.where(0)}")

    def describe(self, address: int) -> str:
        """The byte of a buffer that an address means, for messages."""
        index = int(np.searchsorted(self.starts, address, side="right")) - 1
        buffer = self.buffers[index]
        return f"byte {address - buffer.base} of {buffer.describe()}"

    def load(self, address: Array, width: int, count: int, site: Origin) -> list[Value]:
        """Read `count` elements of `width` bits at each address, in one aligned access."""
        size = width // 8 * count
        parts = list(self.resolve(address, size, site, "read"))
        if len(parts) == 1 and parts[0][1] is None:
            return self._read(*parts[0], width, count, site)
        results: list[Value] = [np.zeros(len(address), UNSIGNED[width]) for _ in range(count)]
        for buffer, chosen, offset in parts:
            values = self._read(buffer, chosen, offset, width, count, site)
            for result, value in zip(results, values, strict=True):
                result[chosen] = value
        return results

    def prefetch(self, address: Array, site: Origin) -> None:
        """Count 16 bytes at each address as read; raise where they are nobody's."""
        traffic = self.traffic if site.grid is None else site.grid.traffic
        for buffer, _, offset in self.resolve(address, 16, site, "prefetch"):
            traffic.record(site.rank, buffer, offset, 16, write=False)

    def _read(
        self,
        buffer: Buffer,
        chosen: Array | None,
        offset: Array,
        width: int,
        count: int,
        site: Origin,
    ) -> list[Value]:
        if self.races is not None:
            self.races.read(buffer, offset, width // 8 * count, site, chosen)
        if buffer.written is not None:
            self._check_written(buffer, offset, width // 8 * count, chosen, site)
        if buffer.leads is not None:
            for word in range(max(width * count // 32, 1)):
                self.seen_leads.update(buffer.leads.take((offset >> 2) + word).tolist())
        self._note(buffer, chosen, offset, width // 8 * count, site, write=False)
        first = offset >> (width.bit_length() - 4)
        view = buffer.views[width]
        if width * count == 128 and width == 32:
            rows = view.reshape(-1, 4).take(first >> 2, axis=0)
            return [rows[:, item] for item in range(4)]
        return [view.take(first + item if item else first) for item in range(count)]

    def store(self, address: Array, width: int, values: list[Array], site: Origin) -> None:
        """Write the elements `values` (one array per element) at each address."""
        size = width // 8 * len(values)
        self.version += 1
        for buffer, chosen, offset in self.resolve(address, size, site, "write"):
            if self.races is not None:
                self.races.write(buffer, offset, size, site, chosen)
            self._note(buffer, chosen, offset, size, site, write=True)
            buffer.changed = True
            first = offset >> (width.bit_length() - 4)
            view = buffer.views[width]
            for item, value in enumerate(values):
                view[first + item] = value if chosen is None else value[chosen]
            if buffer.written is not None:
                mark_written(buffer.written, offset, size)

    def update(
        self, address: Array, width: int, site: Origin
    ) -> Iterator[tuple[Array, Array | None, Array]]:
        """For atomics: (elements of the buffer, chosen lanes or None, element index of each)."""
        self.version += 1
        for buffer, chosen, offset in self.resolve(address, width // 8, site, "update"):
            if self.races is not None:
                self.races.update(buffer, offset, width // 8, site, chosen)
            if buffer.written is not None:
                self._check_written(buffer, offset, width // 8, chosen, site)
            self._note(buffer, chosen, offset, width // 8, site, write=False)
            self._note(buffer, chosen, offset, width // 8, site, write=True)
            buffer.changed = True
            yield buffer.views[width], chosen, offset >> (width.bit_length() - 4)

    def mark_leads(self, address: Array, numbers: Array | int) -> None:
        """Number the words that landed ahead of the rest of a torn store; 0 once it is whole."""
        place = address.view(np.int64)
        index = int(np.searchsorted(self.starts, int(place[0]), side="right")) - 1
        buffer = self.buffers[index]
        if buffer.leads is None:
            buffer.leads = np.zeros(len(buffer.data) // 4, np.int64)
        buffer.leads[(place - buffer.base) >> 2] = numbers

    def announce(self, address: Array, size: int, site: Origin, *, write: bool) -> None:
        """Check an access that is done later, as one that happens now, against other grids."""
        grid = site.grid
        if grid is not None and grid.watch is not None and grid.watch.active:
            verb = "write" if write else "read"
            for buffer, chosen, offset in self.resolve(address, size, site, verb):
                self._compare(grid.watch, buffer, chosen, offset, size, site, write)

    def _note(
        self,
        buffer: Buffer,
        chosen: Array | None,
        offset: Array,
        size: int,
        site: Origin,
        *,
        write: bool,
    ) -> None:
        """Count an access, and check it against grids of the rank that run at the same time."""
        grid = site.grid
        if grid is None:
            self.traffic.record(site.rank, buffer, offset, size, write=write)
            return
        if grid.watch is None:
            grid.traffic.record(site.rank, buffer, offset, size, write=write)
            return
        if grid.watch.active:
            self._compare(grid.watch, buffer, chosen, offset, size, site, write)
        mark = grid.watch.marks.of(site.line, site.text, site.strong)
        grid.traffic.record(site.rank, buffer, offset, size, write=write, mark=mark)

    def _compare(
        self,
        watch: Watch,
        buffer: Buffer,
        chosen: Array | None,
        offset: Array,
        size: int,
        site: Origin,
        write: bool,
    ) -> None:
        try:
            watch.check(buffer, chosen, offset, size, site, write=write)
        except OverlapError as error:
            if self.races is None:
                raise
            self.races.hold(error)

    def _check_written(
        self, buffer: Buffer, offset: Array, size: int, chosen: Array | None, site: Origin
    ) -> None:
        """Raise when a byte that is read was never written."""
        written = buffer.written
        if written is None:
            return
        for byte in range(size):
            missing = written[offset + byte] == 0
            if missing.any():
                lane = int(np.flatnonzero(missing)[0])
                at = int(offset[lane]) + byte
                lane = lane if chosen is None else int(chosen[lane])
                error = MemoryAccessError(
                    f"read of byte {at} of {buffer.describe()} before anyone wrote it: "
                    f"{site.where(lane)}"
                )
                if self.races is None:
                    raise error
                self.races.hold(error)

    def resolve(
        self, address: Array, size: int, site: Origin, verb: str
    ) -> Iterator[tuple[Buffer, Array | None, Array]]:
        """Split an access by buffer: (buffer, chosen lanes or None for all, byte offsets)."""
        if not len(address):
            return
        place = address.view(np.int64)
        low, high = int(place.min()), int(place.max())
        index = int(np.searchsorted(self.starts, low, side="right")) - 1
        if index >= 0:
            buffer = self.buffers[index]
            if low >= buffer.base and high + size <= buffer.base + buffer.size:
                yield buffer, None, self._aligned(place - buffer.base, size, buffer, site, verb)
                return
        owner = np.searchsorted(self.starts, place, side="right") - 1
        for index in np.unique(owner):
            chosen = np.flatnonzero(owner == index)
            if index < 0:
                self._fault(int(place[chosen[0]]), size, site, verb, int(chosen[0]))
            buffer = self.buffers[index]
            bad = place[chosen] + size > buffer.base + buffer.size
            if bad.any():
                lane = int(chosen[np.flatnonzero(bad)[0]])
                self._fault(int(place[lane]), size, site, verb, lane)
            offset = self._aligned(place[chosen] - buffer.base, size, buffer, site, verb)
            yield buffer, chosen, offset

    def _aligned(self, offset: Array, size: int, buffer: Buffer, site: Origin, verb: str) -> Array:
        if size > 1 and (offset & (size - 1)).any():
            lane = int(np.flatnonzero(offset & (size - 1))[0])
            raise MemoryAccessError(
                f"misaligned {verb} of {size} bytes at byte {int(offset[lane])} of "
                f"{buffer.describe()}: {site.where(lane)}"
            )
        return offset

    def _fault(self, place: int, size: int, site: Origin, verb: str, lane: int) -> None:
        """Raise, naming the buffer that the address lies closest to."""
        near = min(
            self.buffers,
            key=lambda item: max(item.base - place, place + size - item.base - item.size),
            default=None,
        )
        if near is None or abs(place - near.base) > _RANK_SPACE // 2:
            raise MemoryAccessError(
                f"{verb} of {size} bytes at {place:#x}, which is no buffer: {site.where(lane)}"
            )
        offset = place - near.base
        side = (
            f"{offset + size - near.size} bytes past the end"
            if offset >= 0
            else f"{-offset} bytes before the start"
        )
        raise MemoryAccessError(
            f"out-of-bounds {verb} of {size} bytes at byte {offset} of {near.describe()}, {side}: "
            f"{site.where(lane)}"
        )


def mark_written(written: Array, offset: Array, size: int) -> None:
    """Record that `size` bytes at each offset hold a value."""
    for byte in range(size):
        written[offset + byte] = 1

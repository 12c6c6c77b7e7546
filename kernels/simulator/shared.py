"""Shared memory of the CTAs of one group: bytes, which of them are written, and mbarriers.

A shared address has 24 bits of offset; the upper 8 bits are 0 for the own CTA, or the rank in the
cluster plus one, as `mapa` makes them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from k3fuse.kernels.simulator.errors import BarrierError, MemoryAccessError
from k3fuse.kernels.simulator.memory import POISON, Origin
from k3fuse.kernels.simulator.types import UNSIGNED, Array, Value

if TYPE_CHECKING:
    from k3fuse.kernels.simulator.races import RaceChecker

OFFSET_MASK = np.uint32(0xFFFFFF)
RANK_SHIFT = np.uint32(24)
FIRST_BYTE = 1024


@dataclass
class MBarriers:
    """The mbarriers at one shared offset, one per CTA of the group.

    `expected` and `pending` count arrivals, `bytes` the transaction bytes still to come, `phase`
    the completed phases. `valid` is False before `mbarrier.init`.
    """

    valid: Array
    expected: Array
    pending: Array
    bytes: Array
    phase: Array

    @classmethod
    def empty(cls, ctas: int) -> MBarriers:
        """Barriers of `ctas` CTAs, none of them initialised."""
        zeros = [np.zeros(ctas, np.int64) for _ in range(4)]
        return cls(np.zeros(ctas, np.bool_), *zeros)


class SharedMemory:
    """`ctas` x `size` bytes; `first_cta` and `ranks_in_cluster` locate the peers of a cluster."""

    def __init__(self, ctas: int, size: int, cluster_base: Array, cta_ranks: Array) -> None:
        self.size = -(-size // 16) * 16
        self.ctas = ctas
        self.limit = size
        self.cluster_base = cluster_base
        self.cta_ranks = cta_ranks
        self.data = np.full(ctas * self.size, POISON, np.uint8)
        self.written = np.zeros(ctas * self.size, np.uint8)
        self.views = {width: self.data.view(UNSIGNED[width]) for width in (8, 16, 32, 64)}
        self.marks = {width: self.written.view(UNSIGNED[width]) for width in (8, 16, 32, 64)}
        self.barriers: dict[int, MBarriers] = {}
        self.version = 0
        self.gone: Array | None = None  # CTAs whose threads have all exited, once one has
        self.races: RaceChecker | None = None
        self.read_bytes = self.written_bytes = self.remote_bytes = 0

    def target(self, address: Array, ctas: Array, cluster: bool, site: Origin) -> Array:
        """The CTA (index in the group) that each shared address means."""
        rank = (address >> RANK_SHIFT).astype(np.int64)
        if not rank.any():
            return ctas
        own = self.cta_ranks[ctas] + 1
        if not cluster and ((rank != 0) & (rank != own)).any():
            raise MemoryAccessError(f"shared::cta access to another CTA: {site.where(0)}")
        found: Array = np.where(rank > 0, self.cluster_base[ctas] + rank - 1, ctas)
        self.still_there(found, ctas, site)
        return found

    def still_there(self, owners: Array, ctas: Array | None, site: Origin) -> None:
        """Refuse memory of CTAs that have exited; their own (`ctas`) is not looked at."""
        if self.gone is None:
            return
        late = self.gone[owners] if ctas is None else self.gone[owners] & (owners != ctas)
        if late.any():
            lane = int(np.flatnonzero(late)[0])
            rank = int(self.cta_ranks[owners[lane]])
            raise MemoryAccessError(
                f"shared memory of CTA {rank} of the cluster is used after that CTA has exited; "
                f"let it wait for its peers (barrier.cluster) before it ends: {site.where(lane)}"
            )

    def locate(
        self, address: Array, ctas: Array, size: int, site: Origin, verb: str, cluster: bool = False
    ) -> Array:
        """Byte offsets into `data`, checked for bounds and alignment."""
        offset = (address & OFFSET_MASK).astype(np.int64)
        owner = self.target(address, ctas, cluster, site)
        if owner is not ctas:
            self.remote_bytes += size * int(np.count_nonzero(owner != ctas))
        low, high = int(offset.min()), int(offset.max())
        if low < FIRST_BYTE or high + size > self.limit:
            bad = (offset < FIRST_BYTE) | (offset + size > self.limit)
            lane = int(np.flatnonzero(bad)[0])
            raise MemoryAccessError(
                f"out-of-bounds {verb} of {size} bytes at byte {int(offset[lane]) - FIRST_BYTE} of "
                f"shared memory ({self.limit - FIRST_BYTE} bytes): {site.where(lane)}"
            )
        if size > 1 and (offset & (size - 1)).any():
            lane = int(np.flatnonzero(offset & (size - 1))[0])
            raise MemoryAccessError(
                f"misaligned {verb} of {size} bytes at byte {int(offset[lane]) - FIRST_BYTE} of "
                f"shared memory: {site.where(lane)}"
            )
        return owner * self.size + offset

    def read(self, place: Array, width: int, count: int, site: Origin) -> list[Value]:
        """`count` elements of `width` bits at byte offsets into `data`."""
        if self.races is not None:
            self.races.read(self, place, width // 8 * count, site, None)
        self.read_bytes += width // 8 * count * len(place)
        first = place >> (width.bit_length() - 4)
        view, marks = self.views[width], self.marks[width]
        full = UNSIGNED[width](0x0101010101010101 & (2**width - 1))
        values = []
        for item in range(count):
            index = first + item if item else first
            missing = marks.take(index) != full
            if missing.any():
                lane = int(np.flatnonzero(missing)[0])
                byte = int(place[lane]) % self.size - FIRST_BYTE + item * width // 8
                error = MemoryAccessError(
                    f"read of byte {byte} of shared memory before anyone wrote it: "
                    f"{site.where(lane)}"
                )
                if self.races is None:
                    raise error
                self.races.hold(error)
            values.append(view.take(index))
        return values

    def write(
        self, place: Array, width: int, values: list[Array], site: Origin | None = None
    ) -> None:
        """Write elements at byte offsets into `data`; without a site the checker knows already."""
        self.version += 1
        if self.races is not None and site is not None:
            self.races.write(self, place, width // 8 * len(values), site, None)
        self.written_bytes += width // 8 * len(values) * len(place)
        first = place >> (width.bit_length() - 4)
        view, marks = self.views[width], self.marks[width]
        full = UNSIGNED[width](0x0101010101010101 & (2**width - 1))
        for item, value in enumerate(values):
            view[first + item] = value
            marks[first + item] = full

    def write_bytes(self, place: int, content: Array) -> None:
        """Write a run of bytes at one offset into `data`."""
        self.version += 1
        self.written_bytes += len(content)
        self.data[place : place + len(content)] = content
        self.written[place : place + len(content)] = 1

    def spread(self, place: int, mask: int, cta: int, site: Origin) -> Array:
        """The same offset as `place` in every CTA of a 16-bit mask of ranks of a cluster."""
        ranks = np.flatnonzero([mask >> bit & 1 for bit in range(16)])
        size = int(self.cta_ranks.max()) + 1
        if not len(ranks) or ranks[-1] >= size:
            raise MemoryAccessError(
                f"multicast mask {mask:#x} in a cluster of {size} CTAs: {site.where(0)}"
            )
        places: Array = (self.cluster_base[cta] + ranks) * self.size + place % self.size
        return places

    def barrier_groups(self, place: Array, site: Origin) -> list[tuple[MBarriers, Array, Array]]:
        """Group barrier addresses by offset: (barriers, CTA of each lane, chosen lanes)."""
        offset, owner = place % self.size, place // self.size
        result = []
        for value in np.unique(offset):
            chosen = np.flatnonzero(offset == value)
            barriers = self.barriers.get(int(value))
            if barriers is None or not barriers.valid[owner[chosen]].all():
                raise BarrierError(
                    f"mbarrier at byte {int(value) - FIRST_BYTE} of shared memory is used before "
                    f"mbarrier.init: {site.where(int(chosen[0]))}"
                )
            result.append((barriers, owner[chosen], chosen))
        return result

    def init_barrier(self, place: Array, count: Array, site: Origin) -> None:
        """`mbarrier.init`: a new barrier that expects `count` arrivals a phase."""
        self.version += 1
        for offset, owner, value in zip(place % self.size, place // self.size, count, strict=True):
            if value < 1:
                raise BarrierError(f"mbarrier.init with count {value}: {site.where(0)}")
            barriers = self.barriers.setdefault(int(offset), MBarriers.empty(self.ctas))
            barriers.valid[owner] = True
            barriers.expected[owner] = barriers.pending[owner] = value
            barriers.bytes[owner] = barriers.phase[owner] = 0
        if self.races is not None:
            self.races.barrier_init(site, self, place)

    def drop_barrier(self, place: Array, site: Origin) -> None:
        """`mbarrier.inval`: the bytes may be used for something else."""
        for barriers, owner, _ in self.barrier_groups(place, site):
            barriers.valid[owner] = False

    def arrive(self, place: Array, count: Array, expect: Array, site: Origin) -> Array:
        """Arrive `count` times after adding `expect` transaction bytes; returns the phase joined.

        A negative `expect` with count 0 completes bytes, as asynchronous copies do.
        """
        self.version += 1
        if self.races is not None:
            self.races.barrier_arrive(site, self, place)
        phase = np.zeros(len(place), np.uint64)
        for barriers, owner, chosen in self.barrier_groups(place, site):
            phase[chosen] = barriers.phase[owner]
            np.add.at(barriers.bytes, owner, expect[chosen])
            np.subtract.at(barriers.pending, owner, count[chosen])
            touched = np.unique(owner)
            if (barriers.pending[touched] < 0).any():
                offset = int(place[chosen[0]]) % self.size - FIRST_BYTE
                error = BarrierError(
                    f"mbarrier at byte {offset} of shared memory gets more arrivals than it "
                    f"expects in one phase: {site.where(int(chosen[0]))}"
                )
                if self.races is None:
                    raise error
                self.races.hold(error)
            done = touched[(barriers.pending[touched] == 0) & (barriers.bytes[touched] == 0)]
            if self.races is not None and len(done):
                self.races.barrier_phase(self, done * self.size + place[chosen[0]] % self.size)
            barriers.phase[done] += 1
            barriers.pending[done] = barriers.expected[done]
        return phase

    def phases(self, place: Array, site: Origin) -> Array:
        """How many phases of the mbarrier at each place are complete."""
        phase = np.zeros(len(place), np.int64)
        for barriers, owner, chosen in self.barrier_groups(place, site):
            phase[chosen] = barriers.phase[owner]
        return phase

"""One call that runs a PTX kernel on torch CPU tensors: `simulate`."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from k3fuse.kernels.simulator import (  # noqa: F401  (each import registers its instructions)
    ops_async,
    ops_atomic,
    ops_bits,
    ops_convert,
    ops_float,
    ops_integer,
    ops_memory,
    ops_mma,
    ops_multimem,
    ops_sync,
    ops_warp,
)
from k3fuse.kernels.simulator.counters import SimReport
from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.machine import WARP, Dim3, Group, Program, cluster_order
from k3fuse.kernels.simulator.memory import Buffer, GlobalMemory
from k3fuse.kernels.simulator.parser import parse
from k3fuse.kernels.simulator.scheduler import Scheduler
from k3fuse.kernels.simulator.syntax import Entry
from k3fuse.kernels.simulator.translate import translate
from k3fuse.kernels.simulator.types import Array

# Float32 temporaries of 64 KiB stay in the cache and below the mmap limit of malloc.
_GROUP_LANES = 16384
_MAX_SHARED = 232448  # bytes of dynamic shared memory a CTA of sm_90 and later may have


@dataclass(frozen=True)
class Fresh:
    """A tensor whose bytes nobody has written yet: a read before a write is an error."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Multicast:
    """A multicast address over equal tensors, one of each rank, that are parameters as well."""

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Owned:
    """A tensor in the memory of rank `rank`, passed to any rank (a peer pointer)."""

    tensor: torch.Tensor
    rank: int


Parameter = torch.Tensor | Fresh | Owned | Multicast | int | float | bytes


@lru_cache(maxsize=64)
def _program(text: str, entry: str) -> tuple[Entry, Program]:
    entries = parse(text).entries
    name = entry or next(iter(entries))
    if name not in entries:
        raise ValueError(f"entry is {name!r}; the PTX has {', '.join(entries)}")
    return entries[name], translate(entries[name])


def simulate(
    ptx_text: str,
    entry: str = "",
    *,
    grid: Dim3,
    block: Dim3,
    cluster: Dim3 = (1, 1, 1),
    dynamic_smem: int = 0,
    params: Sequence[Sequence[Parameter]],
    ranks: int = 1,
    seed: int | None = None,
    names: Sequence[str] = (),
) -> SimReport:
    """Run one kernel on all ranks at once and write the results back into its tensors.

    `params` holds the parameters of each rank (`ranks` lists). A tensor becomes a pointer to a copy
    in the memory of that rank; it must be a dense CPU tensor, and is updated in place at the end.
    A tensor that several ranks pass lives in the memory of the first one, or of `Owned.rank`.
    `names` names the parameters in messages. `entry` may be empty: the first kernel of the text.
    With a `seed`, warps advance and asynchronous copies land in a random order drawn from it.

    Raises ValueError for a wrong call, UnsupportedPtxError before anything runs, and
    MemoryAccessError, BarrierError or DeadlockError for what the kernel does wrong; tensors are
    then left as they were.
    """
    started = time.perf_counter()
    code, program = _program(ptx_text, entry)
    _check(code, grid, block, cluster, dynamic_smem, params, ranks)
    memory = GlobalMemory(ranks)
    placed = _Placement(memory, names or [item.name for item in code.parameters])
    packed = [placed.pack(code, rank, values) for rank, values in enumerate(params)]
    delivery = Delivery(seed)
    threads = block[0] * block[1] * block[2]
    size = cluster[0] * cluster[1] * cluster[2]
    order = np.fromiter(cluster_order(grid, cluster), np.int64)
    step = max(1, _GROUP_LANES // threads // size) * size
    report = SimReport(code.name, grid, block, cluster, ranks, seed)
    with np.errstate(all="ignore"):
        groups = [
            Group(
                program,
                memory,
                rank,
                order[first : first + step],
                (grid, block, cluster),
                dynamic_smem,
                packed[rank],
                delivery,
            )
            for first in range(0, len(order), step)
            for rank in range(ranks)
        ]
        scheduler = Scheduler(groups, memory, delivery, seed)
        scheduler.run()
    placed.write_back()
    _fill(report, program, groups, memory)
    report.rounds = scheduler.rounds
    report.seconds = time.perf_counter() - started
    return report


def _check(
    code: Entry,
    grid: Dim3,
    block: Dim3,
    cluster: Dim3,
    dynamic_smem: int,
    params: Sequence[Sequence[Parameter]],
    ranks: int,
) -> None:
    """Raise ValueError for a launch that no GPU would accept."""
    threads = block[0] * block[1] * block[2]
    if threads % WARP or not 0 < threads <= 1024:
        raise ValueError(f"block is {block}: {threads} threads; use a multiple of 32 up to 1024")
    if code.block is not None and code.block != block:
        raise ValueError(f"block is {block}; the kernel was compiled for {code.block}")
    if min(*grid, *cluster) < 1:
        raise ValueError(f"grid is {grid} and cluster {cluster}; all sizes must be 1 or more")
    if any(grid[axis] % cluster[axis] for axis in range(3)):
        raise ValueError(f"grid is {grid}, no multiple of the cluster {cluster}")
    if not 0 <= dynamic_smem <= _MAX_SHARED:
        raise ValueError(f"dynamic_smem is {dynamic_smem}; use 0 to {_MAX_SHARED} bytes")
    if ranks < 1 or len(params) != ranks:
        raise ValueError(f"params has {len(params)} lists; give one for each of {ranks} ranks")
    for rank, values in enumerate(params):
        if len(values) != len(code.parameters):
            raise ValueError(
                f"params[{rank}] has {len(values)} values; the kernel takes {len(code.parameters)}"
            )


class _Placement:
    """Puts tensors into the simulated memory and brings them back."""

    def __init__(self, memory: GlobalMemory, names: Sequence[str]) -> None:
        self.memory, self.names = memory, names
        self.buffers: dict[tuple[int, int], tuple[Buffer, torch.Tensor]] = {}

    def pack(self, code: Entry, rank: int, values: Sequence[Parameter]) -> list[Array]:
        """The bytes of each parameter of a rank."""
        result = []
        for place, (variable, value) in enumerate(zip(code.parameters, values, strict=True)):
            name = self.names[place] if place < len(self.names) else variable.name
            content = self._bytes(value, rank, name, variable.size, variable.type_name)
            if len(content) != variable.size:
                raise ValueError(
                    f"parameter {name} has {len(content)} bytes; the kernel takes {variable.size}"
                )
            result.append(np.frombuffer(content, np.uint8))
        return result

    def _bytes(self, value: Parameter, rank: int, name: str, size: int, kind: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, Multicast):
            members = [self.place(item, at, name, False) for at, item in enumerate(value.tensors)]
            if len({item.size for item in members}) != 1:
                raise ValueError(f"parameter {name}: the tensors of a Multicast differ in size")
            return self.memory.add_multicast(members).to_bytes(8, "little")
        if isinstance(value, Owned):
            return self.place(value.tensor, value.rank, name, False).base.to_bytes(8, "little")
        if isinstance(value, Fresh):
            return self.place(value.tensor, rank, name, True).base.to_bytes(8, "little")
        if isinstance(value, torch.Tensor):
            return self.place(value, rank, name, False).base.to_bytes(8, "little")
        if isinstance(value, float):
            if kind not in ("f32", "f64"):
                raise ValueError(f"parameter {name} is .{kind}; give an int, not {value!r}")
            return struct.pack("<f" if kind == "f32" else "<d", value)
        return int(value % (1 << (8 * size))).to_bytes(size, "little")

    def place(self, tensor: torch.Tensor, rank: int, name: str, fresh: bool) -> Buffer:
        """The buffer of a tensor, made when it is first seen."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"parameter {name}: give a contiguous CPU tensor")
        if not 0 <= rank < len(self.memory.top):
            raise ValueError(f"parameter {name}: there is no rank {rank}")
        size = tensor.numel() * tensor.element_size()
        key = (tensor.data_ptr(), size)
        known = self.buffers.get(key)
        if known is not None:
            return known[0]
        for (start, length), (other, _) in self.buffers.items():
            if key[0] < start + length and start < key[0] + size:
                raise ValueError(f"parameters {name} and {other.name} overlap in memory")
        content = _raw(tensor)
        buffer = self.memory.add(name, rank, content, fresh)
        self.buffers[key] = buffer, tensor
        return buffer

    def write_back(self) -> None:
        """Copy the buffers that were stored to back into their tensors."""
        for buffer, tensor in self.buffers.values():
            if buffer.changed:
                _raw(tensor)[:] = buffer.data[: buffer.size]


def _raw(tensor: torch.Tensor) -> Array:
    """The bytes of a contiguous tensor, sharing its memory."""
    raw: Array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return raw


def _fill(report: SimReport, program: Program, groups: list[Group], memory: GlobalMemory) -> None:
    """Add up the counters of all groups."""
    opcodes: Counter[str] = Counter()
    for number, code in enumerate(program.codes):
        total = sum(group.issues[number] for group in groups)
        if code.issued:
            warps = total // code.issued
            for instruction in code.block.body:
                opcodes[instruction.opcode] += warps
            if code.block.last is not None:
                opcodes[code.block.last.opcode] += warps
    report.opcodes = dict(opcodes)
    report.warp_instructions = sum(opcodes.values())
    for (rank, name, owner, write), part in memory.traffic.by_buffer().items():
        report.traffic[rank, name, owner, "write" if write else "read"] = part
    for group in groups:
        report.shared_read += group.shared.read_bytes
        report.shared_written += group.shared.written_bytes
        report.shared_distinct += int(np.count_nonzero(group.shared.written))
        report.remote_shared += group.shared.remote_bytes

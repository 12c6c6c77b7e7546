"""Kernel parameters: torch tensors become buffers of the simulated memory, and come back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from k3fuse.kernels.simulator.memory import Buffer, GlobalMemory
from k3fuse.kernels.simulator.syntax import Entry
from k3fuse.kernels.simulator.tensor_map import TensorMap
from k3fuse.kernels.simulator.types import Array


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


@dataclass(frozen=True)
class Inside:
    """The address `offset` bytes into a tensor: a column of a bank, a row of a batch."""

    tensor: torch.Tensor
    offset: int


Parameter = torch.Tensor | Fresh | Owned | Inside | Multicast | TensorMap | int | float | bytes


class Placement:
    """Puts tensors into the simulated memory and brings them back."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.buffers: dict[tuple[int, int], tuple[Buffer, torch.Tensor]] = {}

    def pack(
        self, code: Entry, rank: int, values: Sequence[Parameter], names: Sequence[str]
    ) -> list[Array]:
        """The bytes of each parameter of a rank; `names` replace those of the PTX in messages."""
        result = []
        for place, (variable, value) in enumerate(zip(code.parameters, values, strict=True)):
            name = names[place] if place < len(names) else variable.name
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
        if isinstance(value, Inside):
            start = self.place(value.tensor, rank, name, False)
            if not 0 <= value.offset <= start.size:
                raise ValueError(
                    f"parameter {name}: offset {value.offset} is outside its {start.size} bytes"
                )
            return (start.base + value.offset).to_bytes(8, "little")
        if isinstance(value, Fresh):
            return self.place(value.tensor, rank, name, True).base.to_bytes(8, "little")
        if isinstance(value, torch.Tensor):
            return self.place(value, rank, name, False).base.to_bytes(8, "little")
        if isinstance(value, TensorMap):
            return self._map(value, rank, name, size)
        if isinstance(value, float):
            if kind not in ("f32", "f64"):
                raise ValueError(f"parameter {name} is .{kind}; give an int, not {value!r}")
            return struct.pack("<f" if kind == "f32" else "<d", value)
        return int(value % (1 << (8 * size))).to_bytes(size, "little")

    def _map(self, value: TensorMap, rank: int, name: str, size: int) -> bytes:
        """A map as a parameter of its own, or a pointer to one in the memory of the rank."""
        try:
            tiles = value.tiles()
            owner = rank if value.rank is None else value.rank
            base = self.place(value.tensor, owner, name, value.fresh).base
            content = tiles.encode(base)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
        if size == len(content):
            return content
        buffer = self.memory.add(f"{name} map", rank, np.frombuffer(content, np.uint8))
        return buffer.base.to_bytes(8, "little")

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

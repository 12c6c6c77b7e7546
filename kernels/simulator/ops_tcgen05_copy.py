"""Tensor memory to registers and back (`tcgen05.ld`, `st`), shared to tensor memory (`tcgen05.cp`).

The places follow the figures of the PTX ISA, "Data movement shape". A warp reaches the 32 lanes of
tensor memory that belong to its number modulo 4. Loads complete at once here; stores land, with a
seed, as late as `tcgen05.wait::st`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from k3fuse.kernels.simulator.descriptors import Matrix
from k3fuse.kernels.simulator.errors import MemoryAccessError, TensorMemoryError
from k3fuse.kernels.simulator.machine import WARP, Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_warp import whole_warps
from k3fuse.kernels.simulator.syntax import Constant
from k3fuse.kernels.simulator.tensor_memory import TensorMemory, split
from k3fuse.kernels.simulator.translate import Site
from k3fuse.kernels.simulator.types import B32, Array

# Registers a thread for each repetition.
_SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_REPEATS = tuple(f"x{1 << power}" for power in range(8))


@lru_cache(maxsize=128)
def fragment(shape: str, registers: int, split_off: int) -> tuple[Array, Array]:
    """(lane, column) offsets, both [32, registers], of the word in each register of a warp."""
    thread, item = np.arange(WARP)[:, None], np.arange(registers)[None, :]
    zero = np.zeros((WARP, registers), np.int64)
    lane, column = {
        "32x32b": (thread, item),
        "16x64b": (8 * (thread % 2) + thread // 4, 2 * item + thread // 2 % 2),
        "16x128b": (thread // 4 + 8 * (item % 2), thread % 4 + 4 * (item // 2)),
        "16x256b": (
            thread // 4 + 8 * (item // 2 % 2),
            2 * (thread % 4) + item % 2 + 8 * (item // 4),
        ),
        "16x32bx2": (thread % 16, item + thread // 16 * split_off),
    }[shape]
    return zero + lane, zero + column


class _Transfer:
    """What `ld` and `st` have in common: shape, registers, and the words that a warp reaches."""

    def __init__(self, site: Site, data: int, pack: str) -> None:
        while site.take("sync", "aligned", "b32"):
            pass
        self.shape = site.take(*_SHAPES) or ""
        repeat = site.take(*_REPEATS)
        self.packed = bool(site.take(pack))
        site.done()
        if not self.shape or repeat is None:
            raise site.unsupported("shape or repetition")
        self.registers = _SHAPES[self.shape] * int(repeat[1:])
        if len(site.items(data)) != self.registers or self.registers > 128:
            raise site.unsupported("number of registers")
        self.split_off = 0
        if self.shape == "16x32bx2":
            operand = site.operand(2 if data == 0 else 1)
            if not isinstance(operand, Constant):
                raise site.unsupported("the split must be a constant")
            self.split_off = operand.value
        self.pointer = site.pointer(1 - data if data == 0 else 0, 32)
        self.line, self.text = site.instruction.line, site.instruction.text

    def places(self, frame: Frame) -> list[tuple[int, Array, Array, int, Origin]]:
        """(CTA, lanes, columns, first lane in the frame, origin) for each warp of a frame."""
        who = frame.origin(self.line, self.text)
        if not whole_warps(frame):
            raise TensorMemoryError(f"part of a warp executes a .sync.aligned: {who.where(0)}")
        lane, column = fragment(self.shape, self.registers, self.split_off)
        if self.packed:
            column = column * 2
        address, ctas = frame.array(self.pointer(frame)), frame.ctas()
        result = []
        for at in range(0, frame.count, WARP):
            one = who.at(who.ctas[at:])
            row, start = split(int(address[at]))
            quarter = int(frame.group.thread[frame.lanes[at]]) // WARP % 4
            if row // WARP != quarter or row % WARP + int(lane.max()) >= WARP:
                raise TensorMemoryError(
                    f"warp {quarter} (modulo 4) reaches lanes {WARP * quarter} to "
                    f"{WARP * quarter + 31} of tensor memory, not {row} to "
                    f"{row + int(lane.max())}: {one.where(0)}"
                )
            result.append((int(ctas[at]), lane + row, column + start, at, one))
        return result


def memory_of(group: Group, who: Origin) -> TensorMemory:
    """The tensor memory of a group; an error when nobody has allocated any."""
    if group.tensor is None:
        raise TensorMemoryError(f"tensor memory is used before tcgen05.alloc: {who.where(0)}")
    return group.tensor


def load(site: Site) -> Step:
    """`tcgen05.ld`: registers from tensor memory."""
    move = _Transfer(site, 0, "pack::16b")
    writes = [site.writer(item, B32) for item in site.items(0)]

    def run(frame: Frame) -> None:
        result = np.empty((frame.count, move.registers), np.uint32)
        for cta, lane, column, at, who in move.places(frame):
            memory = memory_of(frame.group, who)
            words = memory.read(cta, lane, column, who)
            if move.packed:
                above = memory.read(cta, lane, column + 1, who)
                words = words & np.uint32(0xFFFF) | above << np.uint32(16)
            result[at : at + WARP] = words
        for place, write in enumerate(writes):
            write(frame, np.ascontiguousarray(result[:, place]))

    return run


def store(site: Site) -> Step:
    """`tcgen05.st`: registers to tensor memory."""
    move = _Transfer(site, site.count - 1, "unpack::16b")
    reads = site.item_bits(site.count - 1, 32)

    def run(frame: Frame) -> None:
        values = np.stack([frame.array(read(frame)) for read in reads], axis=1)
        for cta, lane, column, at, who in move.places(frame):
            memory, words = memory_of(frame.group, who), values[at : at + WARP]
            pieces = [partial(memory.write, cta, lane, column, words, who)]
            if move.packed:
                low, high = words & np.uint32(0xFFFF), words >> np.uint32(16)
                pieces = [
                    partial(memory.write, cta, lane, column, low, who),
                    partial(memory.write, cta, lane, column + 1, high, who),
                ]
            frame.group.delivery.send(memory, list(pieces), fenced=True)

    return run


# Shape -> rows, bytes a row, and the first lane of each copy of each block of rows.
_COPIES: dict[tuple[str, str], tuple[int, int, tuple[tuple[int, tuple[int, ...]], ...]]] = {
    ("128x256b", ""): (128, 32, ((0, (0,)),)),
    ("128x128b", ""): (128, 16, ((0, (0,)),)),
    ("64x128b", "warpx2::02_13"): (64, 16, ((0, (0, 64)),)),
    ("64x128b", "warpx2::01_23"): (64, 16, ((0, (0, 32)), (32, (64, 96)))),
    ("32x128b", "warpx4"): (32, 16, ((0, (0, 32, 64, 96)),)),
}


def copy_in(site: Site) -> Step:
    """`tcgen05.cp`: a matrix in shared memory, named by a descriptor, to lanes and columns."""
    shape = site.take("128x256b", "128x128b", "64x128b", "32x128b")
    spread = site.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    site.done()
    if (shape or "", spread or "") not in _COPIES:
        raise site.unsupported("tcgen05.cp shape")
    rows, width, blocks = _COPIES[shape or "", spread or ""]
    target, source = site.pointer(0, 32), site.bits(1, 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        memory, ctas = memory_of(frame.group, who), frame.ctas()
        places, words = frame.array(target(frame)), frame.array(source(frame))
        for at in range(frame.count):
            one = who.at(who.ctas[at:])
            matrix = decoded(Matrix.decode, int(words[at]), one)
            where = matrix.places(rows, 4, k_major=True, columns=width)
            see_reads(frame.group, who, at, int(ctas[at]), where)
            work = partial(
                _copy, frame.group, memory, int(ctas[at]), where, int(places[at]), blocks, one
            )
            memory.issue(int(ctas[at]), work)

    return run


def _copy(
    group: Group,
    memory: TensorMemory,
    cta: int,
    where: Array,
    target: int,
    blocks: tuple[tuple[int, tuple[int, ...]], ...],
    who: Origin,
) -> None:
    content = shared_words(group, np.array([cta]), where, 32, who)[0]
    lane, column = split(target)
    across = column + np.arange(where.shape[1])[None, :]
    for first, lanes in blocks:
        count = 32 if len(blocks) > 1 else len(where)
        for start in lanes:
            down = lane + start + np.arange(count)[:, None]
            memory.write(cta, down, across, content[first : first + count], who)


T = TypeVar("T")


def decoded(decode: Callable[[int], T], word: int, who: Origin) -> T:
    """Decode a descriptor; its errors name the instruction."""
    try:
        return decode(word)
    except ValueError as error:
        raise TensorMemoryError(f"{error}: {who.where(0)}") from None


def see_reads(group: Group, who: Origin, lane: int, cta: int, where: Array) -> None:
    """Tell the race checker which 16-byte pieces of shared memory the tensor core reads."""
    if group.races is not None:
        pieces = np.unique(where & ~15) + cta * group.shared.size
        one = who.pick(slice(lane, lane + 1))
        group.races.async_read(one, group.shared, pieces[None], 16)


def shared_words(group: Group, ctas: Array, where: Array, width: int, who: Origin) -> Array:
    """Elements of `width` bits at shared addresses [..] of each CTA: [len(ctas), ..]."""
    shared = group.shared
    low, high = int(where.min()), int(where.max())
    if low < 1024 or high + width // 8 > shared.limit:
        raise MemoryAccessError(
            f"the matrix takes bytes {low - 1024} to {high + width // 8 - 1025} of shared memory "
            f"({shared.limit - 1024} bytes): {who.where(0)}"
        )
    index = ctas.reshape(-1, *[1] * where.ndim) * shared.size + where
    index >>= width.bit_length() - 4
    marks = shared.marks[width].take(index)
    if (marks != marks.dtype.type(0x0101010101010101 & (1 << width) - 1)).any():
        raise MemoryAccessError(
            f"the matrix has bytes of shared memory that nobody wrote: {who.where(0)}"
        )
    shared.read_bytes += width // 8 * index.size
    words: Array = shared.views[width].take(index)
    return words

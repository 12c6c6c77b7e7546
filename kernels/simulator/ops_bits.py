"""Bit manipulation: counts, fields, byte permutes, three-input logic and funnel shifts."""

from __future__ import annotations

import numpy as np

from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.syntax import Constant
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import U32, Value


@operation("popc", "clz", "brev", "bfind")
def bit_counts(site: Site) -> Step:
    """Population count, leading zeros, bit reversal and the highest set bit."""
    name = site.instruction.parts[0]
    kind = site.take_type()
    site.done()
    if kind.kind == "s":
        raise site.unsupported("signed bfind")
    out = U32 if name != "brev" else kind
    read, write = site.bits(1, kind.width), site.result(out)
    width = kind.width

    def bits(value: Value) -> Value:
        planes = np.arange(width, dtype=np.uint64)
        return (np.asarray(value, np.uint64)[..., None] >> planes) & np.uint64(1)

    def run(frame: Frame) -> None:
        value = read(frame)
        if name == "popc":
            write(frame, np.bitwise_count(value).astype(np.uint32))
            return
        planes = bits(value)
        highest = np.where(planes.any(-1), width - 1 - planes[..., ::-1].argmax(-1), -1)
        if name == "brev":
            weight = np.uint64(1) << np.arange(width, dtype=np.uint64)[::-1]
            write(frame, (planes * weight).sum(-1, dtype=np.uint64).astype(kind.bits))
        elif name == "clz":
            write(frame, (width - 1 - highest).astype(np.uint32))
        else:
            write(frame, highest.astype(np.int32).view(np.uint32))

    return run


@operation("bfe")
def extract(site: Site) -> Step:
    """Unsigned bit-field extract."""
    kind = site.take_type()
    site.done()
    if kind.kind != "u":
        raise site.unsupported("signed bfe")
    a, start, length = site.bits(1, kind.width), site.bits(2, 32), site.bits(3, 32)
    write, width = site.result(kind), kind.width

    def run(frame: Frame) -> None:
        first = start(frame).astype(np.uint64) & np.uint64(255)
        size = np.minimum(length(frame).astype(np.uint64) & np.uint64(255), np.uint64(width))
        value = a(frame).astype(np.uint64) >> np.minimum(first, np.uint64(63))
        value = np.where(first >= width, np.uint64(0), value)
        low = (np.uint64(1) << np.minimum(size, np.uint64(63))) - np.uint64(1)
        ones = np.where(size >= 64, ~np.uint64(0), low)
        write(frame, (value & ones).astype(kind.bits))

    return run


@operation("prmt")
def permute(site: Site) -> Step:
    """Byte permute in its default mode; bit 3 of a selector replicates the sign of the byte."""
    kind = site.take_type()
    site.done()
    a, b, selector, write = site.bits(1, 32), site.bits(2, 32), site.bits(3, 32), site.result(kind)

    def run(frame: Frame) -> None:
        source = a(frame).astype(np.uint64) | (b(frame).astype(np.uint64) << np.uint64(32))
        choice = selector(frame)
        total: Value = np.uint32(0)
        for place in range(4):
            nibble = (choice >> np.uint32(4 * place)) & np.uint32(15)
            move = ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
            byte = ((source >> move) & np.uint64(255)).astype(np.uint32)
            fill = (byte >> np.uint32(7)) * np.uint32(255)
            byte = np.where((nibble & np.uint32(8)) != 0, fill, byte).astype(np.uint32)
            total = total | (byte << np.uint32(8 * place))
        write(frame, total)

    return run


@operation("lop3")
def logic3(site: Site) -> Step:
    """Any function of three bits, given as a table of eight."""
    kind = site.take_type()
    site.done()
    reads = [site.bits(place, 32) for place in (1, 2, 3)]
    table, write = site.operand(4), site.result(kind)
    if not isinstance(table, Constant):
        raise site.unsupported("the table must be a constant")
    rows = [row for row in range(8) if table.value >> row & 1]

    def run(frame: Frame) -> None:
        a, b, c = (read(frame) for read in reads)
        total: Value = a & np.uint32(0)
        for row in rows:
            total = total | (
                (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            )
        write(frame, total)

    return run


@operation("shf")
def funnel(site: Site) -> Step:
    """Funnel shift of the pair `{b, a}`."""
    left = site.take("l", "r") == "l"
    clamp = site.take("clamp", "wrap") == "clamp"
    kind = site.take_type()
    site.done()
    a, b, count, write = site.bits(1, 32), site.bits(2, 32), site.bits(3, 32), site.result(kind)

    def run(frame: Frame) -> None:
        amount = count(frame)
        amount = np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)
        steps = amount.astype(np.uint64)
        pair = a(frame).astype(np.uint64) | (b(frame).astype(np.uint64) << np.uint64(32))
        word = (pair << steps) >> np.uint64(32) if left else pair >> steps
        write(frame, word.astype(np.uint32))

    return run

"""`tcgen05.mma` on one CTA: kind::f16 and kind::mxf8f6f4 with block scales, float32 sums.

D[m, n] (+)= A[m, k] B[n, k]^T over 32 bytes of K. The products are exact; those of one instruction
and the old sum are added in float64 and rounded to float32 once. A tensor core adds in an order and
with a precision that are not published: sums that float32 holds exactly agree, others nearly.

Places (PTX ISA, "Data path layout organization", "Scale factor layouts"): row m lies in lane m, for
M = 64 in lane m / 16 * 32 + m % 16. With one scale for 32 values, row m of A (n of B) has its scale
in lane m % 32 of every quarter, in the column m / 32 from the address, in the byte that the
instruction descriptor names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from k3fuse.kernels.simulator.descriptors import K_BYTES, Instruction, Matrix
from k3fuse.kernels.simulator.errors import TensorMemoryError
from k3fuse.kernels.simulator.formats import DECODE, bf16_to_f32
from k3fuse.kernels.simulator.machine import Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_tcgen05_copy import (
    decoded,
    memory_of,
    see_reads,
    shared_words,
)
from k3fuse.kernels.simulator.syntax import Address, Vector
from k3fuse.kernels.simulator.tensor_memory import LANES, TensorMemory, split
from k3fuse.kernels.simulator.translate import Reader, Site
from k3fuse.kernels.simulator.types import Array

_COLLECTORS = tuple(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))


@dataclass(frozen=True)
class _Job:
    """One multiplication: operands as read from the registers of the thread that issued it."""

    instruction: Instruction
    d: int
    a: Matrix | int
    b: Matrix
    keep: bool
    hidden: tuple[int, ...]
    a_scales: int
    b_scales: int

    def pieces(self) -> list[Array]:
        """The shared addresses of the operands that lie in shared memory."""
        kind = self.instruction
        sides = [(self.a, kind.a, kind.m, kind.a_k_major), (self.b, kind.b, kind.n, kind.b_k_major)]
        return [
            matrix.places(rows, item_bytes(name), k_major=k_major)
            for matrix, name, rows, k_major in sides
            if isinstance(matrix, Matrix)
        ]


def multiply(site: Site) -> Step:
    """`tcgen05.mma` with A in shared memory (a descriptor) or in tensor memory (an address)."""
    kind = site.take("kind::f16", "kind::mxf8f6f4")
    scaled = bool(site.take("block_scale"))
    if scaled:
        site.take("scale_vec::1X", "block32")
    site.take(*_COLLECTORS)
    site.done()
    if kind is None or scaled is (kind == "kind::f16"):
        raise site.unsupported("kind of tcgen05.mma")
    d, b, word = site.pointer(0, 32), site.bits(2, 64), site.bits(3, 32)
    from_tensor = isinstance(site.operand(1), Address)
    a = site.pointer(1, 32) if from_tensor else site.bits(1, 64)
    scales = [site.pointer(place, 32) for place in (4, 5)] if scaled else []
    next_ = 4 + len(scales)
    hidden: list[Reader] = []
    if site.count > next_ and isinstance(site.operand(next_), Vector):
        hidden = site.item_bits(next_, 32)
        next_ += 1
    if site.count != next_ + 1 or (hidden and len(hidden) != 4):
        raise site.unsupported("operands of tcgen05.mma")
    keep = site.bits(next_, 1)
    line, text = site.instruction.line, site.instruction.text
    name = kind.removeprefix("kind::")

    def run(frame: Frame) -> None:
        who = frame.origin(line, text)
        memory, ctas = memory_of(frame.group, who), frame.ctas()
        numbers = [frame.array(read(frame)) for read in (d, a, b, word, *scales, *hidden)]
        keeps = frame.array(keep(frame))
        jobs: dict[_Job, list[int]] = {}
        for at in range(frame.count):
            one = who.at(who.ctas[at:])
            values = [int(number[at]) for number in numbers]
            job = _job(values, bool(keeps[at]), from_tensor, scaled, name, one)
            jobs.setdefault(job, []).append(at)
            if frame.group.races is not None:
                for where in job.pieces():
                    see_reads(frame.group, who, at, int(ctas[at]), where)
        for job, lanes in jobs.items():
            chosen = np.array(lanes)
            one = who.at(who.ctas[chosen])
            _issue(frame.group, memory, ctas[chosen], job, one)

    return run


def _job(
    values: list[int], keep: bool, from_tensor: bool, scaled: bool, kind: str, who: Origin
) -> _Job:
    d, a, b, word = values[:4]
    instruction = decoded(partial(Instruction.decode, kind=kind), word, who)
    left = a if from_tensor else decoded(Matrix.decode, a, who)
    scales = tuple(values[4:6]) if scaled else (0, 0)
    hidden = tuple(values[6:] if scaled else values[4:])
    right = decoded(Matrix.decode, b, who)
    if from_tensor and (instruction.a == "e2m1" or not instruction.a_k_major):
        raise TensorMemoryError(f"4-bit or M-major A in tensor memory: {who.where(0)}")
    return _Job(instruction, d, left, right, keep, hidden if any(hidden) else (), *scales)


def _issue(group: Group, memory: TensorMemory, ctas: Array, job: _Job, who: Origin) -> None:
    """Do it for several CTAs at once when it is done now, else one after the other."""
    if group.delivery.random is None and len(np.unique(ctas)) == len(ctas):
        _perform(group, memory, ctas, job, who)
        return
    for at, cta in enumerate(ctas):
        one = who.at(who.ctas[at:])
        memory.issue(int(cta), partial(_perform, group, memory, ctas[at : at + 1], job, one))


def _perform(group: Group, memory: TensorMemory, ctas: Array, job: _Job, who: Origin) -> None:
    kind = job.instruction
    rows = np.arange(kind.m)
    lanes = rows if kind.m == 128 else rows // 16 * 32 + rows % 16
    b = _operand(group, ctas, job.b, kind.b, kind.n, kind.b_k_major, who)
    if isinstance(job.a, Matrix):
        a = _operand(group, ctas, job.a, kind.a, kind.m, kind.a_k_major, who)
    else:
        a = _from_tensor(memory, ctas, job.a, lanes, kind.a, who)
    product = (a @ b.transpose(0, 2, 1)) * (kind.a_sign * kind.b_sign)
    if kind.a in DECODE:
        product = product * _scales(memory, ctas, job, lanes, who)
    lane, column = split(job.d)
    down, across = lane + lanes[:, None], column + np.arange(kind.n)[None, :]
    if job.hidden:
        shown = ~(np.array(job.hidden)[lanes // 32] >> lanes % 32 & 1).astype(np.bool_)
        down, product = down[shown], product[:, shown]
    for place, cta in enumerate(ctas):
        total = product[place]
        if kind.m == LANES and lane == 0 and not job.hidden:
            # The usual case, without an index of every word.
            part = memory.columns(int(cta), column, kind.n)
            if part is not None and (not job.keep or memory.written[cta, :, part].all()):
                words = memory.words[cta, :, part].view(np.float32)
                words[...] = total + words if job.keep else total
                memory.written[cta, :, part] = True
                continue
        if job.keep:
            total = total + memory.read(int(cta), down, across, who).view(np.float32)
        words = total.astype(np.float32).view(np.uint32)
        memory.write(int(cta), down, across, words, who)


def item_bytes(name: str) -> int:
    """Bytes that an element takes in shared memory."""
    return 2 if name in ("f16", "bf16") else 1


def _decode(codes: Array, name: str) -> Array:
    if name == "bf16":
        return np.asarray(bf16_to_f32(codes), np.float64)
    if name == "f16":
        return codes.view(np.float16).astype(np.float64)
    return DECODE[name][codes].astype(np.float64)


def _operand(
    group: Group, ctas: Array, matrix: Matrix, name: str, rows: int, k_major: bool, who: Origin
) -> Array:
    """A tile of shared memory as numbers, [ctas, rows, k] float64."""
    item = item_bytes(name)
    where = matrix.places(rows, item, k_major=k_major)
    if name != "e2m1":
        return _decode(shared_words(group, ctas, where, 8 * item, who), name)
    # 16 values of 4 bits lie in the first 8 of 16 bytes, the lower half of a byte first.
    codes = shared_words(group, ctas, (where & ~15) + (where & 15) // 2, 8, who)
    return _decode(codes >> (where & 1).astype(np.uint8) * np.uint8(4) & np.uint8(15), name)


def _from_tensor(
    memory: TensorMemory, ctas: Array, address: int, lanes: Array, name: str, who: Origin
) -> Array:
    """A tile of tensor memory, 8 words of K a row, as numbers, [ctas, rows, k] float64."""
    lane, column = split(address)
    down, across = lane + lanes[:, None], column + np.arange(K_BYTES // 4)[None, :]
    words = np.stack([memory.read(int(cta), down, across, who) for cta in ctas])
    kind = np.uint16 if name in ("f16", "bf16") else np.uint8
    return _decode(np.ascontiguousarray(words).view(kind), name)


def _scales(memory: TensorMemory, ctas: Array, job: _Job, lanes: Array, who: Origin) -> Array:
    """Products of the scales of rows and columns, [ctas, m, n] float64.

    Each quarter of the lanes uses its own copy of the scales.
    """
    kind = job.instruction
    rows, columns = np.arange(kind.m), np.arange(kind.n)
    quarter = lanes // 32 * 32
    sides = []
    for address, byte, row in (
        (job.a_scales, kind.a_scale, rows[:, None]),
        (job.b_scales, kind.b_scale, columns[None, :]),
    ):
        lane, column = split(address & 0x3FFFFFFF)
        down = lane + quarter[:, None] + row % 32
        across = column + row // 32 + 0 * down
        words = np.stack([memory.read(int(cta), down, across, who) for cta in ctas])
        codes = (words >> np.uint32(8 * byte)).astype(np.uint8)
        sides.append(DECODE["ue8m0"][codes].astype(np.float64))
    product: Array = sides[0] * sides[1]
    return product

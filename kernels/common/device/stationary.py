"""y[8 or 16 tokens, 64 rows] = x W^T in a CTA that holds its rows of W before x exists.

The warps are two halves of the rows times parts of K: four where nothing else is said
(`geometry.py`). The first columns of W sit in registers, REGISTER_K where nothing else is said,
96 a thread; the columns beyond, where there are any, in shared memory. Tensor cores (mma.sync
m16n8k16, BF16 in, FP32 out) see output rows as their 16 and tokens as their 8. The order of
summation is the same for every token and every number of tokens: within a part the columns in
order, even and odd halves of 32 apart, then the parts in order.

A lane's 16 bytes of a row are eight neighbouring columns: the columns of a step are numbered so
that both operands agree, which a dot product allows.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import ptx, vector
from k3fuse.kernels.common.geometry import PAD, PARTS, REGISTER_K, ROWS, SUM_PITCH, UPPER_PAD

TILES = 2  # of 16 rows, a warp
# Neighbouring rows of W a thread has, as rows 0 and 8 of its tiles: their sums are one store.
LINES = 2 * TILES
BLOCK = 32  # columns of two mma steps, one 16-byte load a lane
ELEMENT = 2
N = 8  # tokens of one mma


def pitch(k: int) -> int:
    """Bytes of a row of x with k columns in shared memory."""
    return k * ELEMENT + PAD


def upper_pitch(k: int) -> int:
    """Bytes of a row of W with k columns in shared memory."""
    return k * ELEMENT + UPPER_PAD


class Stationary:
    """One thread's share of W, and the products with it. lane, warp: of the 2 x parts warps.

    k: columns of the CTA. held: those in registers. row_k: columns of a row of W, k by default.
    """

    def __init__(
        self, k: int, lane: Any, warp: Any, packed: bool, *, parts: int = PARTS,
        held: int = REGISTER_K, row_k: int = 0,
    ) -> None:  # fmt: skip
        if held % (parts * BLOCK) or k not in (held, 2 * held):
            raise ValueError(
                f"k={k}, held={held}; use held or twice as many, a multiple of {parts * BLOCK}"
            )
        self.k, self.packed, self.held_k, self.row_k = k, packed, held, row_k or k
        self.part_k = held // parts
        self.blocks = self.part_k // BLOCK
        self.half, self.part = warp % Int32(2), warp // Int32(2)
        self.line, self.column = lane // Int32(4), lane % Int32(4)
        self.held: list[list[list[Any]]] = []

    @property
    def upper_k(self) -> int:
        """Columns in shared memory."""
        return self.k - self.held_k

    def load(self, weight: Any, first_row: Any, policy: Any) -> None:
        """Read this thread's registers of W: `weight` [.., row_k] from its row `first_row`."""
        row = first_row + self.half * Int32(ROWS // 2) + self.line * Int32(LINES)
        start = self.part * Int32(self.part_k) + self.column * Int32(8)
        address = weight + (row.to(Int64) * Int64(self.row_k) + start.to(Int64)) * Int64(ELEMENT)
        lines = [address + Int64(i * self.row_k * ELEMENT) for i in range(LINES)]
        for block in range(self.blocks):
            offset = block * BLOCK * ELEMENT
            self.held.append([ptx.load16_once(line, offset, policy) for line in lines])

    def products(self, x: Any, upper: Any, groups: int, last_token: Any) -> list[list[Any]]:
        """Partial sums of this warp's part: [tile][group of 8 tokens][4], FP32.

        x: shared memory, rows of `pitch(k)` bytes; tokens beyond `last_token` repeat that one.
        upper: shared memory of the columns beyond the registers, rows of `upper_pitch` bytes.
        """
        sums = [[[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(groups)] for _ in range(2)]
        rows = []
        for group in range(groups):
            token = ptx.least_of(self.line + Int32(N * group), last_token)
            start = self.part * Int32(self.part_k * ELEMENT) + self.column * Int32(16)
            rows.append(x + token * Int32(pitch(self.k)) + start)
        if self.upper_k:
            line = self.half * Int32(ROWS // 2) + self.line * Int32(LINES)
            line = line * Int32(upper_pitch(self.upper_k))
            upper = (
                upper + line + self.part * Int32(self.part_k * ELEMENT) + self.column * Int32(16)
            )
        for block in range(self.k // self.held_k * self.blocks):
            inside = block % self.blocks * BLOCK * ELEMENT
            if block < self.blocks:
                held = self.held[block]
            else:
                step = upper_pitch(self.upper_k)
                held = [ptx.shared_load16(upper, inside + i * step) for i in range(LINES)]
            offset = inside + block // self.blocks * self.held_k * ELEMENT
            for group in range(groups):
                b = ptx.shared_load16(rows[group], offset)
                for tile in range(TILES):
                    top, low = held[2 * tile], held[2 * tile + 1]
                    for half in range(2):
                        i, j = 2 * half, 2 * half + 1
                        a = (top[i], low[i], top[j], low[j])
                        sums[tile][group][half] = ptx.mma_bf16(
                            sums[tile][group][half], a, (b[i], b[j])
                        )
        return [[self.both(sums[tile][group]) for group in range(groups)] for tile in range(TILES)]

    def both(self, halves: list[list[Any]]) -> list[Any]:
        """The sum of the two halves of every 32 columns."""
        return vector.add(halves[0], halves[1], self.packed)

    def store_sums(self, sums: list[list[Any]], memory: Any, tokens: int) -> None:
        """Put the partial sums into shared memory [parts][tokens][SUM_PITCH]."""
        row = self.half * Int32(ROWS // 2) + self.line * Int32(LINES)
        token = self.part * Int32(tokens) + self.column * Int32(2)
        place = memory + (token * Int32(SUM_PITCH) + row) * Int32(4)
        for group in range(len(sums[0])):
            for odd in range(2):
                # Rows 0 and 8 of tile 0, then of tile 1: the thread's four neighbouring rows.
                values = [sums[tile][group][odd + 2 * low] for tile in range(2) for low in range(2)]
                ptx.shared_store16(place, values, 4 * (N * group + odd) * SUM_PITCH)


def total(
    memory: Any, token: Any, piece: Any, tokens: int, packed: bool, parts: int = PARTS
) -> list[Any]:
    """The eight sums of rows 8 piece .. 8 piece + 7 of a token over the parts, first to last."""
    place = memory + (token * Int32(SUM_PITCH) + piece * Int32(8)) * Int32(4)
    value: list[Any] = []
    for part in range(parts):
        offset = part * tokens * SUM_PITCH * 4
        more = [*ptx.shared_load16_f32(place, offset), *ptx.shared_load16_f32(place, offset + 16)]
        value = vector.add(value, more, packed) if value else more
    return value

"""`mma.sync` m16n8k16 (bf16, f16) and m16n8k32 (e4m3, e5m2) with float32 sums, and `ldmatrix`.

The fragment layouts are those of the PTX manual ("Matrix Fragments for mma.m16n8k16", "m16n8k32").
The products are exact; they are added in float64 and rounded to float32 once, where a tensor core
rounds in an order of its own: results agree within a few units of the last place of the sum.
"""

from __future__ import annotations

import numpy as np

from k3fuse.kernels.simulator.errors import BarrierError
from k3fuse.kernels.simulator.formats import DECODE, bf16_to_f32
from k3fuse.kernels.simulator.machine import WARP, Frame, Step
from k3fuse.kernels.simulator.ops_warp import whole_warps
from k3fuse.kernels.simulator.translate import Reader, Site, operation
from k3fuse.kernels.simulator.types import B32, F32, Array


def decode(words: Array, name: str) -> Array:
    """32-bit words [..., n] -> elements [..., n * 4 / bytes] as float32, lowest bits first."""
    words = np.ascontiguousarray(words)
    if name in ("bf16", "f16"):
        halves = words.view(np.uint16)
        if name == "bf16":
            values: Array = bf16_to_f32(halves)
            return values
        return halves.view(np.float16).astype(np.float32)
    return DECODE[name][words.view(np.uint8)]


def rows_of(words: Array, name: str) -> Array:
    """Fragments of n 8-row tiles: words [warps, n, 32, parts] -> [warps, 8 n, k] float64.

    Lane 4*g + t holds, of row g, the columns `part * k / 2 + t * n ...`, n a word. The columns stay
    in the order of the lanes: that is the same for A and B, and a sum of products needs no more.
    """
    warps, tiles = words.shape[:2]
    return decode(words, name).reshape(warps, 8 * tiles, -1).astype(np.float64)


@operation("mma", selective=True)
def multiply_accumulate(site: Site) -> Step:
    """D[16, 8] = A[16, k] @ B[k, 8] + C, one tile a warp."""
    site.take("sync")
    site.take("aligned")
    shape = site.take("m16n8k16", "m16n8k32")
    site.take("row")
    site.take("col")
    kinds, site.left = site.left, []
    names = ("bf16", "f16") if shape == "m16n8k16" else ("e4m3", "e5m2")
    if kinds[:1] == ["kind::f8f6f4"]:
        kinds = kinds[1:]
    if (
        len(kinds) != 4
        or kinds[0] != "f32"
        or kinds[3] != "f32"
        or kinds[1] not in names
        or kinds[2] not in names
    ):
        raise site.unsupported("mma shape or types")
    first, second = kinds[1], kinds[2]
    a, b, c = site.item_bits(1, 32), site.item_bits(2, 32), site.item_bits(3, 32)
    writes = [site.writer(item, F32) for item in site.items(0)]
    if (len(a), len(b), len(c), len(writes)) != (4, 2, 4, 4):
        raise site.unsupported("number of registers")
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        if not whole_warps(frame):
            raise BarrierError(f"mma by part of a warp: {frame.origin(line, text).where(0)}")
        # a0 and a2 are rows 0-7, a1 and a3 rows 8-15; a0, a1 the lower half of the columns.
        left = rows_of(_words(frame, [[a[0], a[2]], [a[1], a[3]]]), first)
        right = rows_of(_words(frame, [b]), second)
        # Lane 4*g + t holds columns 2t, 2t+1 of rows g (c0, c1) and g + 8 (c2, c3).
        tiles = (left @ right.transpose(0, 2, 1)).reshape(-1, 2, 8, 4, 2)
        for place, (read, write) in enumerate(zip(c, writes, strict=True)):
            total = tiles[:, place // 2, :, :, place % 2].reshape(-1)
            write(frame, (total + read(frame).view(np.float32)).astype(np.float32))

    return run


def _words(frame: Frame, tiles: list[list[Reader]]) -> Array:
    """The registers of each tile -> [warps, tiles, 32, registers] words."""
    result = np.empty((frame.count // WARP, len(tiles), WARP, len(tiles[0])), np.uint32)
    for tile, reads in enumerate(tiles):
        for part, read in enumerate(reads):
            result[:, tile, :, part] = frame.array(read(frame)).reshape(-1, WARP)
    return result


@operation("ldmatrix", selective=True)
def load_matrix(site: Site) -> Step:
    """`ldmatrix` of 1, 2 or 4 matrices of 8 rows of 16 bytes, also transposed.

    Lanes 8*i to 8*i + 7 give the row addresses of matrix i. Lane l gets word l % 4 of row l / 4.
    """
    while site.take("sync", "aligned", "m8n8", "shared", "shared::cta", "b16"):
        pass
    count = {"x1": 1, "x2": 2, "x4": 4}.get(site.take("x1", "x2", "x4") or "", 0)
    transposed = bool(site.take("trans"))
    site.done()
    writes = [site.writer(item, B32) for item in site.items(0)]
    if len(writes) != count or not count:
        raise site.unsupported("number of results")
    pointer = site.pointer(1, 32)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        if not whole_warps(frame):
            raise BarrierError(f"ldmatrix by part of a warp: {frame.origin(line, text).where(0)}")
        who, shared = frame.origin(line, text), frame.group.shared
        address = frame.array(pointer(frame)).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        ctas = frame.ctas().reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        place = shared.locate(address, ctas, 16, who, "read")
        givers = np.arange(frame.count).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        halves = np.stack(shared.read(place, 64, 2, who.pick(givers)), axis=1).view(np.uint16)
        tiles = halves.reshape(-1, count, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.transpose(0, 1, 3, 2))
        words = tiles.reshape(-1, count, 8, 8).view(np.uint32).reshape(-1, count, WARP)
        for place_, write in enumerate(writes):
            write(frame, words[:, place_].reshape(-1).copy())

    return run

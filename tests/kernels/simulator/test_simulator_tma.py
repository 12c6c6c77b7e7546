"""Tensor tiles by TMA, from inline PTX that CuTe DSL compiles: places, edges, faults."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from k3fuse.kernels.simulator import (
    BarrierError,
    DeadlockError,
    Fresh,
    MemoryAccessError,
    SimulationError,
    TensorMap,
)

pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")

from dsl_inline import INIT, inline, wait

SEEDS = range(20)
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
# Thread t copies 16-byte pieces t, t + 32, ... of shared memory at s + 1024 to `out`.
DUMP = """
shl.b32 r20, tid, 4;
mov.u32 r21, 0;
MORE:
add.u32 r22, r20, r21;
add.u32 r23, s, r22;
setp.lt.u32 p, r22, {size};
@p ld.shared.v4.b32 {{r24, r25, r26, r27}}, [r23+1024];
cvt.u64.u32 d8, r22;
add.u64 d8, out, d8;
@p st.global.v4.b32 [d8], {{r24, r25, r26, r27}};
add.u32 r21, r21, 512;
setp.lt.u32 q, r21, {size};
@q bra MORE;
"""


ZEROS = """
mov.u32 r30, 0;
mov.u32 r31, 0;
ZERO:
add.u32 r32, s, r31;
shl.b32 r33, tid, 2;
add.u32 r32, r32, r33;
st.shared.b32 [r32+1024], r30;
add.u32 r31, r31, 128;
setp.lt.u32 q, r31, {size};
@q bra ZERO;
fence.proxy.async.shared::cta;
bar.sync 0;
"""


def load_body(
    corner: tuple[int, ...],
    size: int,
    expect: int,
    waits: str | None = None,
    zeroed: bool = False,
) -> str:
    names = [f"r{place}" for place in range(len(corner))]
    moves = [f"mov.u32 {name}, {at};" for name, at in zip(names, corner, strict=True)]
    copy = LOAD.format(rank=len(corner))
    return "\n".join(
        [
            INIT, ZEROS.format(size=size) if zeroed else "", *moves, "add.u32 r10, s, 1024;",
            "fence.proxy.tensormap::generic.acquire.gpu [in], 128;",
            f"@first cp.async.bulk.prefetch.tensor.{len(corner)}d.L2.global.tile "
            f"[in, {{{', '.join(names)}}}];",
            f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [s], {expect};",
            f"@first {copy} [r10], [in, {{{', '.join(names)}}}], [s];",
            wait() if waits is None else waits,
            DUMP.format(size=size),
        ]
    )  # fmt: skip


def load(
    what: TensorMap,
    corner: tuple[int, ...],
    *,
    seed: int | None = None,
    waits: str | None = None,
    expect: int | None = None,
    zeroed: bool = False,
) -> tuple[torch.Tensor, Any]:
    """The bytes of shared memory after one tile has arrived."""
    tiles = what.tiles()
    size = math.prod(tiles.shape[1:]) * tiles.row_bytes
    padded = -(-size // 512) * 512
    amount = tiles.transfer_bytes if expect is None else expect
    kernel = inline(load_body(corner, size, amount, waits, zeroed), 2, 1024 + padded)
    out = torch.zeros(padded, dtype=torch.uint8)
    report = kernel.run([what, out], names=["map", "out"], seed=seed)
    return out[:size], report


def box_of(tensor: torch.Tensor, corner: tuple[int, ...], box: tuple[int, ...]) -> torch.Tensor:
    """The box at a corner (dimension 0 first), zero outside, element by element."""
    result = torch.zeros(tuple(reversed(box)), dtype=tensor.dtype)
    for index in itertools.product(*(range(size) for size in result.shape)):
        place = tuple(at + by for at, by in zip(reversed(corner), index, strict=True))
        if all(0 <= at < size for at, size in zip(place, tensor.shape, strict=True)):
            result[index] = tensor[place]
    return result


def swizzled_rows(rows: torch.Tensor, span: int) -> torch.Tensor:
    """[rows, span] bytes with piece p of row r at p ^ (r // (128 / span)) % (span / 16)."""
    pieces = rows.reshape(len(rows), span // 16, 16)
    result = torch.empty_like(pieces)
    for row in range(len(rows)):
        for piece in range(span // 16):
            result[row, piece ^ (row // (128 // span)) % (span // 16)] = pieces[row, piece]
    return result.reshape(-1)


@pytest.mark.parametrize(
    ("shape", "box", "corner"),
    [
        ((200,), (64,), (40,)),
        ((12, 64), (32, 8), (16, 3)),
        ((5, 12, 64), (32, 8, 2), (32, 2, 1)),
        ((3, 5, 12, 64), (32, 4, 2, 2), (0, 8, 3, 0)),
        ((2, 3, 5, 12, 32), (16, 2, 2, 2, 2), (16, 5, 1, 1, 0)),
    ],
)
def test_one_to_five_dimensions(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...]
) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    got, report = load(TensorMap(tensor, box), corner)
    wanted = box_of(tensor, corner, box)
    assert torch.equal(got.view(torch.float32), wanted.reshape(-1))
    assert report.traffic[0, "map", 0, "read"].distinct == 4 * wanted.numel()
    assert report.traffic[0, "map", 0, "read"].requested == 4 * wanted.numel()


@pytest.mark.parametrize("corner", [(-3, -2), (50, 9), (61, -1), (64, 0), (0, 30), (7, 5)])
@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_what_lies_outside_is_filled(corner: tuple[int, int], fill: str) -> None:
    tensor = torch.randn(12, 64).bfloat16() + 4
    got, report = load(TensorMap(tensor, (16, 8), fill=fill), corner)
    wanted = box_of(tensor, corner, (16, 8))
    mask = box_of(torch.ones_like(tensor), corner, (16, 8)) > 0
    found = got.view(torch.bfloat16).reshape(8, 16)
    assert torch.equal(found[mask], wanted[mask])
    assert bool((found[~mask].isnan() if fill == "nan" else found[~mask] == 0).all())
    inside = report.traffic.get((0, "map", 0, "read"))
    assert (inside.requested if inside else 0) == 2 * int(mask.sum())


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzles(span: int) -> None:
    tensor = torch.randint(0, 256, (24, 2 * span), dtype=torch.uint8)
    got, _ = load(TensorMap(tensor, (span, 16), span), (span, 5))
    rows = tensor[5:21, span:]
    assert torch.equal(got, swizzled_rows(rows, span))
    assert not torch.equal(got, rows.reshape(-1)), "a control: the swizzle moves pieces"


def test_element_strides() -> None:
    tensor = torch.arange(20 * 32, dtype=torch.int32).reshape(20, 32)
    got, _ = load(TensorMap(tensor, (8, 10), element_strides=(1, 3)), (4, 2))
    assert torch.equal(got.view(torch.int32).reshape(4, 8), tensor[2:12:3, 4:12])


def test_four_bit_elements_are_expanded() -> None:
    packed = torch.randint(0, 256, (24, 128), dtype=torch.uint8)
    for element, span in (("u4_padded", 0), ("u4_padded", 128), ("u4", 0)):
        box = (128, 8)
        got, report = load(TensorMap(packed, box, span, element), (128, 4), zeroed=True)
        rows = packed[4:12, 64:]
        if element == "u4_padded":
            rows = torch.nn.functional.pad(rows.reshape(8, 8, 8), (0, 8)).reshape(8, 128)
        wanted = swizzled_rows(rows, 128) if span else rows.reshape(-1)
        assert torch.equal(got, wanted)
        assert report.traffic[0, "map", 0, "read"].distinct == 8 * 64
    with pytest.raises(SimulationError, match="coordinate 64 is no multiple of 128"):
        load(TensorMap(packed, (128, 8), 0, "u4_padded"), (64, 4))


def test_late_and_torn_delivery() -> None:
    tensor = torch.randn(16, 64).bfloat16()
    what = TensorMap(tensor, (64, 16), 128)
    wanted = swizzled_rows(tensor.view(torch.uint8).reshape(16, 128), 128)
    found = 0
    for seed in SEEDS:
        got, _ = load(what, (0, 0), seed=seed)
        assert torch.equal(got, wanted)
        try:
            load(what, (0, 0), seed=seed, waits="")
        except MemoryAccessError:
            found += 1
    assert found >= 18
    assert torch.equal(load(what, (0, 0), waits="")[0], wanted), "at once without a seed"


def test_wrong_byte_counts_are_found() -> None:
    what = TensorMap(torch.randn(16, 64).bfloat16(), (64, 16), 128)
    with pytest.raises(DeadlockError, match="16 bytes missing"):
        load(what, (0, 0), expect=2048 + 16)
    found = 0
    for seed in SEEDS:
        try:
            load(what, (0, 0), expect=512, seed=seed)
        except (MemoryAccessError, BarrierError):
            found += 1
    assert found >= 8


def test_maps_that_do_not_fit_the_copy() -> None:
    tensor = torch.randn(16, 64).bfloat16()
    kernel = inline(load_body((0, 0, 0), 2048, 2048), 2, 4096)
    with pytest.raises(SimulationError, match="the tensor map has 2 dimensions, the copy 3"):
        kernel.run([TensorMap(tensor, (64, 16)), torch.zeros(2048)])
    kernel = inline(load_body((0, 0), 2048, 2048), 2, 4096)
    with pytest.raises(MemoryAccessError, match="these 128 bytes are no tensor map"):
        kernel.run([torch.zeros(128, dtype=torch.uint8), torch.zeros(512)])
    with pytest.raises(MemoryAccessError, match="out-of-bounds read of"):
        kernel.run([torch.zeros(16, dtype=torch.uint8), torch.zeros(512)])
    with pytest.raises(ValueError, match=r"parameter map: box is \(64, 999\)"):
        kernel.run([TensorMap(tensor, (64, 999)), torch.zeros(512)], names=["map"])
    tight = inline(load_body((0, 0), 2048, 2048), 2, 2048)
    with pytest.raises(MemoryAccessError, match="or beyond its 2048 bytes"):
        tight.run([TensorMap(tensor, (64, 16)), torch.zeros(512)])
    moved = load_body((0, 0), 2048, 2048).replace("r10, s, 1024", "r10, s, 1040")
    kernel = inline(moved, 2, 8192)
    with pytest.raises(MemoryAccessError, match="not aligned to 128"):
        kernel.run([TensorMap(tensor, (64, 16)), torch.zeros(512)])


OUT = """
shl.b32 r1, tid, 4;
add.u32 r2, s, r1;
cvt.u64.u32 d1, r1;
add.u64 d1, in, d1;
ld.global.v4.b32 {{r4, r5, r6, r7}}, [d1];
st.shared.v4.b32 [r2], {{r4, r5, r6, r7}};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.u32 r10, {x};
mov.u32 r11, {y};
@first {copy} [out, {{r10, r11}}], [s];
@first cp.async.bulk.commit_group;
@first cp.async.bulk.wait_group 0;
"""
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"


@pytest.mark.parametrize("corner", [(16, 3), (52, -2)])
@pytest.mark.parametrize("span", [0, 32])
def test_tiles_to_global_memory(corner: tuple[int, int], span: int) -> None:
    tile = torch.randn(8, 16).bfloat16()
    source = tile.clone()
    if span:
        source = swizzled_rows(tile.view(torch.uint8).reshape(8, 32), 32).view(torch.bfloat16)
    for copy, fresh in ((STORE, True), (REDUCE, False)):
        kernel = inline(OUT.format(copy=copy, x=corner[0], y=corner[1]), 2, 1024)
        target = torch.randn(12, 64).bfloat16()
        wanted = target.clone()
        if fresh:
            wanted[:] = target
        rows = slice(max(corner[1], 0), corner[1] + 8)
        columns = slice(corner[0], min(corner[0] + 16, 64))
        part = tile[rows.start - corner[1] :, : columns.stop - columns.start]
        wanted[rows, columns] = part if fresh else wanted[rows, columns] + part
        padded = torch.zeros(256, dtype=torch.bfloat16)
        padded[:128] = source.reshape(-1)
        kernel.run([padded, TensorMap(target, (16, 8), span)])
        assert torch.equal(target, wanted)


def test_bytes_that_nobody_stored_are_found_in_global_memory() -> None:
    tensor = torch.randn(12, 64).bfloat16()
    kernel = inline(load_body((0, 0), 1024, 1024), 2, 4096)
    with pytest.raises(MemoryAccessError, match="before anyone wrote it"):
        kernel.run([TensorMap(tensor, (64, 8), fresh=True), torch.zeros(512)])
    kernel.run([TensorMap(tensor, (64, 8)), torch.zeros(512)])


MULTICAST = (
    """
@first mbarrier.init.shared::cta.b64 [s], 1;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [s], 1024;
@first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u32 r0, 0;
mul.lo.u32 r1, cta, 4;
add.u32 r10, s, 1024;
mul.lo.u32 r2, cta, 512;
add.u32 r10, r10, r2;
mul.wide.u32 d1, cta, 512;
add.u64 d1, in, d1;
mov.u16 h0, 3;
@first COPY
"""
    + wait()
    + """
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mul.wide.u32 d0, cta, 1024;
add.u64 out, out, d0;
"""
    + DUMP.format(size=1024)
)
TILE = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [r10], [in, {r0, r1}], [s], h0;"
)
RUN = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [r10], [d1], 512, [s], h0;"
)


@pytest.mark.parametrize("tiled", [True, False])
def test_multicast_to_a_cluster(tiled: bool) -> None:
    """Each of two CTAs sends its half of a tensor to both."""
    tensor = torch.randint(0, 256, (8, 128), dtype=torch.uint8)
    source: Any = TensorMap(tensor, (128, 4)) if tiled else tensor
    body = MULTICAST.replace("COPY", TILE if tiled else RUN)
    kernel = inline(body, 2, 2048, grid=2, cluster=2)
    for seed in (None, *range(5)):
        out = torch.zeros(2, 1024, dtype=torch.uint8)
        report = kernel.run([source, Fresh(out)], names=["map", "out"], seed=seed)
        assert torch.equal(out, tensor.reshape(1, 1024).expand(2, 1024))
        assert report.traffic[0, "map", 0, "read"].distinct == 1024
        assert report.traffic[0, "map", 0, "read"].requested == 1024
    target = torch.zeros(2, 1024, dtype=torch.uint8)
    for mask, error, message in (
        (7, MemoryAccessError, "0x7 (in|of) a cluster of 2"),
        (1, DeadlockError, "1024 bytes missing"),
    ):
        text = body.replace("mov.u16 h0, 3;", f"mov.u16 h0, {mask};")
        bad = inline(text, 2, 2048, grid=2, cluster=2)
        with pytest.raises(error, match=message):
            bad.run([source, target])

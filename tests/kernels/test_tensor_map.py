"""Tensor maps: the bytes that CuTe DSL writes, the limits of the driver, and the way back."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from k3fuse.kernels.build.host_code import tensor_maps_of
from k3fuse.kernels.common.tensor_map import ALIGNMENT, BYTES, ELEMENTS, TileMap

PLAIN = TileMap("bf16", (64, 128), (128,), (64, 8), 128)
WIDE = TileMap("bf16", (64, 20, 30), (1 << 24, 1 << 36), (16, 2, 256), 32)
FIVE = TileMap(
    "f32", (64, 20, 30, 40, 50), (256, 5120, 153600, 6144000), (16, 2, 3, 4, 5), 64,
    (1, 2, 1, 8, 3), "nan",
)  # fmt: skip
PADDED = TileMap("u4_padded", (256, 24), (128,), (128, 8), 128)
CASES = (PLAIN, WIDE, FIVE, PADDED, TileMap("u8", (1000,), (), (64,)))


@pytest.mark.parametrize("tiles", CASES)
def test_round_trip(tiles: TileMap) -> None:
    content = tiles.encode(0x7F00_0000_1000)
    assert len(content) == BYTES == 2 * ALIGNMENT
    assert TileMap.decode(content) == (0x7F00_0000_1000, tiles)
    moved = tiles.encode(0x20)
    assert TileMap.decode(moved) == (0x20, tiles)
    assert moved[8:] == content[8:]


def test_shapes_and_bytes() -> None:
    assert (PLAIN.shape, PLAIN.row_bytes, PLAIN.transfer_bytes) == ((64, 8), 128, 1024)
    assert (PADDED.row_bytes, PADDED.transfer_bytes) == (128, 128 * 8 // 2)
    assert (FIVE.shape, FIVE.transfer_bytes) == ((16, 1, 3, 1, 2), 16 * 3 * 2 * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": "i4"}, r"element is 'i4'; use one of u8, u16"),
        ({"dims": ()}, "a tensor map has 1 to 5 dimensions"),
        ({"dims": (64, 0)}, r"dims is \(64, 0\); 0 is not in 1 to"),
        ({"strides": ()}, r"strides is \(\); give 1 for 2 dimensions"),
        ({"strides": (136,)}, r"136 is not in 0 to \d+, multiples of 16"),
        ({"strides": (1 << 40,)}, "strides"),
        ({"box": (64, 257)}, r"257 is not in 1 to 256"),
        ({"box": (4, 8)}, "8 bytes a row, no multiple of 16"),
        ({"box": (128, 8)}, "256 bytes a row, more than the swizzle span of 128 bytes"),
        ({"swizzle": 16}, r"swizzle is 16; use one of \(0, 32, 64, 128\)"),
        ({"element_strides": (1, 9)}, "9 is not in 1 to 8"),
        ({"fill": "inf"}, "fill is 'inf'; use 'zero' or 'nan'"),
        ({"element": "u16", "fill": "nan"}, "needs a float element"),
        ({"element": "u4_padded"}, "u4_padded needs a multiple of 128"),
        (
            {"element": "u4_padded", "dims": (128, 8), "box": (128, 8), "strides": (80,)},
            "multiples of 32",
        ),
    ],
)
def test_what_the_driver_would_refuse(changes: dict[str, Any], message: str) -> None:
    assert replace(PLAIN) == PLAIN
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


def test_addresses_must_be_aligned() -> None:
    assert TileMap.decode(PLAIN.encode(16))[0] == 16
    assert TileMap.decode(PADDED.encode(32))[0] == 32
    for tiles, address in ((PLAIN, 8), (PADDED, 16)):
        with pytest.raises(ValueError, match="as a map needs"):
            tiles.encode(address)


def test_other_bytes_are_no_map() -> None:
    good = PLAIN.encode(0)
    words = struct.unpack("<16Q", good)
    for bad in (
        b"", bytes(BYTES), good[:-1] + b"\1",
        struct.pack("<16Q", words[0], words[1] | 15 << 7, *words[2:]),
        struct.pack("<16Q", words[0], words[1] | 1 << 16, *words[2:]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="tensor map"):
            TileMap.decode(bad)


# --- against the DSL --------------------------------------------------------------------------


def encoded_by_the_dsl(tiles: TileMap, dtype: str, internal: str | None = None) -> TileMap | None:
    """The map in the host code that CuTe DSL compiles for a tile of a tensor."""
    pytest.importorskip("cutlass")
    import dsl_maps

    return tensor_maps_of(dsl_maps.host_code(tiles, dtype, internal))[0]


@pytest.mark.parametrize(
    ("dtype", "element", "internal"),
    [
        ("BFloat16", "bf16", None),
        ("Float16", "f16", None),
        ("Float32", "f32", None),
        ("Float64", "f64", None),
        ("Uint8", "u8", None),
        ("Float8E4M3FN", "u8", None),
        ("Int16", "u16", None),
        ("Uint32", "u32", None),
        ("Int64", "u64", None),
        ("Float4E2M1FN", "u4", None),
        ("Float4E2M1FN", "u4_padded", "Uint8"),
    ],
)
def test_elements_as_the_dsl_encodes_them(dtype: str, element: str, internal: str | None) -> None:
    box = (128, 8) if element == "u4_padded" else (32, 8)
    stride = 256 * ELEMENTS[element].bits // 8
    tiles = TileMap(element, (256, 96), (stride,), box)
    assert encoded_by_the_dsl(tiles, dtype, internal) == tiles


@pytest.mark.parametrize(
    "tiles",
    [
        TileMap("bf16", (64, 128), (128,), (64, 128), 128),
        TileMap("bf16", (64, 128), (128,), (32, 128), 64),
        TileMap("bf16", (64, 128), (128,), (16, 16), 32),
        TileMap("bf16", (1024,), (), (64,)),
        TileMap("bf16", (64, 20, 30, 40, 50), (128, 2560, 76800, 3072000), (16, 2, 3, 4, 5)),
        TileMap("f32", (64, 20, 3), (1 << 35, 1 << 36), (16, 8, 2), 64),
        TileMap("bf16", (200, 77), (416,), (64, 77), 128),
    ],
)
def test_shapes_as_the_dsl_encodes_them(tiles: TileMap) -> None:
    dtype = {"bf16": "BFloat16", "f32": "Float32"}[tiles.element]
    assert encoded_by_the_dsl(tiles, dtype) == tiles

"""Tensor maps: what a tensor copy (TMA, tile mode) is told about a tensor, and its 128 bytes.

The limits are those of `cuTensorMapEncodeTiled` in the CUDA driver API manual. The byte layout is
nowhere documented: it is read off the host code that CuTe DSL 4.8.1 compiles for sm_103a, which
fills the words itself, and a test compares the two. Two fields that the DSL never sets (element
strides, fill) have places of our own there. On a GPU the driver encodes; these bytes serve the
simulator, and the check of a plan against the DSL's host code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

BYTES = 128
ALIGNMENT = 64  # of a map in parameter or global memory
SWIZZLES = (0, 32, 64, 128)  # bytes of the span in which 16-byte pieces are permuted


@dataclass(frozen=True)
class Element:
    """One element type. bits: in global memory; shared_bits: in shared memory.

    code: its number in a map; driver: the end of its CU_TENSOR_MAP_DATA_TYPE_ name.
    """

    bits: int
    shared_bits: int
    code: int
    driver: str
    float: bool = False


# u4_padded: 16 values of 4 bits, packed in 8 bytes, take 16 bytes of shared memory, the upper 8 of
# which are a gap; tcgen05 reads FP4 beside FP8 so (PTX ISA, ".b4x16_p64").
ELEMENTS = {
    "u8": Element(8, 8, 0, "UINT8"),
    "u16": Element(16, 16, 1, "UINT16"),
    "u32": Element(32, 32, 2, "UINT32"),
    "u64": Element(64, 64, 4, "UINT64"),
    "f16": Element(16, 16, 6, "FLOAT16", True),
    "f32": Element(32, 32, 7, "FLOAT32", True),
    "f64": Element(64, 64, 9, "FLOAT64", True),
    "bf16": Element(16, 16, 10, "BFLOAT16", True),
    "u4": Element(4, 4, 11, "16U4_ALIGN8B"),
    "u4_padded": Element(4, 8, 12, "16U4_ALIGN16B"),
}
_BY_CODE = {element.code: name for name, element in ELEMENTS.items()}

_TILED = 1 << 1  # set in every map of the DSL
_RANK_SHIFT, _CODE_SHIFT, _SWIZZLE_SHIFT = 4, 7, 13
_FILL = 1 << 15  # ours
_TF32 = 1 << 16
_WIDE_ATOM = 1 << 19  # 128-byte swizzle of 32-byte pieces
_STRIDE_SHIFT = 32  # ours, in word 6: 3 bits a dimension


@dataclass(frozen=True)
class TileMap:
    """The shape of a tensor and of the box that one copy moves; dimension 0 is the contiguous one.

    element: a key of ELEMENTS. dims: elements in each of 1 to 5 dimensions. strides: bytes between
    elements of dimension 1 and up. box: elements of the tile. element_strides: every how manyth
    element is taken. swizzle: one of SWIZZLES. fill: "zero" or "nan", for what lies outside.

    Raises ValueError naming the field, its value and what fits.
    """

    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    fill: str = "zero"

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise ValueError(f"element is {self.element!r}; use one of {', '.join(ELEMENTS)}")
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise ValueError(f"dims is {self.dims}; a tensor map has 1 to 5 dimensions")
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        for name, values, count in (
            ("strides", self.strides, rank - 1),
            ("box", self.box, rank),
            ("element_strides", self.element_strides, rank),
        ):
            if len(values) != count:
                raise ValueError(f"{name} is {values}; give {count} for {rank} dimensions")
        self._check_ranges()
        self._check_inner()

    def _check_ranges(self) -> None:
        step = 32 if self.element == "u4_padded" else 16
        for name, values, low, high, multiple in (
            ("dims", self.dims, 1, 2**32, 1),
            ("strides", self.strides, 0, 2**40 - 1, step),
            ("box", self.box, 1, 256, 1),
            ("element_strides", self.element_strides, 1, 8, 1),
        ):
            for value in values:
                if not low <= value <= high or value % multiple:
                    what = f"{low} to {high}" + (f", multiples of {step}" if multiple > 1 else "")
                    raise ValueError(f"{name} is {values}; {value} is not in {what}")
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle is {self.swizzle!r}; use one of {SWIZZLES} bytes")
        if self.fill not in ("zero", "nan"):
            raise ValueError(f"fill is {self.fill!r}; use 'zero' or 'nan'")
        if self.fill == "nan" and not ELEMENTS[self.element].float:
            raise ValueError(f"fill 'nan' needs a float element, not {self.element!r}")

    def _check_inner(self) -> None:
        if self.element == "u4_padded":
            if self.dims[0] % 128 or self.box[0] != 128:
                raise ValueError(
                    f"dims is {self.dims} and box {self.box}; u4_padded needs a multiple of 128 "
                    "and 128 in dimension 0"
                )
            if self.swizzle not in (0, 128):
                raise ValueError(f"swizzle is {self.swizzle}; u4_padded takes 0 or 128")
        inner = self.row_bytes
        if self.box[0] * ELEMENTS[self.element].bits % 128:
            raise ValueError(f"box is {self.box}: {inner} bytes a row, no multiple of 16")
        if self.swizzle and inner > self.swizzle:
            raise ValueError(
                f"box is {self.box}: {inner} bytes a row, more than the swizzle span of "
                f"{self.swizzle} bytes"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory that one row of the box (its dimension 0) takes."""
        return self.box[0] * ELEMENTS[self.element].shared_bits // 8

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements that arrive in each dimension; dimension 0 ignores its element stride."""
        rest = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-size // step) for size, step in rest))

    @property
    def transfer_bytes(self) -> int:
        """Bytes that a copy into shared memory reports to its mbarrier: the bytes of the box as
        they lie in global memory, also for u4_padded and for what lies outside the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * ELEMENTS[self.element].bits // 8

    def with_rows(self, count: int, pitch: int) -> TileMap:
        """The same tiles of a matrix of `count` rows, `pitch` bytes from one to the next.

        Raises ValueError for another number of dimensions than two, for more rows than this map's,
        and for what a map cannot hold.
        """
        if len(self.dims) != 2:
            raise ValueError(f"dims is {self.dims}; a map with open rows has two dimensions")
        if not 1 <= count <= self.dims[1]:
            raise ValueError(f"{count} rows given; the map takes 1 to {self.dims[1]}")
        return replace(self, dims=(self.dims[0], count), strides=(pitch,))

    def check_address(self, address: int) -> None:
        """Raise ValueError for an address of the tensor that a map cannot hold."""
        step = 32 if self.element == "u4_padded" else 16
        if address % step:
            raise ValueError(f"address {address:#x} is no multiple of {step}, as a map needs")

    def encode(self, address: int) -> bytes:
        """The 128 bytes for a tensor at `address`."""
        self.check_address(address)
        kind = ELEMENTS[self.element]
        head = _TILED | (len(self.dims) - 1) << _RANK_SHIFT | kind.code << _CODE_SHIFT
        head |= SWIZZLES.index(self.swizzle) << _SWIZZLE_SHIFT
        head |= _FILL if self.fill == "nan" else 0
        units = [stride >> 4 for stride in self.strides] + [0] * (5 - len(self.dims))
        sizes = [size - 1 for size in self.dims] + [0] * (5 - len(self.dims))
        box = [size - 1 for size in self.box] + [0] * (5 - len(self.box))
        low = [unit & 0xFFFFFFFF for unit in units]
        high = sum((unit >> 32) << (4 * place) for place, unit in enumerate(units))
        steps = sum((s - 1) << (3 * place) for place, s in enumerate(self.element_strides))
        words = [
            address,
            head | low[0] << 32,
            low[1] | low[2] << 32,
            low[3] | high << 32,
            sizes[0] | sizes[1] << 32,
            sizes[2] | sizes[3] << 32,
            sizes[4] | steps << _STRIDE_SHIFT | box[0] << 56,
            sum(size << (8 * place) for place, size in enumerate(box[1:])),
        ]
        return struct.pack("<16Q", *words, *[0] * 8)

    @classmethod
    def decode(cls, data: bytes) -> tuple[int, TileMap]:
        """Read 128 bytes: (address of the tensor, its map). Raises ValueError for other bytes."""
        if len(data) != BYTES:
            raise ValueError(f"a tensor map has {BYTES} bytes, not {len(data)}")
        words = struct.unpack("<16Q", data)
        head = words[1] & 0xFFFFFFFF
        rank = (head >> _RANK_SHIFT & 7) + 1
        code = head >> _CODE_SHIFT & 15
        if not head & _TILED or code not in _BY_CODE or rank > 5 or any(words[8:]):
            raise ValueError("these 128 bytes are no tensor map in tile mode")
        if head & (_TF32 | _WIDE_ATOM):
            raise ValueError("the tensor map has TF32 elements or 32-byte swizzle pieces")
        low = [words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF]
        high = [words[3] >> (32 + 4 * place) & 15 for place in range(4)]
        strides = [(a | b << 32) << 4 for a, b in zip(low, high, strict=True)]
        pairs = [(word & 0xFFFFFFFF, word >> 32) for word in words[4:6]]
        dims = [*pairs[0], *pairs[1], words[6] & 0xFFFFFFFF]
        box = [words[6] >> 56, *(words[7] >> (8 * place) & 255 for place in range(4))]
        steps = [words[6] >> (_STRIDE_SHIFT + 3 * place) & 7 for place in range(5)]
        tiles = cls(
            _BY_CODE[code],
            tuple(size + 1 for size in dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(size + 1 for size in box[:rank]),
            SWIZZLES[head >> _SWIZZLE_SHIFT & 3],
            tuple(step + 1 for step in steps[:rank]),
            "nan" if head & _FILL else "zero",
        )
        return words[0], tiles

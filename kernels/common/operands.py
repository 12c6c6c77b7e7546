"""Operands as the kernels read them: rows of aligned 16-byte pieces, numbers as 32 bits."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; the kernels move 16 at a time
_PITCH = 8  # elements of BF16 in 16 bytes


def readable(rows: Tensor) -> Tensor:
    """Rows [M, n] of BF16, copied where a row is not a run of aligned 16-byte pieces."""
    aligned = rows.data_ptr() % ALIGNMENT == 0 and pitch(rows) % _PITCH == 0
    if rows.stride(1) == 1 and aligned:
        return rows
    # `contiguous` would return a row at an odd address as it is.
    return rows.clone(memory_format=torch.contiguous_format)


def dense(tensor: Tensor) -> Tensor:
    """Contiguous from a multiple of 16 bytes on; copied where it is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def pitch(rows: Tensor) -> int:
    """Elements from one row to the next; a lone row has no next."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def block_rows(blocks: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first `count` AttnRes blocks as readable rows [M, H] of one pitch.

    blocks: one bank [M, slots, H], read in place, or rows.
    """
    found = list(blocks)
    if len(found) == 1 and found[0].dim() == 3:
        bank = found[0]
        found = [bank[:, i] for i in range(count)]
    found = [readable(block) for block in found[:count]]
    if len({pitch(block) for block in found}) > 1:
        found = [block.contiguous() for block in found]
    return found


def address(tensor: Tensor | None) -> int:
    """Where a tensor starts; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def float_bits(value: float) -> int:
    """The bits of an FP32 number as a signed integer, as kernels take it."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])

"""The order in which vLLM keeps MXFP4 experts for its TRTLLM kernels, in PyTorch.

Found by reading vLLM 0.33 and FlashInfer (the weight preparation of the TRTLLM MXFP4 backends):

    width     padded with zeros to at least 256 columns of the hidden row
    w13       up and gate of a column are neighbours; then rows are shuffled
    shuffle   of each 32 rows, row i goes to place 8 (i % 4) + i // 4
    scales    shuffled with their rows; then pieces of 128 rows and 4 blocks of 32, 512 bytes each:
              byte 16 (row % 32) + 4 (row % 128 // 32) + block % 4
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3fuse.kernels.experts.config import stored_width

# Names of the two orders that the kernel reads: the checkpoint's, and the one of this module.
ROWS, TRTLLM = "rows", "trtllm"
LAYOUTS = (ROWS, TRTLLM)


def shuffle(rows: Tensor) -> Tensor:
    """Rows [E, n, k] in the order of the kernels; n is a multiple of 32."""
    experts, n, k = rows.shape
    return rows.reshape(experts, n // 32, 8, 4, k).transpose(2, 3).reshape(experts, n, k)


def pieces(scales: Tensor) -> Tensor:
    """Scales [E, n, b] in pieces of 128 rows and 4 blocks; same shape."""
    experts, n, blocks = scales.shape
    split = scales.reshape(experts, n // 128, 4, 32, blocks // 4, 4)
    return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, n, blocks).contiguous()


def shuffled(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors of the checkpoint's layout, in vLLM's: same order, new memory.

    w13 [E, 2 I, L / 2] and w2 [E, L, I / 2] become as wide as `stored_width`.
    """
    more = stored_width(w13.shape[1] // 2) - w13.shape[1] // 2

    def first(rows: Tensor) -> Tensor:
        gate, up = (pad(half, (0, 0, 0, more)) for half in rows.chunk(2, 1))
        return shuffle(torch.stack((up, gate), 2).flatten(1, 2))

    return (
        first(w13).contiguous(),
        pieces(first(w13_scale)),
        shuffle(pad(w2, (0, more // 2))).contiguous(),
        pieces(shuffle(pad(w2_scale, (0, more // 32)))),
    )


def unshuffle(rows: Tensor) -> Tensor:
    """Inverse of `shuffle`."""
    experts, n, k = rows.shape
    return rows.reshape(experts, n // 32, 4, 8, k).transpose(2, 3).reshape(experts, n, k)


def whole(scales: Tensor) -> Tensor:
    """Inverse of `pieces`: scales [E, n, b] row by row."""
    experts, n, blocks = scales.shape
    split = scales.reshape(experts, n // 128, blocks // 4, 32, 4, 4)
    return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, n, blocks)


def plain(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inverse of `shuffled`, for experts that are `width` wide: the padding goes; new memory."""

    def first(rows: Tensor) -> Tensor:
        experts, n, k = rows.shape
        up, gate = rows.reshape(experts, n // 2, 2, k).unbind(2)
        return torch.cat((gate[:, :width], up[:, :width]), 1)

    return (
        first(unshuffle(w13)),
        first(unshuffle(whole(w13_scale))),
        unshuffle(w2)[..., : width // 2].contiguous(),
        unshuffle(whole(w2_scale))[..., : width // 32].contiguous(),
    )

"""Argument checks of the AttnRes operands, shared with the output projection."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.common import check


def residual_sources(
    like: Tensor,
    h: int,
    prefix: Tensor | None,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
) -> None:
    """prefix, delta [M, H]; blocks one bank [>= M, >= num_blocks, H] or num_blocks tensors [M, H].

    M and the dtype are those of `like`.
    """
    m = like.shape[0]
    for name, row in (("prefix", prefix), ("delta", delta)):
        if row is not None:
            check.rows(name, row, like.dtype)
            check.size(name, row, 1, h, "the hidden size")
            check.tokens(name, row, m)
    if num_blocks < 0:
        raise ValueError(f"num_blocks={num_blocks}; it must not be negative")
    bank = len(blocks) == 1 and blocks[0].dim() == 3
    if not bank and len(blocks) != num_blocks:
        raise ValueError(
            f"blocks holds {len(blocks)} tensors for num_blocks={num_blocks}; pass one bank "
            "[M, S, H] or num_blocks tensors [M, H]"
        )
    for i, block in enumerate(blocks):
        name = f"blocks[{i}]"
        check.dtype(name, block, like.dtype)
        check.rank(name, block, 3 if bank else 2)
        check.size(name, block, -1, h, "the hidden size")
        check.unit_stride(name, block)
        check.tokens(name, block, m, at_least=bank)
    if bank and blocks[0].shape[1] < num_blocks:
        raise ValueError(
            f"blocks[0] has {blocks[0].shape[1]} slots; num_blocks={num_blocks} are read"
        )


def score_and_norm(h: int, score_norm: Tensor, score_proj: Tensor, out_norm: Tensor | None) -> None:
    """The three weight vectors [H]."""
    check.vector("score_norm_weight", score_norm, h)
    check.vector("score_proj_weight", score_proj, h)
    if out_norm is not None:
        check.vector("out_norm_weight", out_norm, h)

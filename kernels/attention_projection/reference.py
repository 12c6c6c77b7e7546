"""The meaning of the attention projection, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from k3fuse.kernels.common.collective import resolve_group
from k3fuse.kernels.common.numerics import linear


def attention_projection(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """One row, several linears: x [M, K], weights [N_i, K] -> [M, N_i] each, in the dtype of x.

    FP32 accumulation, one rounding per output, as the stock GEMMs.
    """
    return [linear(x, weight) for weight in weights]


def row_sharded(
    x: Tensor, weights: Sequence[Tensor], split: Sequence[int], group: str
) -> list[Tensor]:
    """The same, the first split_i rows of each weight multiplied by one rank each and gathered.

    x and those rows are equal on all ranks of `group`; rank r multiplies the r-th of equal shares.
    "" is a group of one. What is gathered has no -0.0. Raises ValueError for a group that this
    process does not have, and for rows that do not divide by its ranks.
    """
    process_group = resolve_group(group) if group else None
    ranks = dist.get_world_size(process_group) if process_group is not None else 1
    rank = dist.get_rank(process_group) if process_group is not None else 0
    outs = []
    for i, (weight, rows) in enumerate(zip(weights, split, strict=True)):
        if rows % ranks:
            raise ValueError(
                f"row_sharded[{i}]={rows} rows do not divide by the {ranks} ranks of {group!r}"
            )
        share = rows // ranks
        mine = linear(x, weight[rank * share : (rank + 1) * share])
        parts = [mine]
        if process_group is not None and ranks > 1 and rows:
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(parts, mine.contiguous(), group=process_group)
        outs.append(torch.cat([*parts, linear(x, weight[rows:])], dim=1))
    return published(outs, split)


def published(rows: Sequence[Tensor], split: Sequence[int]) -> list[Tensor]:
    """Rows [M, N_i] as an exchange leaves them: -0.0 of the first split_i columns is +0.0."""
    return [
        torch.cat([row[:, :columns] + 0.0, row[:, columns:]], dim=1)
        for row, columns in zip(rows, split, strict=True)
    ]

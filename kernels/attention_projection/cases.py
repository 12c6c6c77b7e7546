"""What the attention projection's kernel must do: cases for `k3fuse kernels check`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from k3fuse.kernels.attention_projection.builder import (
    BUILDER,
    KDA,
    MLA,
    STREAM_ARCHS,
    config_of,
    rows_shape,
)
from k3fuse.kernels.attention_projection.policy import STREAM, TABLE
from k3fuse.kernels.attention_projection.reference import attention_projection
from k3fuse.kernels.attention_projection.stream_config import ELEMENT, StreamConfig
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common.tensor_map import TileMap
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.simulator import Fresh, TensorMap

BF16 = torch.bfloat16
# For random schedules and the race checker: clusters share nothing, so a few tiles show as much,
# one of them beside another in a CTA; two blocks of a CTA's columns are the least.
FEW_K, SMALL_TILES, SMALL_K, SMALL_M = 1024, 17, 512, 9
# The stream kernel: one cluster with two tiles of four blocks, more than its ring holds; the sums
# of the second one take the place of x. 130 rows: a tile of 72, the end of the weight in the next.
STREAM_K, STREAM_ROWS = 2048, 130
STREAM_LIMITS = {"stream": 1, "clusters": 1, "stages": 3, "early": 1}


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """KDA and MLA, their weights merged and apart. Every rank does the same, so one is run."""
    row = TABLE.lookup(target.name, m)
    if row is None:
        return ()
    stream = row.kernel == STREAM and target.arch in STREAM_ARCHS
    found = []
    for rows in (*KDA[target.tp], *MLA[target.tp]):
        full = kernel(target.arch, row.m_max, rows, stream=stream)
        if stream:
            last = rows[-1] % 64 or 64
            less = (STREAM_ROWS,) if len(rows) == 1 else (64, last)
            limits = STREAM_LIMITS
            few = BUILDER.variant(
                target.arch, {"m": row.m_max, "k": STREAM_K, **rows_shape(less)}, limits
            )
            small = few
        else:
            few = kernel(target.arch, row.m_max, cut(rows), stream=False, k=FEW_K)
            small = kernel(target.arch, row.m_max, cut(rows)[-2:], stream=False, k=SMALL_K)
        steps = partial(step, full, m), partial(step, few, m), partial(step, small, min(m, SMALL_M))
        found.append(Case(BUILDER.op, full.name, *steps))
    return tuple(found)


def cut(rows: Sequence[int]) -> tuple[int, ...]:
    """Fewer rows of the same kind: a tile of each large weight, some more of the first one."""
    tail = tuple(n % 32 or 32 for n in rows[1:])
    return (32 * (SMALL_TILES - 1) + (rows[0] % 32 or 32), *tail)


def kernel(arch: str, m: int, rows: Sequence[int], *, stream: bool, **shape: int) -> Variant:
    """The variant for m tokens; another k where stated."""
    return BUILDER.variant(arch, {"m": m, **rows_shape(rows), **shape}, {"stream": int(stream)})


def step(variant: Variant, m: int, seed: int) -> Step:
    """x of m tokens and outputs about 1; what the reference says, and every byte once."""
    config = config_of(variant)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, config.k, generator=generator).to(BF16)
    weights = [
        (torch.randn(n, config.k, generator=generator) * config.k**-0.5).to(BF16)
        for n in config.rows
    ]
    outs = [torch.empty(m, n, dtype=BF16) for n in config.rows]
    launch = Launch(variant, [values(variant, x, weights, outs)], needed(x, weights, outs))
    band = tolerance(BF16, config.k)
    expected = attention_projection(x, weights)
    pairs = enumerate(zip(outs, expected, strict=True))
    outputs = [Output(f"out{i}", 0, out, wanted, band) for i, (out, wanted) in pairs]
    return Step((launch,), tuple(outputs))


def values(
    variant: Variant,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    *,
    fresh: bool = False,
) -> dict[str, Value]:
    """The kernel's parameters by name.

    x: rows of one buffer, at any pitch; weights too, where the kernel reads them by tensor map.
    fresh: an earlier launch of the step writes x.
    """
    if isinstance(config_of(variant), StreamConfig):
        plan = BUILDER.plan(variant)
        tiles = {p.name: p.tiles for p in plan.parameters if p.tiles is not None}
        read = {"x": x, **{f"weight{i}": weight for i, weight in enumerate(weights)}}
        return {
            **{name: mapped(t, tiles[name], fresh and name == "x") for name, t in read.items()},
            **{f"out{i}": Fresh(out) for i, out in enumerate(outs)},
            "m": outs[0].shape[0],
        }
    return {
        "x": Fresh(x) if fresh else x,
        **{f"weight{i}": weight for i, weight in enumerate(weights)},
        **{f"out{i}": Fresh(out) for i, out in enumerate(outs)},
        "m": outs[0].shape[0],
        "x_pitch": x.stride(0),
    }


def mapped(matrix: torch.Tensor, tiles: TileMap, fresh: bool = False) -> TensorMap:
    """The tensor map of rows of BF16, as the launch makes it. matrix: the first rows of a buffer.

    Where they lie apart, the map is over the whole buffer, so that a read beyond them counts.
    """
    rows = tiles.with_rows(matrix.shape[0], matrix.stride(0) * ELEMENT)
    whole = matrix if matrix.is_contiguous() or matrix._base is None else matrix._base
    return TensorMap.of(whole, rows, fresh=fresh)


def needed(
    x: torch.Tensor, weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> dict[str, int]:
    """Bytes that have to move at least, by parameter."""
    tensors = {
        "x": x,
        **{f"weight{i}": weight for i, weight in enumerate(weights)},
        **{f"out{i}": out for i, out in enumerate(outs)},
    }
    return {name: tensor.nbytes for name, tensor in tensors.items()}

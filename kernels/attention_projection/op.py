"""k3fuse::attention_projection."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.attention_projection import reference, sharded_launch
from k3fuse.kernels.attention_projection.launch import launch, misfit
from k3fuse.kernels.attention_projection.policy import SHARDED, TABLE, row_of
from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.common.policy import MAX_M, Row

NAME = "attention_projection"
SCHEMA = (
    f"{NAME}(Tensor x, Tensor[] weights, *, str target, str group, str composition,"
    " bool batch_invariant=False, int[] row_sharded=[]) -> Tensor[]"
)


def _specs(x: Tensor, weights: Sequence[Tensor]) -> list[Spec]:
    check.rows("x", x, *check.FLOATS)
    if not weights:
        raise ValueError("weights is empty; pass one weight [N, K] per linear")
    for i, weight in enumerate(weights):
        check.weight(f"weights[{i}]", weight, x.shape[1], x)
    return [Spec((x.shape[0], weight.shape[0]), x.dtype) for weight in weights]


def _check_split(weights: Sequence[Tensor], row_sharded: Sequence[int]) -> None:
    """Raise ValueError for rows that weights do not have."""
    if row_sharded and len(row_sharded) != len(weights):
        raise ValueError(
            f"row_sharded={list(row_sharded)} for {len(weights)} weights; give one number a weight,"
            " or none at all"
        )
    for i, (weight, rows) in enumerate(zip(weights, row_sharded, strict=False)):
        if not 0 <= rows <= weight.shape[0]:
            raise ValueError(
                f"row_sharded[{i}]={rows}; weights[{i}] has {weight.shape[0]} rows, name 0 to as "
                "many of them"
            )


def _run(
    x: Tensor, weights: Sequence[Tensor], *, target: str, group: str, composition: str,
    batch_invariant: bool = False, row_sharded: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    _check_split(weights, row_sharded)
    if any(row_sharded):
        # One engine serves all counts of that table.
        return dispatch.run(
            SHARDED,
            NAME,
            target=target,
            m=x.shape[0],
            composition=composition,
            inputs=[x, *weights],
            specs=_specs(x, weights),
            reference=lambda: reference.row_sharded(x, weights, row_sharded, group),
            kernel=lambda row: sharded_launch.launch(row, target, group, x, weights, row_sharded),
            misfit=lambda row: sharded_launch.misfit(row, target, x, weights, row_sharded, group),
        )

    def engine(row: Row) -> Row:
        """The row of one engine for all counts, where that is asked for."""
        return row_of(target, row.m_max, batch_invariant=batch_invariant) or row

    def unfit(row: Row) -> str:
        """What is against the kernel; where one engine has to do, also at the largest count."""
        asked = [row, TABLE.lookup(target, MAX_M) or row] if batch_invariant else [row]
        return next((said for r in asked if (said := misfit(engine(r), target, x, weights))), "")

    return dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=[x, *weights],
        specs=_specs(x, weights),
        reference=lambda: reference.attention_projection(x, weights),
        kernel=lambda row: launch(engine(row), target, x, weights),
        misfit=unfit,
    )


def _fake(
    x: Tensor, weights: Sequence[Tensor], *, target: str, group: str, composition: str,
    batch_invariant: bool = False, row_sharded: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    TABLE.lookup(target, 1)
    _check_split(weights, row_sharded)
    return [spec.empty(x) for spec in _specs(x, weights)]


attention_projection = register(SCHEMA, _run, _fake)

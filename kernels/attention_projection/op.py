"""k3fuse::attention_projection."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.attention_projection import reference
from k3fuse.kernels.attention_projection.launch import launch, misfit
from k3fuse.kernels.attention_projection.policy import TABLE
from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register

NAME = "attention_projection"
SCHEMA = (
    f"{NAME}(Tensor x, Tensor[] weights, *, str target, str group, str composition) -> Tensor[]"
)


def _specs(x: Tensor, weights: Sequence[Tensor]) -> list[Spec]:
    check.rows("x", x, *check.FLOATS)
    if not weights:
        raise ValueError("weights is empty; pass one weight [N, K] per linear")
    for i, weight in enumerate(weights):
        check.weight(f"weights[{i}]", weight, x.shape[1], x)
    return [Spec((x.shape[0], weight.shape[0]), x.dtype) for weight in weights]


def _run(
    x: Tensor, weights: Sequence[Tensor], *, target: str, group: str, composition: str
) -> list[Tensor]:
    return dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=[x, *weights],
        specs=_specs(x, weights),
        reference=lambda: reference.attention_projection(x, weights),
        kernel=lambda row: launch(row, target, x, weights),
        misfit=lambda row: misfit(row, target, x, weights),
    )


def _fake(
    x: Tensor, weights: Sequence[Tensor], *, target: str, group: str, composition: str
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    return [spec.empty(x) for spec in _specs(x, weights)]


attention_projection = register(SCHEMA, _run, _fake)

"""k3fuse::tail."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.prefetch.launch import SCHEMA as AHEAD
from k3fuse.kernels.prefetch.launch import given
from k3fuse.kernels.tail import reference
from k3fuse.kernels.tail.launch import launch, misfit
from k3fuse.kernels.tail.policy import TABLE

NAME = "tail"
SCHEMA = (
    f"{NAME}(Tensor routed, Tensor shared, Tensor norm_weight, Tensor up_weight, float eps, *, "
    f"str target, str group, str composition, {AHEAD}) -> Tensor"
)


def _spec(routed: Tensor, shared: Tensor, norm_weight: Tensor, up_weight: Tensor) -> Spec:
    check.rows("routed", routed, *check.FLOATS)
    check.vector("norm_weight", norm_weight, routed.shape[1])
    check.weight("up_weight", up_weight, routed.shape[1], routed)
    check.rows("shared", shared, routed.dtype)
    check.size("shared", shared, 1, up_weight.shape[0], "the hidden size")
    check.tokens("shared", shared, routed.shape[0])
    return Spec((routed.shape[0], up_weight.shape[0]), routed.dtype)


def _run(
    routed: Tensor,
    shared: Tensor,
    norm_weight: Tensor,
    up_weight: Tensor,
    eps: float,
    *,
    target: str,
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> Tensor:
    ahead = given(prefetch, prefetch_split)
    (delta,) = dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=routed.shape[0],
        composition=composition,
        inputs=[routed, shared, norm_weight, up_weight],
        specs=[_spec(routed, shared, norm_weight, up_weight)],
        reference=lambda: [
            reference.tail(routed, shared, norm_weight, up_weight, eps, group),
        ],
        kernel=lambda row: [
            launch(
                row, target, group, routed, shared, norm_weight, up_weight, eps, True, ahead=ahead
            )
        ],
        misfit=lambda _: misfit(routed, shared, norm_weight, up_weight),
    )
    return delta


def _fake(
    routed: Tensor,
    shared: Tensor,
    norm_weight: Tensor,
    up_weight: Tensor,
    eps: float,
    *,
    target: str,
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> Tensor:
    TABLE.lookup(target, 1)
    given(prefetch, prefetch_split)
    return _spec(routed, shared, norm_weight, up_weight).empty(routed)


tail = register(SCHEMA, _run, _fake)

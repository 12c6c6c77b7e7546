"""k3fuse::attn_res."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.attn_res import reference
from k3fuse.kernels.attn_res.check import residual_sources, score_and_norm
from k3fuse.kernels.attn_res.launch import launch
from k3fuse.kernels.attn_res.policy import TABLE
from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register

NAME = "attn_res"
SCHEMA = (
    f"{NAME}(Tensor prefix, Tensor? delta, Tensor[] blocks, int num_blocks, "
    "Tensor score_norm_weight, Tensor score_proj_weight, Tensor? out_norm_weight, float eps, "
    "float out_eps, bool round_mix, *, str target, str composition) -> Tensor[]"
)


def _specs(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm: Tensor,
    score_proj: Tensor,
    out_norm: Tensor | None,
) -> list[Spec]:
    check.rows("prefix", prefix, *check.FLOATS)
    h = prefix.shape[1]
    residual_sources(prefix, h, None, delta, blocks, num_blocks)
    score_and_norm(h, score_norm, score_proj, out_norm)
    row = Spec((prefix.shape[0], h), prefix.dtype)
    return [row] if delta is None else [row, row]


def _run(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm_weight: Tensor,
    score_proj_weight: Tensor,
    out_norm_weight: Tensor | None,
    eps: float,
    out_eps: float,
    round_mix: bool,
    *,
    target: str,
    composition: str,
) -> list[Tensor]:
    arguments = (
        prefix,
        delta,
        blocks,
        num_blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
    )
    return dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=prefix.shape[0],
        composition=composition,
        inputs=dispatch.operands(attn_res, arguments),
        specs=_specs(*arguments),
        reference=lambda: reference.attn_res(*arguments, eps, out_eps, round_mix),
        kernel=lambda row: launch(row, target, *arguments, eps, out_eps, round_mix),
    )


def _fake(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm_weight: Tensor,
    score_proj_weight: Tensor,
    out_norm_weight: Tensor | None,
    eps: float,
    out_eps: float,
    round_mix: bool,
    *,
    target: str,
    composition: str,
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    specs = _specs(
        prefix,
        delta,
        blocks,
        num_blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
    )
    return [spec.empty(prefix) for spec in specs]


attn_res = register(SCHEMA, _run, _fake)

"""k3fuse::output_projection_attn_res and k3fuse::output_projection_add_rms_norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3fuse.kernels.attn_res.check import residual_sources, score_and_norm
from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.output_projection import reference
from k3fuse.kernels.output_projection.launch import Form, Residual, launch, misfit
from k3fuse.kernels.output_projection.policy import TABLE
from k3fuse.kernels.prefetch.launch import SCHEMA as AHEAD
from k3fuse.kernels.prefetch.launch import given

ATTN_RES = "output_projection_attn_res"
ATTN_RES_SCHEMA = (
    f"{ATTN_RES}(Tensor x, Tensor weight, Tensor? prefix, Tensor[] blocks, int num_blocks, "
    "Tensor score_norm_weight, Tensor score_proj_weight, Tensor? out_norm_weight, float eps, "
    "float out_eps, bool round_mix, *, str target, str group, str composition, "
    f"{AHEAD}) -> Tensor[]"
)
ADD_RMS_NORM = "output_projection_add_rms_norm"
ADD_RMS_NORM_SCHEMA = (
    f"{ADD_RMS_NORM}(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, float eps, "
    f"str rounding, *, str target, str group, str composition, {AHEAD}) -> Tensor[]"
)


def _projection(x: Tensor, weight: Tensor) -> list[Spec]:
    check.rows("x", x, *check.FLOATS)
    check.weight("weight", weight, x.shape[1], x)
    return [Spec((x.shape[0], weight.shape[0]), x.dtype)] * 2


def _attn_res_specs(
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm: Tensor,
    score_proj: Tensor,
    out_norm: Tensor | None,
) -> list[Spec]:
    specs = _projection(x, weight)
    h = weight.shape[0]
    residual_sources(x, h, prefix, None, blocks, num_blocks)
    score_and_norm(h, score_norm, score_proj, out_norm)
    return specs


def _run_attn_res(
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
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
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> list[Tensor]:
    ahead = given(prefetch, prefetch_split)
    arguments = (
        x,
        weight,
        prefix,
        blocks,
        num_blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
    )
    residual = Residual(
        Form(num_blocks, prefix is not None, out_norm_weight is not None, round_mix, False),
        prefix,
        blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
        eps,
        out_eps,
    )
    return dispatch.run(
        TABLE,
        ATTN_RES,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=dispatch.operands(output_projection_attn_res, arguments),
        specs=_attn_res_specs(*arguments),
        reference=lambda: reference.output_projection_attn_res(
            *arguments, eps, out_eps, round_mix, group
        ),
        kernel=lambda row: launch(row, target, group, x, weight, residual, ahead),
        misfit=lambda row: misfit(row, target, x, weight, residual),
    )


def _fake_attn_res(
    x: Tensor,
    weight: Tensor,
    prefix: Tensor | None,
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
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    given(prefetch, prefetch_split)
    specs = _attn_res_specs(
        x,
        weight,
        prefix,
        blocks,
        num_blocks,
        score_norm_weight,
        score_proj_weight,
        out_norm_weight,
    )
    return [spec.empty(x) for spec in specs]


def _add_rms_norm_specs(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, rounding: str
) -> list[Spec]:
    specs = _projection(x, weight)
    h = weight.shape[0]
    check.rows("residual", residual, x.dtype)
    check.size("residual", residual, 1, h, "the hidden size")
    check.tokens("residual", residual, x.shape[0])
    check.vector("norm_weight", norm_weight, h)
    check.flags("rounding", rounding, reference.ROUNDING)
    return specs


def _run_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    rounding: str,
    *,
    target: str,
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> list[Tensor]:
    flags = check.flags("rounding", rounding, reference.ROUNDING)
    ahead = given(prefetch, prefetch_split)
    form = Form(-1, True, True, "round_sum" in flags, "round_before_weight" in flags)
    rest = Residual(form, residual, (), None, None, norm_weight, eps, eps)
    return dispatch.run(
        TABLE,
        ADD_RMS_NORM,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=[x, weight, residual, norm_weight],
        specs=_add_rms_norm_specs(x, weight, residual, norm_weight, rounding),
        reference=lambda: reference.output_projection_add_rms_norm(
            x,
            weight,
            residual,
            norm_weight,
            eps,
            flags,
            group,
        ),
        kernel=lambda row: launch(row, target, group, x, weight, rest, ahead),
        misfit=lambda row: misfit(row, target, x, weight, rest),
    )


def _fake_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    rounding: str,
    *,
    target: str,
    group: str,
    composition: str,
    prefetch: Sequence[Tensor] | None = None,
    prefetch_split: Sequence[int] = (),
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    given(prefetch, prefetch_split)
    specs = _add_rms_norm_specs(x, weight, residual, norm_weight, rounding)
    return [spec.empty(x) for spec in specs]


output_projection_attn_res = register(ATTN_RES_SCHEMA, _run_attn_res, _fake_attn_res)
output_projection_add_rms_norm = register(
    ADD_RMS_NORM_SCHEMA, _run_add_rms_norm, _fake_add_rms_norm
)

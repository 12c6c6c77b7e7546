"""k3fuse::router_front and k3fuse::router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.common.microscaling import BLOCK
from k3fuse.kernels.router import reference
from k3fuse.kernels.router.launch import launch, misfit
from k3fuse.kernels.router.policy import TABLE
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.router.units import PLAN_WORDS

FRONT = "router_front"
FRONT_SCHEMA = (
    f"{FRONT}(Tensor x, Tensor gate_weight, Tensor? latent_weight, *, "
    "str target, str group, str composition) -> Tensor[]"
)
ROUTER = "router"
ROUTER_SCHEMA = (
    f"{ROUTER}(Tensor x, Tensor gate_weight, Tensor? correction_bias, Tensor? latent_weight, "
    "int top_k, str scoring, bool renormalize, float scale, float renorm_eps, "
    "ScalarType weights_dtype, *, bool quantize=False, str target, str group, str composition) "
    "-> Tensor[]"
)


def _front_specs(x: Tensor, gate_weight: Tensor, latent_weight: Tensor | None) -> list[Spec]:
    check.rows("x", x, *check.FLOATS)
    check.weight("gate_weight", gate_weight, x.shape[1], x)
    specs = [Spec((x.shape[0], gate_weight.shape[0]), torch.float32)]
    if latent_weight is not None:
        check.weight("latent_weight", latent_weight, x.shape[1], x)
        specs.append(Spec((x.shape[0], latent_weight.shape[0]), x.dtype))
    return specs


def _run_front(
    x: Tensor,
    gate_weight: Tensor,
    latent_weight: Tensor | None,
    *,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    # The gate and latent weights are replicated, so the reference needs no exchange: every rank
    # computes all of it. A kernel computes its rank's share and exchanges the rows over `group`.
    form = _form(gate_weight, latent_weight)
    return dispatch.run(
        TABLE,
        FRONT,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=dispatch.operands(router_front, (x, gate_weight, latent_weight)),
        specs=_front_specs(x, gate_weight, latent_weight),
        reference=lambda: reference.router_front(x, gate_weight, latent_weight),
        kernel=lambda row: launch(row, target, group, form, x, gate_weight, latent_weight),
        misfit=lambda row: misfit(row, target, form, x, gate_weight, latent_weight),
    )


def _form(gate_weight: Tensor, latent_weight: Tensor | None, **how: Any) -> Form:
    """The rows of a call; with nothing else they are only gathered."""
    return Form(gate_weight.shape[0], 0 if latent_weight is None else latent_weight.shape[0], **how)


def _fake_front(
    x: Tensor,
    gate_weight: Tensor,
    latent_weight: Tensor | None,
    *,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    return [spec.empty(x) for spec in _front_specs(x, gate_weight, latent_weight)]


def _router_specs(
    x: Tensor,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    latent_weight: Tensor | None,
    top_k: int,
    scoring: str,
    weights_dtype: torch.dtype,
    quantize: bool,
) -> list[Spec]:
    _, *latent = _front_specs(x, gate_weight, latent_weight)
    experts = gate_weight.shape[0]
    if correction_bias is not None:
        check.vector("correction_bias", correction_bias, experts)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k}; it must be within 1..{experts}, the number of experts")
    if scoring not in reference.SCORINGS:
        raise ValueError(f"scoring={scoring!r}; known: {', '.join(reference.SCORINGS)}")
    if weights_dtype not in check.FLOATS:
        raise TypeError(f"weights_dtype={weights_dtype}; known: {check.FLOATS}")
    shape = (x.shape[0], top_k)
    specs = [Spec(shape, weights_dtype), Spec(shape, torch.int64), *latent]
    return [*specs, *_quantized_specs(latent)] if quantize else specs


def _quantized_specs(latent: list[Spec]) -> list[Spec]:
    if not latent:
        raise ValueError("quantize=True without a latent_weight; give one or use quantize=False")
    m, columns = latent[0].shape
    if columns % BLOCK:
        raise ValueError(
            f"quantize=True with {columns} latent columns; a multiple of {BLOCK} is needed"
        )
    shapes = (m, columns), (m, columns // BLOCK)
    return [*(Spec(shape, torch.uint8) for shape in shapes), Spec((PLAN_WORDS,), torch.int32)]


def _run_router(
    x: Tensor,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    latent_weight: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
    weights_dtype: torch.dtype,
    *,
    quantize: bool = False,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    tensors = (x, gate_weight, correction_bias, latent_weight)
    form = _form(
        gate_weight, latent_weight, top_k=top_k, scoring=scoring, renormalize=renormalize,
        weights_dtype=weights_dtype, bias=correction_bias is not None, quantize=quantize,
    )  # fmt: skip
    return dispatch.run(
        TABLE,
        ROUTER,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=dispatch.operands(router, tensors),
        specs=_router_specs(*tensors, top_k, scoring, weights_dtype, quantize),
        reference=lambda: reference.router(
            *tensors, top_k, scoring, renormalize, scale, renorm_eps, weights_dtype
        ),
        kernel=lambda row: launch(
            row,
            target,
            group,
            form,
            x,
            gate_weight,
            latent_weight,
            bias=correction_bias,
            scale=scale,
            eps=renorm_eps,
        ),
        misfit=lambda row: misfit(row, target, form, x, gate_weight, latent_weight),
        complete=reference.quantized if quantize else None,
    )


def _fake_router(
    x: Tensor,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    latent_weight: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
    weights_dtype: torch.dtype,
    *,
    quantize: bool = False,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    specs = _router_specs(
        x, gate_weight, correction_bias, latent_weight, top_k, scoring, weights_dtype, quantize
    )
    return [spec.empty(x) for spec in specs]


router_front = register(FRONT_SCHEMA, _run_front, _fake_front)
router = register(ROUTER_SCHEMA, _run_router, _fake_router)

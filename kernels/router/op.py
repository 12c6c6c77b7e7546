"""k3fuse::router_front and k3fuse::router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.common.microscaling import BLOCK
from k3fuse.kernels.common.numerics import ACTIVATIONS
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
    "ScalarType weights_dtype, Tensor[]? shared_gate_up=None, str activation='', float beta=0.0, "
    "float linear_beta=0.0, *, bool quantize=False, bool plan=False, str target, str group, "
    "str composition) -> Tensor[]"
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


def _shared(
    gate_up: Sequence[Tensor] | None, activation: str, beta: float, linear_beta: float
) -> reference.Shared | None:
    """The op's shared expert; None without its weights."""
    return reference.Shared(gate_up, activation, beta, linear_beta) if gate_up else None


def _shared_specs(x: Tensor, shared: reference.Shared) -> list[Spec]:
    weights, name = shared.weights, "shared_gate_up"
    if len(weights) > 2:
        raise ValueError(f"{name} holds {len(weights)} weights; pass one merged, or gate and up")
    for i, weight in enumerate(weights):
        check.weight(f"{name}[{i}]", weight, x.shape[1], x)
        check.size(f"{name}[{i}]", weight, 0, weights[0].shape[0], "gate and up have equal rows")
    if len(weights) == 1 and weights[0].shape[0] % 2:
        raise ValueError(f"{name}[0] has {weights[0].shape[0]} rows; merged gate and up have even")
    if shared.activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={shared.activation!r} for shared_gate_up; known: {', '.join(ACTIVATIONS)}"
        )
    return [Spec((x.shape[0], shared.columns), x.dtype)]


def _router_specs(
    x: Tensor,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    latent_weight: Tensor | None,
    top_k: int,
    scoring: str,
    weights_dtype: torch.dtype,
    shared: reference.Shared | None,
    quantize: bool,
    plan: bool,
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
    specs += _shared_specs(x, shared) if shared is not None else []
    specs += _quantized_specs(latent) if quantize else []
    return [*specs, Spec((PLAN_WORDS,), torch.int32)] if plan else specs


def _quantized_specs(latent: list[Spec]) -> list[Spec]:
    if not latent:
        raise ValueError("quantize=True without a latent_weight; give one or use quantize=False")
    m, columns = latent[0].shape
    if columns % BLOCK:
        raise ValueError(
            f"quantize=True with {columns} latent columns; a multiple of {BLOCK} is needed"
        )
    return [Spec(shape, torch.uint8) for shape in ((m, columns), (m, columns // BLOCK))]


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
    shared_gate_up: Sequence[Tensor] | None = None,
    activation: str = "",
    beta: float = 0.0,
    linear_beta: float = 0.0,
    *,
    quantize: bool = False,
    plan: bool = False,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    tensors = (x, gate_weight, correction_bias, latent_weight)
    shared = _shared(shared_gate_up, activation, beta, linear_beta)
    specs = _router_specs(*tensors, top_k, scoring, weights_dtype, shared, quantize, plan)
    form = _form(
        gate_weight, latent_weight, top_k=top_k, scoring=scoring, renormalize=renormalize,
        weights_dtype=weights_dtype, bias=correction_bias is not None, quantize=quantize, plan=plan,
    )  # fmt: skip
    return dispatch.run(
        TABLE,
        ROUTER,
        target=target,
        m=x.shape[0],
        composition=composition,
        inputs=[*dispatch.operands(router, tensors), *(shared_gate_up or ())],
        specs=specs,
        reference=lambda: reference.router(
            *tensors, top_k, scoring, renormalize, scale, renorm_eps, weights_dtype, shared
        ),
        kernel=lambda row: launch(
            row,
            target,
            group,
            form,
            x,
            gate_weight,
            latent_weight,
            shared=shared,
            bias=correction_bias,
            scale=scale,
            eps=renorm_eps,
        ),
        misfit=lambda row: misfit(row, target, form, x, gate_weight, latent_weight, shared),
        # Outside the policy the experts are outside theirs, and their composition reads BF16.
        complete=partial(
            reference.completed,
            quantize=quantize,
            plan=plan,
            read=TABLE.lookup(target, x.shape[0]) is not None,
        ),
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
    shared_gate_up: Sequence[Tensor] | None = None,
    activation: str = "",
    beta: float = 0.0,
    linear_beta: float = 0.0,
    *,
    quantize: bool = False,
    plan: bool = False,
    target: str,
    group: str,
    composition: str,
) -> list[Tensor]:
    TABLE.lookup(target, 1)
    shared = _shared(shared_gate_up, activation, beta, linear_beta)
    specs = _router_specs(
        x, gate_weight, correction_bias, latent_weight, top_k, scoring, weights_dtype, shared,
        quantize, plan,
    )  # fmt: skip
    return [spec.empty(x) for spec in specs]


router_front = register(FRONT_SCHEMA, _run_front, _fake_front)
router = register(ROUTER_SCHEMA, _run_router, _fake_router)

"""k3fuse::experts_partials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common import check, dispatch
from k3fuse.kernels.common.dispatch import Spec
from k3fuse.kernels.common.library import register
from k3fuse.kernels.common.microscaling import BLOCK
from k3fuse.kernels.common.numerics import ACTIVATIONS
from k3fuse.kernels.experts.config import stored_width
from k3fuse.kernels.experts.launch import Operands
from k3fuse.kernels.experts.layouts import LAYOUTS, TRTLLM
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.experts_partials import reference
from k3fuse.kernels.experts_partials.launch import Given, launch, misfit, stand_ins
from k3fuse.kernels.experts_partials.policy import TABLE
from k3fuse.kernels.experts_partials.reference import Choice
from k3fuse.kernels.router.reference import SCORINGS

NAME = "experts_partials"
SCHEMA = (
    f"{NAME}(Tensor hidden, Tensor logits, Tensor? correction_bias, Tensor shared_hidden, "
    "Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor[] shared_gate_up, "
    "Tensor shared_down, int top_k, str scoring, bool renormalize, float scale, "
    "float renorm_eps, ScalarType weights_dtype, str activation, float beta, float linear_beta, "
    "str layout, int width, str rounding, *, str target, str composition) -> Tensor[]"
)
TENSORS = 10  # leading arguments that are tensors or lists of them
# Rows and columns of a piece of shuffled scales, in values of the weight.
_PIECE_ROWS, _PIECE_COLUMNS = 128, 128


def _check_weights(tensors: Sequence[Tensor], latent: int, layout: str, width: int) -> None:
    """w13, w13_scale, w2, w2_scale as `layouts.py` says, for experts `width` wide."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; known: {', '.join(LAYOUTS)}")
    if width < BLOCK or width % BLOCK or latent % BLOCK:
        raise ValueError(
            f"width={width} with {latent} columns of hidden; both have to fill blocks of {BLOCK}"
        )
    stored = stored_width(width) if layout == TRTLLM else width
    if layout == TRTLLM and (stored % _PIECE_ROWS or latent % _PIECE_COLUMNS):
        raise ValueError(
            f"layout={layout!r} with width={width} and {latent} columns of hidden; stored widths "
            f"and columns are multiples of {_PIECE_ROWS} there"
        )
    experts = tensors[0].shape[0]
    shapes = {
        "w13": (experts, 2 * stored, latent // 2),
        "w13_scale": (experts, 2 * stored, latent // BLOCK),
        "w2": (experts, latent, stored // 2),
        "w2_scale": (experts, latent, stored // BLOCK),
    }
    for tensor, (name, shape) in zip(tensors, shapes.items(), strict=True):
        check.dtype(name, tensor, torch.uint8)
        check.unit_stride(name, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected {shape} for layout={layout!r} "
                f"and width={width}"
            )


def _check_shared(x: Tensor, gate_up: Sequence[Tensor], down: Tensor) -> None:
    if not 1 <= len(gate_up) <= 2:
        raise ValueError(
            f"shared_gate_up holds {len(gate_up)} weights; pass one merged, or gate and up"
        )
    check.rows("shared_down", down, x.dtype)
    check.size("shared_down", down, 0, x.shape[1], "the columns of shared_hidden")
    rows = 2 * down.shape[1] // len(gate_up)
    for i, weight in enumerate(gate_up):
        check.weight(f"shared_gate_up[{i}]", weight, x.shape[1], x)
        check.size(f"shared_gate_up[{i}]", weight, 0, rows, "gate and up rows for shared_down")


def _specs(
    hidden: Tensor,
    logits: Tensor,
    correction_bias: Tensor | None,
    shared_hidden: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shared_gate_up: Sequence[Tensor],
    shared_down: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
    weights_dtype: torch.dtype,
    activation: str,
    beta: float,
    linear_beta: float,
    layout: str,
    width: int,
    rounding: str,
) -> list[Spec]:
    m, latent = hidden.shape[0], hidden.shape[1]
    check.rows("hidden", hidden, *check.FLOATS)
    check.rows("logits", logits, torch.float32)
    check.tokens("logits", logits, m)
    check.rank("w13", w13, 3)
    check.size("logits", logits, 1, w13.shape[0], "the experts of w13")
    if correction_bias is not None:
        check.vector("correction_bias", correction_bias, logits.shape[1])
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k}; it must be within 1..{logits.shape[1]}, the experts")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring={scoring!r}; known: {', '.join(SCORINGS)}")
    if weights_dtype not in check.FLOATS:
        raise TypeError(f"weights_dtype={weights_dtype}; known: {check.FLOATS}")
    _check_weights((w13, w13_scale, w2, w2_scale), latent, layout, width)
    check.rows("shared_hidden", shared_hidden, hidden.dtype)
    check.tokens("shared_hidden", shared_hidden, m)
    _check_shared(shared_hidden, shared_gate_up, shared_down)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; known: {', '.join(ACTIVATIONS)}")
    check.flags("rounding", rounding, reference.ROUNDING)
    return [
        Spec((m, shared_hidden.shape[1]), hidden.dtype),
        Spec((m, latent), hidden.dtype),
    ]


def given(*arguments: Any) -> Given:
    """One call of the op, from its positional arguments."""
    hidden, logits, bias, shared_hidden, w13, w13_scale, w2, w2_scale, gate_up, down = arguments[
        :TENSORS
    ]
    top_k, scoring, renormalize, scale, eps, weights_dtype = arguments[TENSORS : TENSORS + 6]
    name, beta, linear_beta, layout, width, _ = arguments[TENSORS + 6 :]
    choice = Choice(top_k, scoring, renormalize, scale, eps, weights_dtype)
    operands = Operands(
        hidden=hidden, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale,
        shared_hidden=shared_hidden, shared_gate_up=gate_up, shared_down=down,
        latent_norm_weight=None, up_weight=None, layout=layout, width=width,
        **stand_ins(hidden.shape[0], hidden.shape[1], choice),
    )  # fmt: skip
    return Given(logits, bias, operands, choice, Activation(name, beta, linear_beta))


def _run(*arguments: Any, target: str, composition: str) -> list[Tensor]:
    specs = _specs(*arguments)
    tensors, flags = arguments[:TENSORS], check.flags("rounding", arguments[-1], reference.ROUNDING)
    call = given(*arguments)
    return dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=call.logits.shape[0],
        composition=composition,
        inputs=dispatch.operands(experts_partials, tensors),
        specs=specs,
        reference=lambda: reference.experts_partials(
            *tensors,
            choice=call.choice,
            activation=call.activation,
            layout=call.experts.layout,
            width=call.experts.width,
            rounding=flags,
        ),
        kernel=lambda row: launch(row, target, call, "hidden_floor" in flags),
        misfit=lambda row: misfit(row, target, call),
    )


def _fake(*arguments: Any, target: str, composition: str) -> list[Tensor]:
    TABLE.lookup(target, 1)
    return [spec.empty(arguments[0]) for spec in _specs(*arguments)]


experts_partials = register(SCHEMA, _run, _fake)

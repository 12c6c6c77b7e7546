"""k3fuse::experts."""

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
from k3fuse.kernels.experts import mix as behind
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.launch import Operands, launch, misfit
from k3fuse.kernels.experts.policy import TABLE
from k3fuse.kernels.prefetch.launch import SCHEMA as AHEAD
from k3fuse.kernels.prefetch.launch import given as next_weights

NAME = "experts"
SCHEMA = (
    f"{NAME}(Tensor hidden, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor? w13_scale, "
    "Tensor w2, Tensor? w2_scale, Tensor? shared_hidden, Tensor[] shared_gate_up, "
    "Tensor? shared_down, Tensor? latent_norm_weight, Tensor? up_weight, str activation, "
    "float beta, float linear_beta, float eps, str rounding, Tensor? shared_row=None, "
    f"Tensor? latent_q=None, Tensor? latent_scale=None, {behind.SCHEMA}, *, str target, str group, "
    f"str composition, {AHEAD}) -> Tensor[]"
)
# Positions: the tensors of every form, then the numbers, then what a router has made: the shared
# expert's hidden row (SiTU of gate and up, BF16 [M, S]) in place of shared_hidden and
# shared_gate_up, and the MXFP8 of `hidden`, which no composition reads. Then the AttnRes that reads
# delta: with it, the results are delta, the mix and the new prefix, all [M, H].
_TENSORS, _NUMBERS = 12, 5
MADE = ("shared_row", "latent_q", "latent_scale")
_MIX = _TENSORS + _NUMBERS + len(MADE)


def _check_routing(hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    check.rows("hidden", hidden, *check.FLOATS)
    check.rows("topk_weights", topk_weights, *check.FLOATS)
    check.tokens("topk_weights", topk_weights, hidden.shape[0])
    check.rows("topk_ids", topk_ids, torch.int64, torch.int32)
    check.tokens("topk_ids", topk_ids, hidden.shape[0])
    check.size("topk_ids", topk_ids, 1, topk_weights.shape[1], "the slots of topk_weights")
    if topk_ids.shape[1] < 1:
        raise ValueError("topk_ids has no slots; at least one expert per token is needed")


def _check_routed(
    hidden: Tensor, w13: Tensor, w13_scale: Tensor | None, w2: Tensor, w2_scale: Tensor | None
) -> None:
    if (w13_scale is None) != (w2_scale is None):
        raise ValueError("pass both of w13_scale and w2_scale (MXFP4), or neither")
    packed = w13_scale is not None
    per_item = 2 if packed else 1
    for name, weight in (("w13", w13), ("w2", w2)):
        check.rank(name, weight, 3)
        check.dtype(name, weight, torch.uint8 if packed else hidden.dtype)
        check.unit_stride(name, weight)
    latent = hidden.shape[1]
    check.size("w13", w13, 2, latent // per_item, "the columns of hidden")
    check.size("w2", w2, 0, w13.shape[0], "the experts of w13")
    check.size("w2", w2, 1, latent, "the columns of hidden")
    check.size("w13", w13, 1, 2 * per_item * w2.shape[2], "gate and up rows for w2's columns")
    if w13_scale is None or w2_scale is None:
        return
    for name, scale, weight in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        check.rank(name, scale, 3)
        check.dtype(name, scale, torch.uint8)
        check.unit_stride(name, scale)
        expected = (*weight.shape[:2], 2 * weight.shape[2] // BLOCK)
        if 2 * weight.shape[2] % BLOCK or tuple(scale.shape) != expected:
            raise ValueError(
                f"{name} has shape {tuple(scale.shape)}; expected {expected}, one scale per "
                f"{BLOCK} values, which have to fill the blocks"
            )


def _check_shared(
    hidden: Tensor,
    h: int,
    shared_hidden: Tensor | None,
    gate_up: Sequence[Tensor],
    down: Tensor | None,
    row: Tensor | None,
) -> None:
    if row is not None and (gate_up or shared_hidden is not None):
        raise ValueError(
            "shared_row is given with shared_hidden or shared_gate_up; it is what they make, so "
            "pass either it or them"
        )
    if (down is None) != (not gate_up and row is None) or len(gate_up) > 2:
        raise ValueError(
            f"shared_gate_up holds {len(gate_up)} weights, shared_row is "
            f"{'absent' if row is None else 'given'} and shared_down is "
            f"{'absent' if down is None else 'given'}; pass one merged or two gate and up weights, "
            "or the row, with shared_down, or none of them"
        )
    if down is None:
        return
    if row is not None:
        check.rows("shared_row", row, hidden.dtype)
        check.tokens("shared_row", row, hidden.shape[0])
        check.weight("shared_down", down, row.shape[1], hidden)
        check.size("shared_down", down, 0, h, "the hidden size")
        return
    x = hidden if shared_hidden is None else shared_hidden
    check.rows("shared_hidden", x, hidden.dtype)
    check.tokens("shared_hidden", x, hidden.shape[0])
    check.rows("shared_down", down, hidden.dtype)
    check.size("shared_down", down, 0, h, "the hidden size")
    for i, weight in enumerate(gate_up):
        check.weight(f"shared_gate_up[{i}]", weight, x.shape[1], x)
        rows = down.shape[1] * 2 // len(gate_up)
        check.size(f"shared_gate_up[{i}]", weight, 0, rows, "gate and up rows for shared_down")


def _check_quantized(
    hidden: Tensor, w13_scale: Tensor | None, latent_q: Tensor | None, latent_scale: Tensor | None
) -> None:
    if (latent_q is None) != (latent_scale is None):
        raise ValueError("pass both of latent_q and latent_scale (MXFP8 of hidden), or neither")
    if latent_q is None or latent_scale is None:
        return
    if w13_scale is None:
        raise ValueError("latent_q is given for unquantised experts, which read hidden; leave it")
    columns = hidden.shape[1]
    for name, tensor, width in (
        ("latent_q", latent_q, columns), ("latent_scale", latent_scale, columns // BLOCK)
    ):  # fmt: skip
        check.rows(name, tensor, torch.uint8)
        check.tokens(name, tensor, hidden.shape[0])
        check.size(name, tensor, 1, width, "the columns of hidden, one scale for 32")


def _specs(
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    shared_hidden: Tensor | None,
    shared_gate_up: Sequence[Tensor],
    shared_down: Tensor | None,
    latent_norm_weight: Tensor | None,
    up_weight: Tensor | None,
    activation: str,
    beta: float,
    linear_beta: float,
    eps: float,
    rounding: str,
    shared_row: Tensor | None = None,
    latent_q: Tensor | None = None,
    latent_scale: Tensor | None = None,
    *mix: Any,
) -> list[Spec]:
    _check_routing(hidden, topk_weights, topk_ids)
    _check_routed(hidden, w13, w13_scale, w2, w2_scale)
    h = hidden.shape[1]
    if latent_norm_weight is not None:
        check.vector("latent_norm_weight", latent_norm_weight, h)
    if up_weight is not None:
        check.weight("up_weight", up_weight, h, hidden)
        h = up_weight.shape[0]
    _check_shared(hidden, h, shared_hidden, shared_gate_up, shared_down, shared_row)
    _check_quantized(hidden, w13_scale, latent_q, latent_scale)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; known: {', '.join(ACTIVATIONS)}")
    check.flags("rounding", rounding, reference.ROUNDING)
    row = Spec((hidden.shape[0], h), hidden.dtype)
    given = behind.mix_of(mix)
    if given is None:
        return [row]
    behind.check(given, hidden, h)
    return [row, row, row]


def _check_ids(topk_ids: Tensor, experts: int) -> None:
    # On a device this would wait for it; there the ids come from the router, which is in range.
    if topk_ids.device.type == "cpu" and topk_ids.numel():
        low, high = int(topk_ids.min()), int(topk_ids.max())
        if low < 0 or high >= experts:
            raise ValueError(
                f"topk_ids spans {low}..{high}; ids must be within 0..{experts - 1}, the experts "
                "of w13 on this rank"
            )


def _run(
    *arguments: Any, target: str, group: str, composition: str,
    prefetch: Sequence[Tensor] | None = None, prefetch_split: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    ahead = next_weights(prefetch, prefetch_split)
    specs = _specs(*arguments)
    tensors, numbers = arguments[:_TENSORS], arguments[_TENSORS : _TENSORS + _NUMBERS]
    made = dict(zip(MADE, arguments[_TENSORS + _NUMBERS : _MIX], strict=False))
    mix = behind.mix_of(arguments[_MIX:])
    name, beta, linear_beta, eps, rounding = numbers
    hidden, _, topk_ids, w13 = tensors[:4]
    activation = reference.Activation(name, beta, linear_beta)
    flags = check.flags("rounding", rounding, reference.ROUNDING)
    given = Operands(*tensors, **made)
    _check_ids(topk_ids, w13.shape[0])

    def meaning() -> list[Tensor]:
        delta = reference.experts(
            *tensors, activation=activation, eps=eps, rounding=flags, group=group, **made
        )
        return [delta] if mix is None else [delta, *behind.meaning(mix, delta)]

    no_mxfp8 = (*arguments[: _MIX - 2], None, None, *arguments[_MIX:])
    return dispatch.run(
        TABLE,
        NAME,
        target=target,
        m=hidden.shape[0],
        composition=composition,
        inputs=dispatch.operands(experts, no_mxfp8),
        specs=specs,
        reference=meaning,
        kernel=lambda row: launch(
            row, target, group, given, activation, eps, flags, mix, ahead=ahead
        ),
        misfit=lambda row: misfit(row, target, given, activation, mix),
    )


def _fake(
    *arguments: Any, target: str, group: str, composition: str,
    prefetch: Sequence[Tensor] | None = None, prefetch_split: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    next_weights(prefetch, prefetch_split)
    TABLE.lookup(target, 1)
    return [spec.empty(arguments[0]) for spec in _specs(*arguments)]


experts = register(SCHEMA, _run, _fake)

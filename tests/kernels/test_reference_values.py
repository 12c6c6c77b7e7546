"""Every reference against float64, at K3's sizes and at small ones; and what must not pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
from compare import assert_matches, wide
from op_cases import (
    Case,
    Draw,
    attention_projection,
    attn_res,
    experts,
    output_add_rms_norm,
    output_attn_res,
    router,
    router_front,
    tail,
)

Checker = Callable[[Case, list[Tensor]], None]


def _match(actual: Tensor, expected: np.ndarray, k: int, roundings: int, what: str) -> None:
    rounded = oracles.rounded(expected, actual.dtype)
    assert_matches(actual, rounded, k=k, roundings=roundings, what=what)


def check_attention_projection(case: Case, out: list[Tensor]) -> None:
    x, weights = case.args
    for got, expected in zip(out, oracles.attention_projection(x, weights), strict=True):
        _match(got, expected, x.shape[1], 1, "projection")


def check_attn_res(case: Case, out: list[Tensor]) -> None:
    prefix, delta, blocks, n, norm, proj, out_norm, eps, out_eps, round_mix = case.args
    p = wide(prefix)
    if delta is not None:
        _match(out[1], p + wide(delta), 1, 1, "new prefix")
        p = wide(out[1])  # the mix reads the rounded row
    expected = oracles.attn_res(p, blocks, n, norm, proj, out_norm, eps, out_eps)
    _match(out[0], expected, prefix.shape[1], 1 + round_mix, "out")


def check_output_attn_res(case: Case, out: list[Tensor]) -> None:
    x, weight, prefix, blocks, n, norm, proj, out_norm, eps, out_eps, _ = case.args
    (row,) = oracles.attention_projection(x, [weight])
    _match(out[1], row + (0 if prefix is None else wide(prefix)), x.shape[1], 2, "new prefix")
    expected = oracles.attn_res(wide(out[1]), blocks, n, norm, proj, out_norm, eps, out_eps)
    _match(out[0], expected, weight.shape[0], 1, "out")


def check_add_rms_norm(case: Case, out: list[Tensor]) -> None:
    x, weight, residual, norm, eps, rounding = case.args
    (row,) = oracles.attention_projection(x, [weight])
    total = row + wide(residual)
    _match(out[1], total, x.shape[1], 2, "new residual")
    flags = rounding.split("+") if rounding else []
    if "round_sum" in flags:
        total = wide(out[1])
    _match(out[0], oracles.rms(total, eps) * wide(norm), x.shape[1], 2 + len(flags), "out")


def check_router_front(case: Case, out: list[Tensor]) -> None:
    x, gate, latent = case.args
    _match(out[0], wide(x) @ wide(gate).T, x.shape[1], 1, "logits")
    assert out[0].dtype == torch.float32
    if latent is not None:
        _match(out[1], wide(x) @ wide(latent).T, x.shape[1], 1, "latent")


def check_router(case: Case, out: list[Tensor]) -> None:
    x, gate, bias, latent, top_k, scoring, renormalize, scale, eps, dtype = case.args
    logits = wide(x) @ wide(gate).T
    if scoring == "sigmoid":
        scores = oracles.sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    keys = scores + (0 if bias is None else wide(bias))
    weights, ids = out[0], out[1].numpy()
    order = np.argsort(-keys, axis=-1, kind="stable")
    ranked = np.take_along_axis(keys, order, -1)
    # Keys closer than the FP32 error of a 7168-long sum may swap.
    distinct = (ranked[:, :-1] - ranked[:, 1:])[:, :top_k].min(-1) > 1e-5
    assert distinct.any(), "no token with distinct keys: nothing was compared"
    assert (ids[distinct] == order[distinct, :top_k]).all()
    chosen = np.take_along_axis(scores, ids, -1)
    expected = chosen * scale
    if renormalize:
        expected = expected / (chosen.sum(-1, keepdims=True) + eps)
    _match(weights, expected, x.shape[1], 2, "weights")
    assert weights.dtype == dtype
    if latent is not None:
        _match(out[2], wide(x) @ wide(latent).T, x.shape[1], 1, "latent")


def check_experts(case: Case, out: list[Tensor]) -> None:
    hidden, w2 = case.args[0], case.args[5]
    if "delta" not in case.expected:
        case.expected["delta"] = oracles.experts(case.args)
    # hidden, row, partial, norm, up, shared add: each rounds to the dtype.
    _match(out[0], case.expected["delta"], hidden.shape[1] + w2.shape[2], 6, "delta")


def check_tail(case: Case, out: list[Tensor]) -> None:
    routed, shared, norm, up, eps = case.args
    expected = oracles.finish_experts(wide(routed), wide(shared), norm, up, eps)
    _match(out[0], expected, routed.shape[1], 4, "delta")


_ROUNDINGS = ("", "round_sum", "round_before_weight", "round_sum+round_before_weight")
_FLOOR = "hidden_floor"

# name -> (case of a seed, checker)
K3: dict[str, tuple[Callable[[int], Case], Checker]] = {
    "kda in_proj tp8": (
        lambda s: attention_projection(Draw(s), 3, 7168, 6288),
        check_attention_projection,
    ),
    "mla qkv_a + gate tp16": (
        lambda s: attention_projection(Draw(s), 64, 7168, 2112, 768),
        check_attention_projection,
    ),
    "attn_res, 8 blocks": (
        lambda s: attn_res(Draw(s), 5, 7168, 8, delta=True, bank=True, norm=True, mix=False),
        check_attn_res,
    ),
    "attn_res, layer 0": (
        lambda s: attn_res(Draw(s), 2, 7168, 0, delta=False, bank=True, norm=True, mix=False),
        check_attn_res,
    ),
    "attn_res, final": (
        lambda s: attn_res(Draw(s), 4, 7168, 8, delta=True, bank=True, norm=True, mix=True),
        check_attn_res,
    ),
    "o_proj tp8 delta": (
        lambda s: output_attn_res(Draw(s), 4, 1536, 7168, 5, prefix=True, bank=True, norm=True),
        check_output_attn_res,
    ),
    "o_proj tp16 block write": (
        lambda s: output_attn_res(Draw(s), 8, 768, 7168, 3, prefix=False, bank=True, norm=True),
        check_output_attn_res,
    ),
    "o_proj add rms": (
        lambda s: output_add_rms_norm(Draw(s), 8, 1536, 7168, _ROUNDINGS[s % 4]),
        check_add_rms_norm,
    ),
    "router front": (lambda s: router_front(Draw(s), 8, 7168, 896, 3584), check_router_front),
    "router": (lambda s: router(Draw(s), 8, 7168, 896, 448, 16), check_router),
    "experts tp8 mxfp4": (
        lambda s: experts(
            Draw(s), 3, 3584, 384, 20, 16, hidden=7168, shared=768, mxfp4=True, rounding=_FLOOR
        ),
        check_experts,
    ),
    "experts tp16 bf16": (
        lambda s: experts(Draw(s), 2, 3584, 192, 8, 4, hidden=7168, shared=384),
        check_experts,
    ),
    "tail": (lambda s: tail(Draw(s), 8, 3584, 7168), check_tail),
}


@lru_cache(maxsize=2)
def _k3(name: str) -> tuple[Case, Checker]:
    build, check = K3[name]
    return build(3), check


@pytest.mark.parametrize("name", K3)
def test_k3_sizes(name: str) -> None:
    case, check = _k3(name)
    check(case, case())


SMALL: dict[str, tuple[Callable[[Draw, int, int], Case], Checker]] = {
    "attention_projection": (
        lambda d, m, k: attention_projection(d, m, k, 5, 11),
        check_attention_projection,
    ),
    "attn_res": (
        lambda d, m, k: attn_res(
            d,
            m,
            k,
            d.pick(1, 8),
            delta=bool(d.pick(0, 1)),
            bank=bool(d.pick(0, 1)),
            norm=bool(d.pick(0, 1)),
            mix=bool(d.pick(0, 1)),
        ),
        check_attn_res,
    ),
    "output_projection_attn_res": (
        lambda d, m, k: output_attn_res(
            d,
            m,
            k,
            48,
            d.pick(1, 8),
            prefix=bool(d.pick(0, 1)),
            bank=bool(d.pick(0, 1)),
            norm=True,
        ),
        check_output_attn_res,
    ),
    "output_projection_add_rms_norm": (
        lambda d, m, k: output_add_rms_norm(d, m, k, 48, _ROUNDINGS[d.pick(0, 3)]),
        check_add_rms_norm,
    ),
    "router_front": (lambda d, m, k: router_front(d, m, k, 24, 8), check_router_front),
    "router": (
        lambda d, m, k: router(
            d,
            m,
            k,
            24,
            8,
            3,
            bias=bool(d.pick(0, 1)),
            scoring=("sigmoid", "softmax")[d.pick(0, 1)],
            renormalize=bool(d.pick(0, 1)),
        ),
        check_router,
    ),
    "experts": (
        lambda d, m, k: experts(
            d,
            m,
            k,
            32 * d.pick(1, 3),
            6,
            3,
            hidden=(0, 80)[d.pick(0, 1)],
            shared=(0, 24)[d.pick(0, 1)],
            merged=bool(d.pick(0, 1)),
            mxfp4=bool(d.pick(0, 1)),
            activation=("situ", "silu")[d.pick(0, 1)],
        ),
        check_experts,
    ),
    "tail": (lambda d, m, k: tail(d, m, k, 48), check_tail),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", range(12))
def test_small_sizes(name: str, seed: int) -> None:
    build, check = SMALL[name]
    draw = Draw(seed + 1000, strided=bool(seed % 2))
    case = build(draw, draw.pick(1, 9), 32 * draw.pick(2, 6))
    check(case, case())


# ---- the garbage gate: what a broken kernel returns must not pass the comparison above

GATED = ["kda in_proj tp8", "attn_res, 8 blocks", "o_proj tp8 delta", "o_proj add rms"]
GATED += ["router front", "experts tp8 mxfp4", "tail"]


def _passes(check: Checker, case: Case, out: list[Tensor]) -> bool:
    try:
        check(case, out)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", GATED)
def test_garbage_does_not_pass(name: str) -> None:
    case, check = _k3(name)
    good = case()
    check(case, good)  # control
    previous = _with(case, 0, -case.args[0].roll(1, 1))
    garbage: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "rows shuffled": lambda t, _: t.roll(1, 0),
        "columns shuffled": lambda t, _: t.roll(1, 1),
        "scaled by 1.01": lambda t, _: (t.double() * 1.01).to(t.dtype),
        "previous output": lambda _, old: old,
        "zeros": lambda t, _: torch.zeros_like(t),
        "one NaN": lambda t, _: t.masked_fill(torch.arange(t.shape[1]) == 5, torch.nan),
        "last row missing": lambda t, _: torch.cat([t[:-1], torch.zeros_like(t[-1:])]),
    }
    for what, spoil in garbage.items():
        for i in range(len(good)):
            bad = list(good)
            bad[i] = spoil(good[i], previous[i])
            assert not _passes(check, case, bad), f"{what} of output {i} passes"


def _with(case: Case, index: int, value: Any) -> list[Tensor]:
    args = list(case.args)
    args[index] = value
    return Case(case.op, tuple(args), case.kwargs)()


def test_one_wrong_expert_does_not_pass() -> None:
    case, check = _k3("experts tp8 mxfp4")
    ids = case.args[2].clone()
    ids[1, 7] = next(e for e in range(len(case.args[3])) if e not in ids[1].tolist())
    with pytest.raises(AssertionError):
        check(case, _with(case, 2, ids))
    check(case, _with(case, 2, case.args[2].clone()))  # control


def test_one_wrong_scale_does_not_pass() -> None:
    case, check = _k3("experts tp8 mxfp4")
    scale = case.args[4].clone()
    scale[int(case.args[2][0, 0])] += 1  # gate and up of one expert doubled
    with pytest.raises(AssertionError):
        check(case, _with(case, 4, scale))


def test_gate_and_up_swapped_does_not_pass() -> None:
    case, check = _k3("experts tp16 bf16")
    check(case, case())  # control
    with pytest.raises(AssertionError):
        check(case, _with(case, 3, case.args[3].roll(192, 1)))


def test_rounding_flags_change_bits() -> None:
    """Every rounding flag is a different computation, or the flag would be worth nothing."""
    outs = [output_add_rms_norm(Draw(5), 16, 64, 512, r)()[0] for r in _ROUNDINGS]
    assert len({o.view(torch.int16).numpy().tobytes() for o in outs}) == 4
    floor, up = (
        experts(Draw(5), 8, 64, 64, 4, 2, mxfp4=True, rounding=r)()[0] for r in (_FLOOR, "")
    )
    assert not torch.equal(floor, up)
    form = {"delta": True, "bank": True, "norm": True}
    a, b = (attn_res(Draw(5), 8, 512, 4, mix=mix, **form)()[0] for mix in (True, False))
    assert not torch.equal(a, b)

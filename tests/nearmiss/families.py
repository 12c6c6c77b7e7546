"""Projections and mixes in plain PyTorch, each with knobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parts import (
    HARMLESS,
    LINEARS,
    NORM,
    Family,
    H,
    Inputs,
    K,
    Knobs,
    M,
    add,
    between,
    linear,
    reduce,
    rms_norm,
)


def projected(knobs: Knobs, inp: Inputs, name: str = "o") -> Tensor:
    """o-proj and its reduction."""
    x, w = inp.rows(f"{name}_x", M, K), inp.weight(f"{name}_w", H, K)
    if knobs.get("slice_weight"):
        w = torch.cat([w, w])[knobs["slice_weight"] : knobs["slice_weight"] + H]
    bias = inp.vector(f"{name}_bias", H) if knobs.get("bias") else None
    if knobs.get("x_is_wide"):
        x = x.float().to(x.dtype)
    y = linear(x, w, knobs.get("linear", "linear"), bias)
    return between(
        reduce(between(y, knobs.get("after_linear", "nothing")), knobs), knobs["between"]
    )


def o_add_norm(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """o-proj -> all-reduce -> add -> RMSNorm."""
    y = projected(knobs, inp)
    residual = inp.rows("residual", M, H, scale=0.5)
    if knobs.get("residual_3d"):
        total = add(y.view(1, M, H), residual.view(1, M, H), knobs).view(M, H)
    else:
        total = add(y, residual, knobs)
    norm = inp.vector("norm", H, knobs.get("norm_dtype"))
    out = rms_norm(total, norm, knobs)
    kept = total.to(knobs["dtype"])
    return {"both": (out, kept), "norm": (out,), "partial too": (out, kept, y)}[
        knobs.get("results", "both")
    ]


def mix(sources: Tensor, norm: Tensor, proj: Tensor, knobs: Knobs) -> Tensor:
    """AttnRes' softmax mix in one of three spellings."""
    eps, how = knobs.get("mix_eps", 0.1), knobs.get("mix", "dot")
    wide = sources.float()
    weight = norm.float() * proj.float()
    axis = knobs.get("mix_mean_axis", -1)
    if how == "dot":
        scale = torch.rsqrt(wide.pow(2).mean(axis) + eps)
        score = (wide * weight).sum(-1) * scale
    else:
        scale = torch.rsqrt(wide.pow(2).mean(axis, keepdim=True) + eps)
        inner = wide * scale
        inner = inner * weight if how == "first" else inner * norm.float() * proj.float()
        score = inner.sum(-1)
    if knobs.get("temperature"):
        score = score * knobs["temperature"]
    if knobs.get("score_bias"):
        score = score + knobs["score_bias"]
    weights = torch.softmax(score, knobs.get("softmax_axis", -1))
    if knobs.get("gate") == "sigmoid":
        weights = torch.sigmoid(score)
    values = wide * scale.unsqueeze(-1) if knobs.get("mix_normalised") and how == "dot" else wide
    return (weights.unsqueeze(-1) * values).sum(knobs.get("mix_axis", 1))


def stacked(knobs: Knobs, inp: Inputs, last: Tensor, blocks: int, name: str = "") -> Tensor:
    """[M, S, H]: block rows, then `last`; from a list or a bank."""
    if knobs.get("form", "list") == "list":
        rows = [inp.rows(f"{name}block{i}", M, H) for i in range(blocks)]
        order = [*rows, last]
        if knobs.get("order") == "last first":
            order = [last, *rows]
        if knobs.get("order") == "reversed":
            order = [*rows[::-1], last]
        if knobs.get("order") == "repeat":
            order = [*rows[:-1], rows[0], last] if rows else order
        if knobs.get("stack_axis") == 0:
            return torch.stack(order, 0).transpose(0, 1)
        if knobs.get("stack_axis") == "mixed":
            return torch.stack(order, 0).reshape(M, len(order), H)
        return torch.stack(order, 1)
    slots = blocks + 2
    bank = inp.rows(f"{name}bank", M, slots, H)
    start, step = knobs.get("bank_start", 0), knobs.get("bank_step", 1)
    part = bank[:, start : start + blocks * step : step]
    if knobs.get("bank_flip"):
        part = part.flip(1)
    extra = [inp.rows(f"{name}extra", M, H).unsqueeze(1)] if knobs.get("bank_extra") else []
    if knobs.get("bank_only"):
        return part
    tail = [last.unsqueeze(1)]
    return torch.cat(
        [*tail, part] if knobs.get("order") == "last first" else [part, *extra, *tail], 1
    )


def after_mix(mixed: Tensor, knobs: Knobs, inp: Inputs, name: str = "") -> Tensor:
    out = inp.vector(f"{name}out_norm", H, knobs.get("norm_dtype"))
    if knobs.get("no_out_norm"):
        return mixed.to(knobs["dtype"])
    if knobs.get("round_mix"):
        mixed = mixed.to(knobs["dtype"])
    return rms_norm(mixed, out, knobs)


def score_weights(knobs: Knobs, inp: Inputs, name: str = "") -> tuple[Tensor, Tensor]:
    dtype = knobs.get("score_dtype")
    norm, proj = inp.vector(f"{name}score_norm", H, dtype), inp.vector(f"{name}proj", H, dtype, 0.5)
    return norm, proj * (H**-0.5 if knobs.get("scaled_proj") else 1)


def o_attn_res(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """o-proj -> all-reduce -> AttnRes, with a prefix or as the block-write form."""
    y = projected(knobs, inp)
    prefix = y
    if not knobs.get("write"):
        prefix = add(y, inp.rows("prefix", M, H), knobs).to(knobs["dtype"])
    norm, proj = score_weights(knobs, inp)
    mixed = mix(stacked(knobs, inp, prefix, knobs["blocks"]), norm, proj, knobs)
    return after_mix(mixed, knobs, inp), prefix


def attn_res(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """AttnRes alone, with or without a delta, plain or final."""
    prefix = inp.rows("prefix", M, H)
    if knobs["delta"]:
        prefix = add(inp.rows("delta", M, H), prefix, knobs).to(knobs["dtype"])
    norm, proj = score_weights(knobs, inp)
    mixed = mix(stacked(knobs, inp, prefix, knobs["blocks"]), norm, proj, knobs)
    return after_mix(mixed, knobs, inp), prefix


def two_blocks(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """Two block-write layers; `crossed` hands each the other's row as a block."""
    first, second = projected(knobs, inp, "a"), projected(knobs, inp, "b")
    outs = []
    for name, mine, other in (("a", first, second), ("b", second, first)):
        crossed = knobs["crossed"] == "both" or (knobs["crossed"] == "one" and name == "a")
        rows = [inp.rows(f"{name}block", M, H)] if not crossed else [other]
        norm, proj = score_weights(knobs, inp, name)
        mixed = mix(torch.stack([*rows, mine], 1), norm, proj, knobs)
        outs.append(after_mix(mixed, knobs, inp, name))
    return (*outs, first, second)


MIX: dict[str, tuple[Any, ...]] = {
    "mix": ("dot", "first", "weight first"),
    "mix_eps": (0.1, 0.5, 1e-5),
    "form": ("list", "bank"),
    "blocks": (1, 2, 3),
    **{k: v for k, v in NORM.items() if k != "norm_how"},
}
PROJECTED: dict[str, tuple[Any, ...]] = {
    "linear": LINEARS,
    "between": HARMLESS,
    "sum": ("a + b", "b + a"),
}

PROJECTIONS = (
    Family(
        "o_add_norm",
        "output_projection",
        o_add_norm,
        {
            **PROJECTED,
            **NORM,
            "sum": ("a + b", "b + a"),
            "results": ("both", "norm"),
            "residual_3d": (False, False, True),
        },
    ),
    Family(
        "o_attn_res",
        "output_projection",
        o_attn_res,
        {**PROJECTED, **MIX, "between": ("nothing",), "write": (False, True)},
    ),
    Family(
        "attn_res",
        "attn_res",
        attn_res,
        {
            **MIX,
            "delta": (False, True),
            "sum": ("a + b", "b + a"),
            "round_mix": (False, False, True),
            "no_out_norm": (False, False, True),
        },
        ranks=False,
    ),
    Family(
        "two_blocks",
        "output_projection",
        two_blocks,
        {
            **PROJECTED,
            **MIX,
            "between": ("nothing",),
            "form": ("list",),
            "crossed": ("no", "one"),
        },
    ),
)

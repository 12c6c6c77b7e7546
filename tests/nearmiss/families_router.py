"""The router: scores, selection, weights, with the latent projection of the same row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parts import BF16, FP32, TOP, E, Family, Inputs, K, Knobs, L, M, linear


def score(logits: Tensor, knobs: Knobs) -> Tensor:
    how = knobs.get("scoring", "sigmoid")
    return {
        "sigmoid": lambda: torch.sigmoid(logits),
        "softmax": lambda: torch.softmax(logits, knobs.get("score_axis", -1)),
        "written out": lambda: written_out(logits, knobs),
        "tanh": lambda: torch.tanh(logits),
        "sqrt softplus": lambda: F.softplus(logits).sqrt(),
        "sigmoid of double": lambda: torch.sigmoid(2 * logits),
        "sigmoid + softmax": lambda: torch.softmax(torch.sigmoid(logits), -1),
        "hard": lambda: F.hardsigmoid(logits),
    }[how]()


def written_out(logits: Tensor, knobs: Knobs) -> Tensor:
    """A softmax as Inductor has it: greatest, difference, exp, sum, quotient."""
    axis = knobs.get("sum_axis", -1)
    most = {
        "amax": lambda: logits.amax(knobs.get("most_axis", -1), keepdim=True),
        "max": lambda: logits.max(knobs.get("most_axis", -1), keepdim=True)[0],
        "amin": lambda: logits.amin(-1, keepdim=True),
        "mean": lambda: logits.mean(-1, keepdim=True),
        "of all": lambda: logits.amax(),
        "of twice": lambda: (2 * logits).amax(-1, keepdim=True),
        "none": lambda: None,
        "number": lambda: 1.0,
    }[knobs.get("most", "amax")]()
    shifted = logits if most is None else logits - most
    if knobs.get("exp_round"):
        shifted = shifted.to(BF16).float()
    made = torch.exp2(shifted) if knobs.get("base") == 2 else torch.exp(shifted)
    return {
        "sum": lambda: made / made.sum(axis, keepdim=True),
        "late column": lambda: made / made.sum(axis).unsqueeze(-1),
        "eps": lambda: made / (made.sum(axis, keepdim=True) + 0.5),
        "one": lambda: made / (made.sum(axis, keepdim=True) + 1.0),
        "mean": lambda: made / made.mean(axis, keepdim=True),
        "of squares": lambda: made / made.square().sum(axis, keepdim=True),
        "reciprocal": lambda: made * made.sum(axis, keepdim=True).reciprocal(),
        "half": lambda: (made.to(BF16) / made.to(BF16).sum(axis, keepdim=True)).float(),
        "rounded": lambda: (made / made.sum(axis, keepdim=True)).to(BF16).float(),
    }[knobs.get("share", "sum")]()


def picked(key: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """Values and ids of the selection."""
    top, axis = knobs.get("top", TOP), knobs.get("pick_axis", -1)
    if knobs.get("pick", "topk") == "topk":
        largest, ordered = knobs.get("largest", True), knobs.get("sorted", True)
        found = torch.topk(key, top, axis, largest=largest, sorted=ordered)
        return found[0], found[1]
    stable, down = knobs.get("stable", True), knobs.get("descending", True)
    values, ids = torch.sort(key, dim=axis, descending=down, stable=stable)
    start = knobs.get("cut_start", 0)
    if knobs.get("cut_axis", 1) == 0:
        return values[:top], ids[:top]
    return values[:, start : start + top], ids[:, start : start + top]


def group_mask(key: Tensor, groups: int) -> Tensor:
    """Group-limited selection that keeps one group of `groups`."""
    experts = key.shape[1]
    grouped = key.view(-1, groups, experts // groups)
    best = grouped.topk(2, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter(1, chosen, 1)
    kept = mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)
    return key.masked_fill(~kept.bool(), float("-inf"))


def router(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """Gate -> scores -> top-k -> weights, with a latent projection of the same row."""
    x, gate = inp.rows("x", M, K), inp.weight("gate", E, K)
    width = knobs.get("logits", "wide")
    logits = {
        "wide": lambda: x.float() @ gate.float().t(),
        "wide linear": lambda: F.linear(x.float(), gate.float()),
        "narrow": lambda: F.linear(x, gate).float(),
        "rounded": lambda: (x.float() @ gate.float().t()).to(BF16).float(),
        "rounded scores": lambda: (x.float() @ gate.float().t()).to(BF16),
        "scaled": lambda: (x.float() @ gate.float().t()) * 0.5,
        "shifted": lambda: (x.float() @ gate.float().t()) + 1.0,
        "biased": lambda: F.linear(x.float(), gate.float(), inp.vector("gate_bias", E, FP32)),
        "paired": lambda: F.linear(x.view(M // 2, 2, K).float(), gate.float()).view(M, E),
    }[width]()
    if knobs.get("logits_view"):
        logits = logits.view(M // 2, 2 * E)
    scores = score(logits, knobs)
    bias_kind = knobs.get("bias", "fp32")
    key = scores
    if bias_kind != "none":
        shape = {"token": (M, E), "column": (M, 1)}.get(bias_kind, (E,))
        stored = BF16 if bias_kind == "bf16" else FP32
        b = inp.raw("bias", lambda g: (0.3 * torch.randn(shape, generator=g)).to(stored))
        if bias_kind == "row":
            b = b.unsqueeze(0)
        elif bias_kind == "rounded":
            b = b.to(BF16)
        elif bias_kind == "rounded twice":
            b = b.to(BF16).float()
        elif bias_kind == "half":
            b = b * 0.5
        elif bias_kind == "flipped":
            b = b.flip(0)
        if knobs.get("logits_view"):
            b = torch.cat([b, b])
        key = {
            "s + b": lambda: scores + b,
            "b + s": lambda: b + scores,
            "s - b": lambda: scores - b,
            "s * b": lambda: scores * (1 + b),
            "s + 2b": lambda: torch.add(scores, b, alpha=2),
            "logits + b": lambda: score(logits + b, knobs),
            "s + b + 1": lambda: scores + b + 1.0,
        }[knobs.get("key", "s + b")]()
    if groups := knobs.get("groups", 0):
        key = group_mask(key, groups)
    if knobs.get("key_round"):
        key = key.to(BF16)
    values, ids = picked(key, knobs)
    source = {
        "scores": lambda: scores.gather(-1, ids),
        "key": lambda: key.gather(-1, ids).to(scores.dtype),
        "values": lambda: values,
        "logits": lambda: logits.gather(-1, ids),
        "index": lambda: scores[torch.arange(ids.shape[0]).unsqueeze(-1), ids],
        "other ids": lambda: scores.gather(-1, ids.flip(-1)),
        "shifted ids": lambda: scores.gather(-1, (ids + 1) % scores.shape[-1]),
        "rows": lambda: scores.gather(0, ids % scores.shape[0]),
        "pairs": lambda: scores.view(M // 2, -1).gather(1, ids.view(M // 2, -1)).view(ids.shape),
    }[knobs.get("weights", "scores")]()
    out = _renormalised(source, knobs)
    if not knobs.get("sorted", True):  # then the order of the slots means nothing
        dense = x.new_zeros(x.shape[0], E, dtype=out.dtype).scatter(-1, ids, out)
        out, ids = dense, torch.sort(ids, -1)[0]
    latent = []
    if not knobs.get("latent_view"):
        latent = [linear(x, inp.weight("latent", L, K), knobs.get("linear", "linear"))]
    else:
        latent = [F.linear(x.view(M // 2, 2 * K), inp.weight("wide latent", L, 2 * K))]
    if knobs.get("latent_bias"):
        latent = [F.linear(x, inp.weight("latent", L, K), inp.vector("latent_bias", L))]
    kept = latent if knobs.get("latent", True) else []
    extra = {"none": [], "scores": [scores.mean(0)], "ids": [ids.sum(0)], "logits": [logits]}
    return (out, ids, *kept, *extra[knobs.get("extra", "none")])


def _renormalised(chosen: Tensor, knobs: Knobs) -> Tensor:
    eps, scale = knobs.get("renorm_eps", 1e-20), knobs.get("scale", 1.0)
    how = knobs.get("renorm", "yes")
    total = lambda t: t.sum(-1, keepdim=True)  # noqa: E731
    weights = {
        "yes": lambda: chosen / (total(chosen) + eps),
        "plain": lambda: chosen / total(chosen),
        "no": lambda: chosen,
        "max": lambda: chosen / (chosen.amax(-1, keepdim=True) + eps),
        "l2": lambda: chosen / (chosen.pow(2).sum(-1, keepdim=True) + eps),
        "tokens": lambda: chosen / (chosen.sum(0, keepdim=True) + eps),
        "pairs": lambda: (
            chosen.reshape(-1, 2 * chosen.shape[1])
            / (total(chosen.reshape(-1, 2 * chosen.shape[1])) + eps)
        ).reshape(chosen.shape),
        "halves": lambda: (
            chosen.reshape(-1, chosen.shape[1] // 2)
            / (total(chosen.reshape(-1, chosen.shape[1] // 2)) + eps)
        ).reshape(chosen.shape),
        "clamp": lambda: chosen / total(chosen).clamp(min=0.5),
        "narrow sum": lambda: chosen / (chosen.sum(-1, keepdim=True, dtype=BF16).float() + eps),
        "floor": lambda: torch.div(chosen, total(chosen), rounding_mode="floor"),
        "upside down": lambda: total(chosen) / chosen,
        "scaled first": lambda: (chosen * 2) / (total(chosen) + eps),
        "softmax": lambda: torch.softmax(chosen, -1),
        "twice": lambda: chosen / (total(chosen) + eps) / (total(chosen) + eps),
    }[how]()
    if scale != 1.0:
        weights = weights * scale
    for dtype in knobs.get("weights_dtype", ()):
        weights = weights.to(dtype)
    return weights


ROUTER = Family(
    "router",
    "router",
    router,
    {
        "logits": ("wide", "wide linear"),
        "key": ("s + b", "b + s"),
        "scoring": ("sigmoid", "sigmoid", "softmax", "written out"),
        "most": ("amax", "max"),
        "share": ("sum", "late column"),
        "pick": ("topk",),
        "renorm": ("yes", "plain", "no"),
        "renorm_eps": (1e-20, 0.25),
        "scale": (1.0, 2.446),
        "weights_dtype": ((), (BF16,)),
        "latent": (False, True),
        "groups": (0, 0, 1),
    },
    ranks=False,
)

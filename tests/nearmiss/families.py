"""Small modules in plain PyTorch around every pattern family, each with knobs.

A family is a function `(knobs, inputs) -> outputs` over named inputs. The knobs' defaults and
healthy alternatives spell the same meaning; a defect sets one of them to something else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

# Few sizes: the reference functions are traced once a size.
M, K, H, E, TOP, L, INNER = 4, 32, 64, 16, 4, 32, 32
BF16, FP32 = torch.bfloat16, torch.float32

Knobs = dict[str, Any]


class Inputs:
    """Seeded inputs of a graph by name, made on first use, in order of use."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.made: dict[str, Tensor] = {}
        self.rowlike: set[str] = set()

    def given(self, tensors: Sequence[Tensor]) -> Inputs:
        """The same inputs as other tensors (those of a trace), in order."""
        other = Inputs(0, self.dtype)
        other.made = dict(zip(self.made, tensors, strict=True))
        return other

    def rows(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        self.rowlike.add(name)
        return self.raw(name, lambda g: (torch.randn(shape, generator=g) * scale).to(self.dtype))

    def weight(self, name: str, n: int, k: int, dtype: torch.dtype | None = None) -> Tensor:
        kept = dtype or self.dtype
        return self.raw(name, lambda g: (torch.randn((n, k), generator=g) * k**-0.5).to(kept))

    def vector(
        self, name: str, n: int, dtype: torch.dtype | None = None, spread: float = 0.3
    ) -> Tensor:
        kept = dtype or self.dtype
        return self.raw(name, lambda g: (1 + spread * torch.randn(n, generator=g)).to(kept))

    def raw(self, name: str, make: Callable[[torch.Generator], Tensor]) -> Tensor:
        """The input of this name, made on first use."""
        if name not in self.made:
            self.made[name] = make(self.generator)
        return self.made[name]


def rms_norm(x: Tensor, weight: Tensor | None, knobs: Knobs, prefix: str = "norm") -> Tensor:
    """RMSNorm in one of its spellings; `{prefix}_*` knobs change it."""
    get = lambda name, default: knobs.get(f"{prefix}_{name}", default)  # noqa: E731
    eps, out = get("eps", 0.1), get("out", knobs["dtype"])
    how = get("how", "wide")
    if get("statistic", "rms") == "layer":
        return F.layer_norm(x.float(), [x.shape[-1]], None, None, eps).to(out)
    if groups := get("groups", 0):
        x = x.view(x.shape[0], groups, x.shape[1] // groups)
    wide = x if get("narrow", False) else x.float()
    square = {"pow": wide.pow(2), "mul": wide * wide, "square": torch.square(wide)}[
        get("square", "pow")
    ]
    axis = get("axis", -1)
    mean = square.sum(axis, keepdim=True) if get("sum", False) else square.mean(axis, keepdim=True)
    shifted = eps + mean if get("eps_first", False) else mean + eps
    scale = shifted.sqrt() if get("no_reciprocal", False) else torch.rsqrt(shifted)
    if get("scale_as", "row") == "column":  # broadcasts over the wrong axis
        scale = scale.reshape(1, -1).expand(wide.shape[0], -1)[:, :1].contiguous()
        scale = scale.roll(1, 0)
    if get("scale_view", False):
        wide = wide.view(2, wide.shape[0], wide.shape[1] // 2)
    normed = scale * wide if get("scale_first", False) else wide * scale
    normed = normed.reshape(x.shape[0], -1)
    if get("twice", False):
        normed = normed * scale.reshape(normed.shape[0], -1)[:, :1]
    if weight is None or get("weightless", False):
        return normed.to(out)
    if get("one_plus", False):
        weight = weight + 1
    if groups:
        normed, weight = normed.view(x.shape[0], groups, -1), weight[: x.shape[-1]]
    if how == "rounded first":
        product = normed.to(out) * weight.to(out)
    elif how == "weight rounded":
        product = normed * weight.to(BF16 if out != torch.float16 else out).float()
    else:
        w = weight.float() if get("widen_weight", True) else weight
        product = w * normed if get("weight_first", False) else normed * w
    return product.to(out).reshape(product.shape[0], -1)


def between(y: Tensor, how: str) -> Tensor:
    """Something harmless, or not, between two steps."""
    return {
        "nothing": lambda: y,
        "view": lambda: y.unsqueeze(0).squeeze(0),
        "reshape": lambda: y.reshape(-1, y.shape[-1]),
        "clone": lambda: y.clone(),
        "slice": lambda: y[:],
        "double transpose": lambda: y.t().t(),
        "contiguous": lambda: y.t().contiguous().t(),
        "round trip": lambda: y.to(torch.float8_e4m3fn).to(y.dtype),
        "widen and back": lambda: y.float().to(y.dtype),
        "scale": lambda: y * 1.5,
        "negate": lambda: -y,
        "roll": lambda: y.roll(1, 0),
        "regroup": lambda: y.reshape(y.shape[-1], -1).t().reshape(y.shape),
        "dropout": lambda: F.dropout(y, 0.5, training=False),
        "relu": lambda: torch.relu(y),
    }[how]()


HARMLESS = ("nothing", "nothing", "view", "reshape", "clone", "slice")


def linear(x: Tensor, w: Tensor, how: str = "linear", bias: Tensor | None = None) -> Tensor:
    """x W^T in one of its spellings."""
    return {
        "linear": lambda: F.linear(x, w, bias),
        "matmul": lambda: x @ w.t(),
        "mm": lambda: torch.mm(x, w.transpose(0, 1)),
        "bmm": lambda: torch.bmm(x.unsqueeze(0), w.t().unsqueeze(0)).squeeze(0),
        "wide": lambda: (x.float() @ w.float().t()).to(x.dtype),
        "kept wide": lambda: x.float() @ w.float().t(),
        "untransposed": lambda: x @ w,
        "blocks": lambda: x @ w.view(2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape[::-1]),
        "regrouped": lambda: x @ w.reshape(w.shape[::-1]),
        "minus": lambda: x @ (-w).t(),
        "flipped": lambda: x @ w.flip(0).t(),
        "halved": lambda: x @ (w * 0.5).t(),
        "batched rows": lambda: F.linear(x.view(2, -1, x.shape[-1]), w).view(x.shape[0], -1),
        "paired rows": lambda: F.linear(
            x.reshape(x.shape[0] // 2, -1), torch.cat([w, w], 1)
        ).repeat_interleave(2, 0),
        "baddbmm": lambda: torch.addmm(x.new_zeros(x.shape[0], w.shape[0]), x, w.t(), alpha=2),
    }[how]()


LINEARS = ("linear", "linear", "matmul", "mm")


def reduce(y: Tensor, knobs: Knobs, name: str = "reduce") -> Tensor:
    """All-reduce, where the graph has ranks."""
    if not knobs.get("group"):
        return y
    how = knobs.get(f"{name}_op", "sum")
    if how == "none":
        return y
    group = knobs.get(f"{name}_group", knobs["group"])
    out: Tensor = funcol.all_reduce(y, how, group)
    if knobs.get(f"{name}_twice"):
        out = funcol.all_reduce(out, how, group)
    return out


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


def add(a: Tensor, b: Tensor, knobs: Knobs) -> Tensor:
    """The residual's sum."""
    how = knobs.get("sum", "a + b")
    return {
        "a + b": lambda: a + b,
        "b + a": lambda: b + a,
        "a - b": lambda: a - b,
        "b - a": lambda: b - a,
        "a + 2b": lambda: torch.add(a, b, alpha=2),
        "a * b": lambda: a * b,
        "a + a": lambda: a + a,
        "max": lambda: torch.maximum(a, b),
        "broadcast": lambda: a + b[:1],
        "in FP32": lambda: a.float() + b.float(),
    }[how]()


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


def score(logits: Tensor, knobs: Knobs) -> Tensor:
    how = knobs.get("scoring", "sigmoid")
    return {
        "sigmoid": lambda: torch.sigmoid(logits),
        "softmax": lambda: torch.softmax(logits, knobs.get("score_axis", -1)),
        "tanh": lambda: torch.tanh(logits),
        "sqrt softplus": lambda: F.softplus(logits).sqrt(),
        "sigmoid of double": lambda: torch.sigmoid(2 * logits),
        "sigmoid + softmax": lambda: torch.softmax(torch.sigmoid(logits), -1),
        "hard": lambda: F.hardsigmoid(logits),
    }[how]()


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


Build = Callable[[Knobs, Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Family:
    """One family: how it is built, and its healthy knobs, each a tuple of equally good values."""

    name: str
    pattern: str
    build: Build
    healthy: Mapping[str, tuple[Any, ...]]
    ranks: bool = True

    def draw(self, rng: random.Random) -> Knobs:
        """Healthy knobs."""
        return {name: rng.choice(values) for name, values in self.healthy.items()}


NORM: dict[str, tuple[Any, ...]] = {
    "norm_how": ("wide", "rounded first"),
    "norm_square": ("pow", "mul", "square"),
    "norm_scale_first": (False, True),
    "norm_weight_first": (False, True),
    "norm_eps": (0.1, 0.5, 1e-5),
    "norm_eps_first": (False, True),
}
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

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
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
        Family(
            "router",
            "router",
            router,
            {
                "logits": ("wide", "wide linear"),
                "key": ("s + b", "b + s"),
                "scoring": ("sigmoid",),
                "pick": ("topk",),
                "renorm": ("yes", "plain", "no"),
                "renorm_eps": (1e-20, 0.25),
                "scale": (1.0, 2.446),
                "weights_dtype": ((), (BF16,)),
                "latent": (False, True),
                "groups": (0, 0, 1),
            },
            ranks=False,
        ),
    )
}

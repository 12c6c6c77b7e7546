"""Experts spelled out, the tail behind an opaque op, and a layer's attention side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from k3fuse.patterns.models.mx import mxfp4_dequantise, mxfp8_round
from parts import (
    BF16,
    FP32,
    HARMLESS,
    INNER,
    LINEARS,
    NORM,
    TOP,
    E,
    Family,
    H,
    Inputs,
    K,
    Knobs,
    L,
    M,
    add,
    between,
    linear,
    reduce,
    rms_norm,
)


def situ(gate: Tensor, up: Tensor, knobs: Knobs, prefix: str = "") -> Tensor:
    """SiTU in FP32; knobs change a beta or a factor."""
    beta = knobs.get(f"{prefix}beta", knobs.get("beta", 1.0))
    wide = knobs.get(f"{prefix}linear_beta", knobs.get("linear_beta", 1.5))
    g, u = gate.float(), up.float()
    squashed = torch.tanh(g / beta) if not knobs.get(f"{prefix}no_inner") else torch.tanh(g)
    gated = beta * squashed * torch.sigmoid(g)
    if knobs.get(f"{prefix}gate_up_sigmoid"):
        gated = beta * squashed * torch.sigmoid(u)
    return gated * (wide * torch.tanh(u / wide))


def activation(gate: Tensor, up: Tensor, knobs: Knobs, prefix: str = "") -> Tensor:
    """SiTU (FP32 result) or a SiLU pair (narrow)."""
    how = knobs.get(f"{prefix}activation", knobs["activation"])
    if knobs.get(f"{prefix}swap_gate_up"):
        gate, up = up, gate
    return {
        "situ": lambda: situ(gate, up, knobs, prefix),
        "silu": lambda: F.silu(gate) * up,
        "gelu": lambda: F.gelu(gate) * up,
        "silu + 1": lambda: F.silu(gate) * (up + 1),
    }[how]()


def routed_mx(hidden: Tensor, weights: Tensor, ids: Tensor, knobs: Knobs, inp: Inputs) -> Tensor:
    """MXFP4 experts; L and INNER are one group of 32 each."""

    def drawn(name: str, low: int, high: int, *shape: int) -> Tensor:
        return inp.raw(name, lambda g: torch.randint(low, high, shape, generator=g).to(torch.uint8))

    w13 = drawn("w13", 0, 256, E, 2 * INNER, L // 2)
    s13 = drawn("s13", 122, 125, E, 2 * INNER, L // 32)
    w2 = drawn("w2", 0, 256, E, L, INNER // 2)
    s2 = drawn("s2", 122, 125, E, L, INNER // 32)
    tokens, slots = ids.shape
    other = (ids + 1) % E if knobs.get("other_expert") else ids
    first, second = mxfp4_dequantise(w13[ids], s13[ids]), mxfp4_dequantise(w2[other], s2[other])
    if knobs.get("transposed_expert"):
        second = second.transpose(-1, -2)
    x = mxfp8_round(hidden) if knobs.get("round_x", True) else hidden.float()
    both = torch.bmm(first.flatten(1, 2), x.unsqueeze(-1)).view(tokens, slots, 2 * INNER)
    gate, up = both[:, :, :INNER], both[:, :, INNER:]
    if knobs.get("interleaved"):
        gate, up = both[:, :, ::2], both[:, :, 1::2]
    inner = activation(gate, up, knobs)
    inner = mxfp8_round(inner) if knobs.get("round_inner", True) else inner
    rows = torch.bmm(second.flatten(0, 1), inner.view(-1, INNER, 1)).view(tokens, slots, -1)
    if knobs.get("round_rows", True):
        rows = rows.to(BF16)
    return summed(rows, weights, knobs)


def summed(rows: Tensor, weights: Tensor, knobs: Knobs) -> Tensor:
    """FP32 weighted sum over the slots."""
    how = knobs.get("combine", "weighted")
    w = weights.float().unsqueeze(-1)
    return {
        "weighted": lambda: (rows.float() * w).sum(1),
        "mean": lambda: (rows.float() * w).mean(1),
        "unweighted": lambda: rows.float().sum(1),
        "weights squared": lambda: (rows.float() * w * w).sum(1),
        "first slots": lambda: (rows.float() * w)[:, : TOP - 1].sum(1),
        "flipped weights": lambda: (rows.float() * w.flip(1)).sum(1),
        "scaled": lambda: (rows.float() * w).sum(1) * 2.0,
    }[how]().to(BF16)


def routed_silu(hidden: Tensor, weights: Tensor, ids: Tensor, knobs: Knobs, inp: Inputs) -> Tensor:
    """Unquantised experts in one of three spellings."""

    def drawn(name: str, *shape: int) -> Tensor:
        scale = shape[-1] ** -0.5
        return inp.raw(name, lambda g: (torch.randn(shape, generator=g) * scale).to(inp.dtype))

    w13, w2 = drawn("w13", E, 2 * INNER, L), drawn("w2", E, L, INNER)
    tokens, slots = ids.shape
    how = knobs["experts"]
    if how == "batched":
        flat = ids.reshape(-1)
        rows = hidden.unsqueeze(1).expand(tokens, slots, L).reshape(tokens * slots, -1)
        if knobs.get("repeat_tokens"):
            rows = hidden.repeat(slots, 1)
        both = torch.bmm(w13[flat], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = both.chunk(2, -1)
        out = torch.bmm(w2[flat], activation(gate, up, knobs).unsqueeze(-1)).squeeze(-1)
        weighted = out * weights.to(out.dtype).reshape(-1).unsqueeze(-1)
        return weighted.view(tokens, slots, -1).sum(dim=knobs.get("slot_axis", 1)).to(hidden.dtype)
    gate, up = torch.einsum("tkil,tl->tki", w13[ids], hidden).chunk(2, -1)
    rows = torch.einsum("tkli,tki->tkl", w2[ids], activation(gate, up, knobs))
    return (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1).to(hidden.dtype)


def shared_expert(x: Tensor, knobs: Knobs, inp: Inputs) -> Tensor:
    """Merged or separate gate and up, activation, down."""
    s = H if knobs.get("square_shared") else INNER
    spelled = knobs.get("shared_linear", "linear")
    bias = lambda n: inp.vector(f"shared_bias{n}", n) if knobs.get("shared_bias") else None  # noqa: E731
    if knobs["merged"]:
        z = linear(x, inp.weight("gate_up", 2 * s, H), spelled, bias(2 * s))
        gate, up = z[:, :s], z[:, s:]
        if knobs.get("shared_shift"):
            gate, up = z[:, 1 : s + 1], z[:, s - 1 : 2 * s - 1]
        if knobs.get("shared_tokens"):
            flat = z.reshape(2 * s, M)
            gate, up = flat[:s].reshape(M, s), flat[s:].reshape(M, s)
    else:
        gate = linear(x, inp.weight("gate", s, H), spelled, bias(s))
        other = x.roll(1, 0) if knobs.get("shared_rows") else x
        up = linear(other, inp.weight("up", s, H), spelled)
    inner = activation(gate, up, knobs, "shared_").to(x.dtype)
    inp.kept["row"] = inner
    return linear(inner, inp.weight("down", H, s), knobs.get("down_linear", "linear"))


def routing(x: Tensor, inp: Inputs) -> tuple[Tensor, Tensor]:
    logits = x.float() @ inp.weight("gate_w", E, H).float().t()
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + inp.raw("bias", lambda g: torch.rand(E, generator=g)), TOP)[1]
    chosen = scores.gather(-1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + 1e-20)).to(BF16), ids


def tail(routed: Tensor, shared: Tensor | None, knobs: Knobs, inp: Inputs) -> Tensor:
    """Latent reduction, norm, up-projection, shared add."""
    latent = reduce(routed, knobs, "routed")
    if knobs.get("norm", True):
        latent = rms_norm(latent, inp.vector("latent_norm", L), knobs)
    latent = between(latent, knobs["between"])
    bias = inp.vector("up_bias", H) if knobs.get("up_bias") else None
    out = linear(latent, inp.weight("up_proj", H, L), knobs["linear"], bias)
    if knobs.get("reduce_late"):
        out = reduce(out, knobs)
    if shared is None:
        return out
    return add(out, reduce(shared, knobs, "shared"), knobs).to(knobs["dtype"])


def experts(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """The whole MoE block."""
    x = inp.rows("x", M, H)
    weights, ids = routing(x, inp)
    if knobs["given_routing"] or knobs["experts"] != "mx":
        weights = inp.rows("weights", M, TOP).abs()
        ids = inp.raw("ids", lambda g: torch.rand(M, E, generator=g).argsort(1)[:, :TOP].clone())
    hidden = linear(x, inp.weight("latent", L, H))
    body = routed_mx if knobs["experts"] == "mx" else routed_silu
    knobs = {
        **knobs,
        "activation": "situ" if knobs["experts"] == "mx" else "silu",
        **knobs.get("force", {}),
    }
    routed = body(*read_by_experts(hidden, weights, ids, knobs), knobs, inp)
    shared = shared_expert(read_by_shared(x, knobs, inp), knobs, inp) if knobs["shared"] else None
    too = [routed] if knobs.get("routed too") else []
    too += [inp.kept["row"]] if knobs.get("row too") else []
    return (tail(routed, shared, knobs, inp), *too)


def read_by_experts(
    hidden: Tensor, weights: Tensor, ids: Tensor, knobs: Knobs
) -> tuple[Tensor, Tensor, Tensor]:
    """What the experts read: the router's results, or something made of them."""
    how = knobs.get("handed", "as made")
    return {
        "as made": lambda: (hidden, weights, ids),
        "other latent": lambda: (hidden.roll(1, 0), weights, ids),
        "scaled latent": lambda: (hidden * 2, weights, ids),
        "other weights": lambda: (hidden, weights.flip(1), ids),
        "other ids": lambda: (hidden, weights, (ids + 1) % E),
    }[how]()


def read_by_shared(x: Tensor, knobs: Knobs, inp: Inputs) -> Tensor:
    """What the shared expert reads: the router's row, or another."""
    how = knobs.get("shared_of", "the row")
    return {
        "the row": lambda: x,
        "another": lambda: inp.rows("shared_x", M, H),
        "rolled": lambda: x.roll(1, 0),
        "scaled": lambda: x * 1.5,
    }[how]()


def opaque(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """vLLM's experts op between router front and tail."""
    x = inp.rows("x", M, H)
    logits = {
        "wide": lambda: x.float() @ inp.weight("gate", E, H).float().t(),
        "narrow": lambda: F.linear(x, inp.weight("gate", E, H)),
        "rounded": lambda: (x.float() @ inp.weight("gate", E, H).float().t()).to(BF16).float(),
        "scaled": lambda: 2 * (x.float() @ inp.weight("gate", E, H).float().t()),
    }[knobs.get("logits", "wide")]()
    hidden = linear(x, inp.weight("latent", L, H), knobs["linear"])
    op: Any = torch.ops.vllm.moe_forward_shared.default
    shared, routed = op(hidden, logits, x, None, "layer", 0)
    if knobs.get("swap_results"):
        shared, routed = F.pad(routed, (0, H - L)), shared[:, :L].contiguous()
    if knobs.get("other_shared"):
        shared = inp.rows("other_shared", M, H)
    return tail(routed, shared, knobs, inp), logits.mean(0)[:0]


def attention(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """Row -> projections -> a toy core -> o-proj -> add -> norm."""
    before = inp.rows("before", M, H)
    row = rms_norm(before + inp.rows("delta", M, H, scale=0.5), inp.vector("norm_in", H), knobs)
    parts = []
    for i in range(knobs["parts"]):
        x = between(row, knobs["between"]) if i == 0 else row
        if i == 1 and knobs.get("other_row"):
            x = x.roll(1, 0)
        if i == 1 and knobs.get("scaled_row"):
            x = x * 2
        if i == 1 and knobs.get("row_recast"):
            x = row.float().to(FP32 if knobs["row_recast"] == "wide" else row.dtype).to(row.dtype)
        spelled = knobs.get("odd", knobs["linear"]) if i == 1 else knobs["linear"]
        bias = inp.vector("qkv_bias", K) if knobs.get("qkv_bias") and i == 0 else None
        w = inp.weight(f"w{i}", H if spelled in ("untransposed",) else K, H)
        z = linear(x, w, spelled, bias)
        parts.append(z[:, :K].to(row.dtype))
    core = torch.tanh(sum(parts[1:], parts[0]) * parts[-1])
    y = linear(core, inp.weight("o", H, K), knobs["linear"])
    total = add(reduce(y, knobs), before, knobs).to(knobs["dtype"])
    extra = [parts[0]] if knobs.get("part too") else []
    return (rms_norm(total, inp.vector("norm_out", H), knobs), total, *extra)


_PLAIN_NORM = {k: v for k, v in NORM.items() if k != "norm_how"}
MOE = (
    Family(
        "experts",
        "experts",
        experts,
        {
            "experts": ("mx", "batched", "einsum"),
            "shared": (True, True, False),
            "merged": (False, True),
            "linear": LINEARS,
            "between": HARMLESS,
            "sum": ("a + b", "b + a"),
            "norm_how": ("wide", "rounded first"),
            "given_routing": (False, True),
            **_PLAIN_NORM,
        },
    ),
    Family(
        "opaque",
        "experts",
        opaque,
        {
            "linear": LINEARS,
            "between": HARMLESS,
            "sum": ("a + b", "b + a"),
            "norm_how": ("rounded first",),
            **_PLAIN_NORM,
        },
    ),
    Family(
        "attention",
        "attention_projection",
        attention,
        {
            "parts": (1, 2, 3),
            "linear": LINEARS,
            "between": HARMLESS,
            "sum": ("a + b", "b + a"),
            "norm_how": ("wide", "rounded first"),
            **_PLAIN_NORM,
        },
    ),
)

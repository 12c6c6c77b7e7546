"""Inputs, and the steps that families share, each in its spellings and with its knobs.

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
        self.kept: dict[str, Tensor] = {}  # values that a later step may read

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

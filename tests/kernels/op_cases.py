"""Random arguments for every fused op, at any size; its forms are in op_forms.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from k3fuse.kernels.common.microscaling import quantize_mxfp8
from k3fuse.kernels.common.numerics import gated_row
from k3fuse.kernels.experts.layouts import shuffled


@dataclass
class Case:
    """One call: `op(*args, **kwargs)`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)  # what a test worked out for it

    def __call__(self) -> list[Tensor]:
        result = self.op(*self.args, **self.kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    def tensors(self) -> list[Tensor]:
        """Of the arguments, then of the keyword arguments."""
        flat: list[Tensor] = []
        for arg in (*self.args, *self.kwargs.values()):
            flat.extend(a for a in (arg if isinstance(arg, list) else [arg]) if _is_tensor(a))
        return flat


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def replaced(case: Case, index: int, value: Any) -> Case:
    args = list(case.args)
    args[index] = value
    return Case(case.op, tuple(args), case.kwargs)


def faked(case: Case) -> Case:
    """The same call on fake tensors of one mode."""
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        if isinstance(value, list):
            return [fake(v) for v in value]
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    def op(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return case.op(*args, **kwargs)

    kwargs = {name: fake(value) for name, value in case.kwargs.items()}
    return Case(op, tuple(fake(a) for a in case.args), kwargs)


class Draw:
    """Seeded tensors. Rows are strided (a slice of a wider buffer) when `strided`."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16, strided: bool = False):
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.strided = strided

    def pick(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.rng))

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=self.rng).to(dtype or self.dtype)
        return drawn

    def rows(self, m: int, n: int, dtype: torch.dtype | None = None) -> Tensor:
        if not self.strided:
            return self.randn(m, n, dtype=dtype)
        return self.randn(m, n + 8, dtype=dtype)[:, 4 : 4 + n]

    def weight(self, n: int, k: int) -> Tensor:
        drawn: Tensor = torch.randn(n, k, generator=self.rng) * k**-0.5
        return drawn.to(self.dtype)

    def mxfp4(self, e: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        """Packed codes [e, n, k/2] and scales [e, n, k/32] of weights of about k**-0.5."""
        codes = torch.randint(0, 256, (e, n, k // 2), generator=self.rng, dtype=torch.uint8)
        base = round(127 - 1.5 - math.log2(k) / 2)  # the codes' values have an RMS of about 2.9
        scales = torch.randint(base, base + 2, (e, n, k // 32), generator=self.rng)
        return codes, scales.to(torch.uint8)

    def vector(self, n: int) -> Tensor:
        return (1 + 0.1 * torch.randn(n, generator=self.rng)).to(self.dtype)


LOCAL = {"target": "reference", "group": "", "composition": ""}
K3 = torch.ops.k3fuse


def attention_projection(draw: Draw, m: int, k: int, *ns: int, **kw: Any) -> Case:
    args = (draw.rows(m, k), [draw.weight(n, k) for n in ns])
    return Case(K3.attention_projection.default, args, {**LOCAL, **kw})


def row_sharded(draw: Draw, m: int, k: int, *ns: int) -> Case:
    """The first rows of each weight, at least one of the first, are those that ranks split."""
    split = [draw.pick(int(i == 0), n) for i, n in enumerate(ns)]
    return attention_projection(draw, m, k, *ns, row_sharded=split)


def _blocks(draw: Draw, m: int, h: int, num_blocks: int, bank: bool) -> list[Tensor]:
    if bank:
        return [draw.randn(m + draw.pick(0, 2), num_blocks + draw.pick(0, 2), h)]
    return [draw.rows(m, h) for _ in range(num_blocks)]


def attn_res(
    draw: Draw, m: int, h: int, num_blocks: int, *, delta: bool, bank: bool, norm: bool, mix: bool
) -> Case:
    args = (
        draw.rows(m, h),
        draw.rows(m, h) if delta else None,
        _blocks(draw, m, h, num_blocks, bank),
        num_blocks,
        draw.vector(h),
        draw.weight(1, h)[0],
        draw.vector(h) if norm else None,
        1e-5,
        1e-6,
        mix,
    )
    return Case(K3.attn_res.default, args, {"target": "reference", "composition": ""})


def output_attn_res(
    draw: Draw, m: int, k: int, h: int, num_blocks: int, *, prefix: bool, bank: bool, norm: bool
) -> Case:
    args = (
        draw.rows(m, k),
        draw.weight(h, k),
        draw.rows(m, h) if prefix else None,
        _blocks(draw, m, h, num_blocks, bank),
        num_blocks,
        draw.vector(h),
        draw.weight(1, h)[0],
        draw.vector(h) if norm else None,
        1e-5,
        1e-6,
        False,
    )
    return Case(K3.output_projection_attn_res.default, args, dict(LOCAL))


def output_add_rms_norm(draw: Draw, m: int, k: int, h: int, rounding: str) -> Case:
    args = (
        draw.rows(m, k),
        draw.weight(h, k),
        draw.rows(m, h),
        draw.vector(h),
        1e-5,
        rounding,
    )
    return Case(K3.output_projection_add_rms_norm.default, args, dict(LOCAL))


def router_front(draw: Draw, m: int, k: int, e: int, latent: int) -> Case:
    args = (draw.rows(m, k), draw.weight(e, k), draw.weight(latent, k) if latent else None)
    return Case(K3.router_front.default, args, dict(LOCAL))


def router(
    draw: Draw,
    m: int,
    k: int,
    e: int,
    latent: int,
    top_k: int,
    *,
    bias: bool = True,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    weights_dtype: torch.dtype = torch.float32,
    quantize: bool = False,
    plan: bool = False,
    shared: int = 0,
    merged: bool = True,
) -> Case:
    """shared: columns of the shared expert's hidden row, 0 for none."""
    args: tuple[Any, ...] = (
        draw.rows(m, k),
        draw.weight(e, k),
        0.1 * draw.randn(e, dtype=torch.float32) if bias else None,
        draw.weight(latent, k) if latent else None,
        top_k,
        scoring,
        renormalize,
        1.5,
        1e-20,
        weights_dtype,
    )
    if shared:
        rows = [2 * shared] if merged else [shared, shared]
        args = (*args, [draw.weight(n, k) for n in rows], "situ", 4.0, 25.0)
    return Case(K3.router.default, args, {**LOCAL, "quantize": quantize, "plan": plan})


def experts(
    draw: Draw,
    m: int,
    latent: int,
    inner: int,
    e: int,
    top_k: int,
    *,
    hidden: int = 0,
    shared: int = 0,
    merged: bool = True,
    mxfp4: bool = False,
    activation: str = "situ",
    rounding: str = "",
    made: bool = False,
) -> Case:
    """With `hidden`, the latent form (norm and up-projection to it); without, latent is hidden.

    made: the shared expert's hidden row and the MXFP8 rows are given, as a router makes them.
    """
    s13 = s2 = None
    if mxfp4:
        w13, s13 = draw.mxfp4(e, 2 * inner, latent)
        w2, s2 = draw.mxfp4(e, latent, inner)
    else:
        w13 = torch.stack([draw.weight(2 * inner, latent) for _ in range(e)])
        w2 = torch.stack([draw.weight(latent, inner) for _ in range(e)])
    h = hidden or latent
    ids = torch.rand(m, e, generator=draw.rng).argsort(1)[:, :top_k].contiguous()
    gate_up = [draw.weight(2 * shared, h)] if merged else [draw.weight(shared, h) for _ in "gu"]
    args = (
        draw.rows(m, latent),
        0.5 + 0.5 * torch.rand(m, top_k, generator=draw.rng),
        ids,
        w13,
        s13,
        w2,
        s2,
        draw.rows(m, h) if hidden and shared else None,
        gate_up if shared else [],
        draw.weight(h, shared) if shared else None,
        draw.vector(latent) if hidden else None,
        draw.weight(h, latent) if hidden else None,
        activation,
        4.0,
        25.0,
        1e-5,
        rounding,
    )
    case = Case(K3.experts.default, args, dict(LOCAL))
    return handed_over(case) if made else case


def handed_over(case: Case) -> Case:
    """The same call of `experts`, with what a router makes of its rows."""
    args = list(case.args)
    row = gated_row(args[7], args[8], *args[12:15])
    values, scales = quantize_mxfp8(args[0])
    args[7], args[8] = None, []
    return Case(case.op, (*args, row, values.view(torch.uint8), scales), case.kwargs)


def mixed(case: Case, draw: Draw, num_blocks: int, *, bank: bool, norm: bool, mix: bool) -> Case:
    """The same call of `experts` with the AttnRes that reads its delta."""
    m, h = (
        case.args[0].shape[0],
        (case.args[0] if case.args[11] is None else case.args[11].t()).shape[1],
    )
    made = (*case.args[17:], None, None, None)[:3]
    behind = (
        draw.rows(m, h), _blocks(draw, m, h, num_blocks, bank), num_blocks, draw.vector(h),
        draw.weight(1, h)[0], draw.vector(h) if norm else None, 1e-5, 1e-6, mix,
    )  # fmt: skip
    return Case(case.op, (*case.args[:17], *made, *behind), case.kwargs)


def experts_partials(
    draw: Draw,
    m: int,
    latent: int,
    width: int,
    e: int,
    top_k: int,
    *,
    h: int,
    shared: int,
    layout: str = "rows",
    bias: bool = True,
    merged: bool = True,
    weights_dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Experts from logits to partials, in one of the two orders of weights."""
    weights = (*draw.mxfp4(e, 2 * width, latent), *draw.mxfp4(e, latent, width))
    gate_up = [draw.weight(2 * shared, h)] if merged else [draw.weight(shared, h) for _ in "gu"]
    args = (
        draw.rows(m, latent),
        draw.rows(m, e, torch.float32),
        0.1 * draw.randn(e, dtype=torch.float32) if bias else None,
        draw.rows(m, h),
        *(weights if layout == "rows" else shuffled(*weights)),
        gate_up,
        draw.weight(h, shared),
        top_k,
        "sigmoid",
        True,
        1.0,
        1e-20,
        weights_dtype,
        "situ",
        4.0,
        25.0,
        layout,
        width,
        "",
    )
    return Case(K3.experts_partials.default, args, {"target": "reference", "composition": ""})


def tail(draw: Draw, m: int, latent: int, h: int) -> Case:
    args = (
        draw.rows(m, latent),
        draw.rows(m, h),
        draw.vector(latent),
        draw.weight(h, latent),
        1e-5,
    )
    return Case(K3.tail.default, args, dict(LOCAL))


def prefetching(draw: Draw, case: Case, split: bool = True) -> Case:
    """The same call with weights that later ops read; some of their rows split over the ranks."""
    weights = [draw.weight(16 * draw.pick(1, 2), draw.pick(1, 9)) for _ in range(draw.pick(1, 3))]
    more: dict[str, Any] = {"prefetch": weights}
    if split:
        more["prefetch_split"] = [16 * draw.pick(0, 1) for _ in weights]
    return Case(case.op, case.args, {**case.kwargs, **more})

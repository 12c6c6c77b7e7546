"""Gated activations: SiTU and SiLU pairs, decomposed and as one op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.nn import functional as F

from build import BF16, LEVELS, Hand, found, rows, stock_ops, trace
from k3fuse.rewriter.recognise.activation import GatedActivation

M, I = 4, 8  # noqa: E741 - the width's usual name
BETAS = ((4.0, 25.0), (1.0, 1.0), (2.5, 7.0))


def wide(g: Tensor, u: Tensor, beta: float, linear: float) -> Tensor:
    f, v = g.float(), u.float()
    gated = beta * torch.tanh(f / beta) * torch.sigmoid(f)
    return (gated * (linear * torch.tanh(v / linear))).to(g.dtype)


def swapped(g: Tensor, u: Tensor, beta: float, linear: float) -> Tensor:
    f, v = g.float(), u.float()
    gated = torch.sigmoid(f) * (torch.tanh(f / beta) * beta)
    return ((torch.tanh(v / linear) * linear) * gated).to(g.dtype)


def left_to_right(g: Tensor, u: Tensor, beta: float, linear: float) -> Tensor:
    f, v = g.float(), u.float()
    out = beta * torch.tanh(f / beta) * torch.sigmoid(f) * linear * torch.tanh(v / linear)
    return out.to(g.dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("form", [wide, swapped, left_to_right])
def test_situ(form: Callable[..., Tensor], betas: tuple[float, float], level: str) -> None:
    module = trace(lambda g, u: form(g, u, *betas), rows(M, I), rows(M, I, seed=1), level=level)
    gate, up = [n for n in module.graph.nodes if n.op == "placeholder"]
    # The FP32 product before the rounding is a SiTU of FP32 rows as well.
    (act,) = [a for a in found(module, GatedActivation) if a.out.meta["val"].dtype == BF16]
    assert act.kind == "situ"
    assert (act.gate, act.up, act.merged) == (gate, up, None)
    assert (act.beta, act.linear_beta) == betas
    assert act.out is module.graph.output_node().args[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("merged", [False, True])
def test_silu(merged: bool, level: str) -> None:
    def f(g: Tensor, u: Tensor) -> Tensor:
        return u * F.silu(g) if merged else F.silu(g) * u

    module = trace(f, rows(M, I), rows(M, I, seed=1), level=level)
    gate, up = [n for n in module.graph.nodes if n.op == "placeholder"]
    acts = [
        a for a in found(module, GatedActivation) if a.out is module.graph.output_node().args[0]
    ]
    assert [(a.kind, a.gate, a.up) for a in acts] == [("silu", gate, up)]


DEFECTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda g, u: wide(g, u, 4.0, 25.0),
    "tanh of another value": lambda g, u: (
        4.0 * torch.tanh(u.float() / 4.0) * torch.sigmoid(g.float())
        * (25.0 * torch.tanh(u.float() / 25.0))
    ).to(BF16),
    "no upper tanh": lambda g, u: (
        4.0 * torch.tanh(g.float() / 4.0) * torch.sigmoid(g.float()) * u.float()
    ).to(BF16),
    "another factor": lambda g, u: (
        3.0 * torch.tanh(g.float() / 4.0) * torch.sigmoid(g.float())
        * (25.0 * torch.tanh(u.float() / 25.0))
    ).to(BF16),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("defect", DEFECTS)
def test_another_product_is_no_situ(defect: str, level: str) -> None:
    module = trace(DEFECTS[defect], rows(M, I), rows(M, I, seed=1), level=level)
    situ = [a for a in found(module, GatedActivation) if a.kind == "situ"]
    assert len(situ) == (2 if defect == "none" else 0)


@pytest.mark.parametrize("change", ["none", "gelu", "sum"])
def test_another_pair_is_no_silu(change: str) -> None:
    def f(g: Tensor, u: Tensor) -> Tensor:
        if change == "gelu":
            return F.gelu(g) * u
        return F.silu(g) + u if change == "sum" else F.silu(g) * u

    module = trace(f, rows(M, I), rows(M, I, seed=1))
    assert len(found(module, GatedActivation)) == (1 if change == "none" else 0)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["situ", "silu"])
def test_the_custom_ops(kind: str, version: int) -> None:
    stock_ops()
    h = Hand()
    x, out = h.input("x", M, 2 * I), h.input("out", M, I)
    op = getattr(torch.ops._C, f"{kind}_and_mul").default
    written = op._schema.arguments[0].name
    given = {"input": x}
    if kind == "situ":
        given |= {"beta": 4.0, "linear_beta": 25.0}  # type: ignore[dict-item]
    if version == 1:
        call = h.graph.call_function(auto_functionalized, (op,), {written: out, **given})
    else:
        given |= {f"_{written}_base_index": 0, "_all_bases": [out]}  # type: ignore[dict-item]
        call = h.graph.call_function(auto_functionalized_v2, (op,), given)
    call.meta["val"] = (None, out.meta["val"])
    result = h.item(call, 1)
    (act,) = found(h.view(result), GatedActivation)
    assert (act.kind, act.merged, act.gate, act.up, act.out) == (kind, x, None, None, result)
    assert (act.beta, act.linear_beta) == ((4.0, 25.0) if kind == "situ" else (0.0, 0.0))

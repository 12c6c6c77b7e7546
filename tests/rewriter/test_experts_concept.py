"""Routed experts: every reference form at both levels, other spellings, and near misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from build import BF16, FP32, LEVELS, compiled_graphs, found, refused, rows, trace
from k3fuse.rewriter.recognise.experts import MX_FORMS, PLAIN_FORMS, RoutedExperts
from k3fuse.rewriter.template import Template
from k3fuse.rewriter.view import shape_of

M, TOP, E, I, L = 3, 2, 4, 32, 64  # noqa: E741 - the width's usual name


def packed(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def chosen(tokens: int = M) -> Tensor:
    return torch.stack([torch.randperm(E)[:TOP] for _ in range(tokens)])


def args(mx: bool, tokens: int = M, weights: torch.dtype = BF16) -> dict[str, Tensor]:
    made = {
        "hidden": rows(tokens, L),
        "weights": rows(tokens, TOP, dtype=weights),
        "ids": chosen(tokens),
    }
    if mx:
        made["w13"] = packed(E, 2 * I, L // 2)
        made["w13_scale"] = packed(E, 2 * I, L // 32, low=120, high=124)
        made["w2"] = packed(E, L, I // 2)
        made["w2_scale"] = packed(E, L, I // 32, low=120, high=124)
    else:
        made["w13"], made["w2"] = rows(E, 2 * I, L), rows(E, L, I)
    return made


def check(read: RoutedExperts, module: Any, given: dict[str, Tensor], names: list[str]) -> None:
    inputs = dict(zip(names, (n for n in module.graph.nodes if n.op == "placeholder"), strict=True))
    for name in names:
        bound = getattr(read, name)
        assert bound is inputs[name], name
        assert shape_of(bound) == tuple(given[name].shape)
    assert read.out is module.graph.output_node().args[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weights", [BF16, FP32])
@pytest.mark.parametrize("form", [*MX_FORMS, *PLAIN_FORMS], ids=lambda f: f.name)
def test_a_form_matches_the_graph_of_its_own_reference(
    form: Template, weights: torch.dtype, level: str
) -> None:
    mx = form in MX_FORMS
    given = args(mx, weights=weights)
    numbers = {"beta": 4.0, "linear_beta": 25.0} if mx else {}
    module = trace(lambda *t: form.fn(*t, **numbers), *given.values(), level=level)
    (read,) = found(module, RoutedExperts)
    check(read, module, given, list(given))
    assert read.form == form.name
    assert (read.activation, read.beta, read.linear_beta) == (
        ("situ", 4.0, 25.0) if mx else ("silu", 0.0, 0.0)
    )


@pytest.mark.parametrize(
    "form", [f for f in PLAIN_FORMS if f.name != "silu_grouped"], ids=lambda f: f.name
)
def test_a_symbolic_token_count(form: Template) -> None:
    given = args(mx=False, tokens=5)
    for name in ("hidden", "weights", "ids"):
        torch._dynamo.mark_dynamic(given[name], 0)
    (module,) = compiled_graphs(form.fn, *given.values())
    (read,) = found(module, RoutedExperts)
    assert not isinstance(shape_of(read.hidden)[0], int)
    assert read.form == form.name


# --- defects ------------------------------------------------------------------------------------


def _einsum(
    hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, *, defect: str
) -> Tensor:
    both = torch.einsum("tkil,tl->tki", w13[ids], hidden)
    gate, up = both.chunk(2, -1)
    if defect == "halves swapped":
        gate, up = up, gate
    inner = F.gelu(gate) * up if defect == "gelu" else F.silu(gate) * up
    out = torch.einsum(
        "tkli,tki->tkl", w2[ids.flip(1)] if defect == "other ids" else w2[ids], inner
    )
    out = out * weights.unsqueeze(-1)
    if defect == "mean":
        return out.mean(1).to(hidden.dtype)
    return out.sum(1).to(hidden.dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("defect", ["none", "halves swapped", "gelu", "other ids", "mean"])
def test_a_defect_is_refused(defect: str, level: str) -> None:
    given = args(mx=False, weights=FP32)
    module = trace(lambda *t: _einsum(*t, defect=defect), *given.values(), level=level)
    assert len(found(module, RoutedExperts)) == (1 if defect == "none" else 0)
    if defect == "none":
        assert refused(module, RoutedExperts) == []
    elif defect != "mean":  # no sum over slots: not even the start of experts
        assert len(refused(module, RoutedExperts)) == 1


@pytest.mark.parametrize("defect", ["none", "high nibble first", "other bias", "unscaled"])
def test_a_defect_of_the_microscaling_is_refused(defect: str) -> None:
    from k3fuse.rewriter.recognise import experts

    def mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
        pair = [codes & 0xF, codes >> 4]
        pair = pair[::-1] if defect == "high nibble first" else pair
        values = experts.e2m1(torch.stack(pair, dim=-1).view(*scale.shape, 32))
        if defect == "unscaled":
            return values.flatten(-2)
        bias = 126.0 if defect == "other bias" else 127.0
        return (values * torch.exp2(scale.float() - bias).unsqueeze(-1)).flatten(-2)

    def f(hidden: Tensor, weights: Tensor, ids: Tensor, *w: Tensor) -> Tensor:
        first, second = mxfp4(w[0][ids], w[1][ids]), mxfp4(w[2][ids], w[3][ids])
        both = torch.einsum("tkil,tl->tki", first, experts.mxfp8(hidden))
        inner = experts.situ_wide_kept(both[..., :I], both[..., I:], beta=4.0, linear_beta=25.0)
        out = torch.einsum("tkli,tki->tkl", second, experts.mxfp8(inner)).to(hidden.dtype)
        return (out.float() * weights.float().unsqueeze(-1)).sum(1).to(hidden.dtype)

    module = trace(f, *args(mx=True).values())
    assert len(found(module, RoutedExperts)) == (1 if defect == "none" else 0)

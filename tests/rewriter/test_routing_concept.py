"""Routing: sigmoid or softmax scores, top-k or stable sort, renormalisation, wrong attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from build import BF16, FP32, LEVELS, Hand, aten, found, refused, rows, trace
from k3fuse.rewriter.recognise.routing import Routing

M, K, E, TOP = 3, 16, 8, 2


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    *,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
    pick: Callable[[Tensor], Any] = lambda key: torch.topk(key, TOP)[1],
    renormalize: bool = True,
    eps: float = 1e-20,
    scale: float = 1.0,
    out: torch.dtype = FP32,
    bias_first: bool = False,
    axis: int = 1,
) -> tuple[Tensor, Tensor]:
    scores = score(F.linear(x.float(), gate.float()))
    key = scores
    if bias is not None:
        key = bias + scores if bias_first else scores + bias
    ids = pick(key)
    weights = scores.gather(axis, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(out), ids


def args(bias: torch.dtype | None = FP32) -> list[Tensor]:
    made = [rows(M, K), rows(E, K)]
    return made if bias is None else [*made, rows(E, dtype=bias)]


def read(level: str = "aot", bias: torch.dtype | None = FP32, **how: Any) -> Any:
    module = trace(lambda *t: route(*t, **how), *args(bias), level=level)
    weights, ids = module.graph.output_node().args[0]
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    routings = found(module, Routing)
    codes = refused(module, Routing)
    assert len(routings) + len(codes) <= 1
    if codes:
        return codes[0]
    if not routings:
        return None
    (routing,) = routings
    assert routing.ids is ids
    assert (routing.linear.x, routing.linear.weight) == (inputs[0], inputs[1])
    assert routing.bias is (inputs[2] if bias is not None else None)
    assert (routing.weights is weights) is True
    assert set(routing.nodes) <= {n for n in module.graph.nodes if n.op == "call_function"}
    return routing


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias_first", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.446])
def test_what_is_read(scale: float, renormalize: bool, bias_first: bool, level: str) -> None:
    r = read(level, scale=scale, renormalize=renormalize, bias_first=bias_first)
    assert (r.top_k, r.scoring, r.renormalize, r.scale) == (TOP, "sigmoid", renormalize, scale)
    assert r.renorm_eps == (1e-20 if renormalize else 0.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-6])
def test_the_epsilon_is_read(eps: float, level: str) -> None:
    assert read(level, eps=eps).renorm_eps == eps


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("out", [FP32, BF16])
def test_the_rounding_of_the_weights_is_read(out: torch.dtype, level: str) -> None:
    assert read(level, out=out).weights.meta["val"].dtype == out


@pytest.mark.parametrize("level", LEVELS)
def test_no_bias(level: str) -> None:
    assert read(level, bias=None).bias is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_narrow_bias_is_read_as_stored(level: str) -> None:
    module = trace(lambda x, g, b: route(x, g, b.float()), *args(BF16), level=level)
    (routing,) = found(module, Routing)
    assert routing.bias.op == "placeholder"
    assert routing.bias.meta["val"].dtype == BF16


def sorted_ids(key: Tensor, stable: bool = True, descending: bool = True) -> Tensor:
    return torch.sort(key, dim=-1, descending=descending, stable=stable)[1][:, :TOP]


@pytest.mark.parametrize("level", LEVELS)
def test_a_stable_sort_is_a_selection(level: str) -> None:
    assert read(level, pick=sorted_ids).top_k == TOP
    assert read(level, pick=lambda k: sorted_ids(k, descending=False)) == "ATTR_MISMATCH"
    assert read(level, pick=lambda k: sorted_ids(k, stable=False)) == "ATTR_MISMATCH"
    last = read(
        level, pick=lambda k: torch.sort(k, dim=-1, descending=True, stable=True)[1][:, -TOP:]
    )
    assert last is None or last == "ANCHOR_ABSENT"


PICKS: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "as it should be": (lambda k: torch.topk(k, TOP)[1], None),
    "spelled out": (lambda k: torch.topk(k, TOP, dim=-1, largest=True, sorted=True)[1], None),
    "positive axis": (lambda k: torch.topk(k, TOP, dim=1)[1], None),
    "in any order": (lambda k: torch.topk(k, TOP, sorted=False)[1], None),
    "the smallest": (lambda k: torch.topk(k, TOP, largest=False)[1], "ATTR_MISMATCH"),
    "over the tokens": (lambda k: torch.topk(k, TOP, dim=0)[1], "ATTR_MISMATCH"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pick", PICKS)
def test_flags_of_top_k(pick: str, level: str) -> None:
    function, code = PICKS[pick]
    got = read(level, pick=function)
    assert got == code if code else got.top_k == TOP


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("axis", "code"), [(1, None), (-1, None), (0, "ATTR_MISMATCH")])
def test_the_axis_of_the_gather(axis: int, code: str | None, level: str) -> None:
    got = read(level, axis=axis)
    assert got == code if code else got.top_k == TOP


@pytest.mark.parametrize(("axis", "code"), [(-1, None), (1, None), (0, "ATTR_MISMATCH")])
def test_the_axis_of_the_softmax(axis: int, code: str | None) -> None:
    got = read(score=lambda logits: torch.softmax(logits, axis))
    assert got == code if code else got.scoring == "softmax"


@pytest.mark.parametrize("change", ["scaled logits", "tanh", "none"])
def test_other_scores_are_none(change: str) -> None:
    scores = {
        "scaled logits": lambda logits: torch.sigmoid(2.0 * logits),
        "tanh": torch.tanh,
        "none": torch.sigmoid,
    }
    got = read(score=scores[change])
    assert (got is None) == (change != "none")


def test_weights_taken_from_the_biased_scores_are_refused() -> None:
    def biased(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.sigmoid(F.linear(x.float(), gate.float())) + bias
        values, ids = torch.topk(key, TOP)
        return values, ids

    assert refused(trace(biased, *args()), Routing) == ["OPERAND_ORDER"]
    unbiased = trace(lambda x, g: biased(x, g, torch.zeros(())), *args(None))
    assert "OPERAND_ORDER" not in refused(unbiased, Routing)


def test_weights_nobody_gathers_are_refused() -> None:
    def ids_only(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        return torch.topk(torch.sigmoid(F.linear(x.float(), gate.float())) + bias, TOP)[1]

    assert refused(trace(ids_only, *args()), Routing) == ["ANCHOR_ABSENT"]


@pytest.mark.parametrize(("mode", "renormalize"), [(None, True), ("floor", False)])
def test_a_rounded_division_renormalises_nothing(mode: str | None, renormalize: bool) -> None:
    def f(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), gate.float()))
        ids = torch.topk(scores + bias, TOP)[1]
        weights = scores.gather(1, ids)
        return torch.div(weights, weights.sum(-1, keepdim=True), rounding_mode=mode), ids

    (routing,) = found(trace(f, *args()), Routing)
    assert routing.renormalize is renormalize
    assert (routing.weights.target is aten.gather.default) is (not renormalize)


def test_the_divisor_must_be_the_sum_of_these_weights() -> None:
    def f(own: bool, x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), gate.float()))
        ids = torch.topk(scores + bias, TOP)[1]
        weights = scores.gather(1, ids)
        total = (weights if own else scores).sum(-1, keepdim=True)
        return weights / total, ids

    for own in (True, False):
        (routing,) = found(trace(lambda *t, o=own: f(o, *t), *args()), Routing)
        assert routing.renormalize is own


def test_bf16_logits_are_read_as_what_they_are() -> None:
    def f(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x, gate).float())
        ids = torch.topk(scores + bias, TOP)[1]
        return scores.gather(1, ids), ids

    (routing,) = found(trace(f, *args()), Routing)
    assert routing.linear.out_dtype == BF16
    assert read().linear.out_dtype == FP32


def test_logits_of_one_product_with_an_fp32_result() -> None:
    h = Hand()
    x, w, bias = h.input("x", M, K), h.input("w", E, K), h.input("bias", E, dtype=FP32)
    logits = h.call(aten.mm.dtype, x, h.call(aten.t.default, w), FP32)
    scores = h.call(aten.sigmoid.default, logits)
    top = h.call(aten.topk.default, h.call(aten.add.Tensor, scores, bias), TOP)
    ids = h.item(top, 1)
    weights = h.call(aten.gather.default, scores, 1, ids)
    (routing,) = found(h.view(weights, ids), Routing)
    assert (routing.linear.x, routing.linear.weight, routing.weights) == (x, w, weights)


# --- expert groups ------------------------------------------------------------------------------


def grouped(groups: int, keep: int) -> Callable[[Tensor], Tensor]:
    def pick(key: Tensor) -> Tensor:
        split = key.view(-1, groups, E // groups)
        best = split.topk(2, dim=-1)[0].sum(dim=-1)
        chosen = torch.topk(best, k=keep, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best)
        mask.scatter_(1, chosen, 1)
        kept = mask.unsqueeze(-1).expand(-1, groups, E // groups).reshape(-1, E)
        return torch.topk(key.masked_fill(~kept.bool(), float("-inf")), TOP, dim=-1)[1]

    return pick


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("groups", "keep", "code"), [(1, 1, None), (2, 1, "ATTR_MISMATCH")])
def test_a_mask_of_one_group_masks_nothing(
    groups: int, keep: int, code: str | None, level: str
) -> None:
    module = trace(lambda *t: route(*t, pick=grouped(groups, keep)), *args(), level=level)
    if code is None:
        (routing,) = found(module, Routing)
        assert any(n.target is aten.masked_fill.Scalar or "where" in n.name for n in routing.nodes)
        assert refused(module, Routing) == []
    else:
        assert found(module, Routing) == []
        assert refused(module, Routing) == [code]

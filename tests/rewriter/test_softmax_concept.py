"""Softmax scores of a router, written out: what is one, and each step that makes it another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from build import BF16, FP32, LEVELS, Hand, aten, found, prims, refused, rows, run, trace
from k3fuse.rewriter.recognise.routing import Routing
from tolerances import tolerance

M, K, E, TOP = 3, 32, 16, 2


def written_out(x: Tensor) -> Tensor:
    made = torch.exp(x - x.amax(-1, keepdim=True))
    return made / made.sum(-1, keepdim=True)


def by_max(x: Tensor) -> Tensor:
    made = (x - x.max(dim=1, keepdim=True)[0].detach()).exp()
    return made / made.sum(1).unsqueeze(-1)


def late_column(x: Tensor) -> Tensor:
    made = (x - x.amax(-1).unsqueeze(-1)).exp()
    return made / made.sum(-1)[:, None]


SPELLINGS = {
    "one op": lambda x: torch.softmax(x, -1),
    "one op, with a dtype": lambda x: torch.softmax(x, 1, dtype=FP32),
    "written out": written_out,
    "by max": by_max,
    "columns put on late": late_column,
}


def route(score: Callable[[Tensor], Tensor], *, narrow: bool = False) -> Callable[..., Any]:
    def f(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, gate).float() if narrow else F.linear(x.float(), gate.float())
        scores = score(logits)
        ids = torch.topk(scores + bias, TOP)[1]
        weights = scores.gather(-1, ids)
        return weights / weights.sum(-1, keepdim=True), ids

    return f


def args() -> list[Tensor]:
    return [rows(M, K), rows(E, K) / K**0.5, rows(E, dtype=FP32) / 10]


def read(score: Callable[[Tensor], Tensor], level: str, **how: Any) -> Any:
    """The one routing of the graph, the code of its refusal, or None."""
    module = trace(route(score, **how), *args(), level=level)
    got = [*found(module, Routing), *refused(module, Routing)]
    assert len(got) <= 1
    return got[0] if got else None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_a_softmax_of_the_logits(spelling: str, level: str) -> None:
    got = read(SPELLINGS[spelling], level)
    assert (got.scoring, got.top_k, got.renormalize) == ("softmax", TOP, True)
    assert (got.logits.meta["val"].dtype, got.logits) == (FP32, got.linear.out)
    calls = [n for n in got.weights.graph.nodes if n.op == "call_function"]
    assert set(got.nodes) == set(calls)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_logits_of_bf16_are_read_as_what_they_are(spelling: str, level: str) -> None:
    assert read(SPELLINGS[spelling], level, narrow=True).linear.out_dtype == BF16


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_rewritten_graph_has_its_values(spelling: str, level: str) -> None:
    given = args()
    module = trace(route(SPELLINGS[spelling]), *given, level=level)
    weights, ids = module(*given)
    report = run(module)
    assert [s.pattern for s in report.found] == ["router"]
    assert "exp" not in {n.name for n in module.graph.nodes}
    got = module(*given)
    assert torch.equal(got[1], ids)
    band = tolerance(FP32, E, 4)
    torch.testing.assert_close(got[0], weights, rtol=band.rtol, atol=band.atol)


def share(x: Tensor, most: Tensor | float, total: Callable[[Tensor], Tensor]) -> Tensor:
    made = torch.exp(x - most)
    return made / total(made)


def top(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


def column(made: Tensor) -> Tensor:
    return made.sum(-1, keepdim=True)


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the greatest of each expert": (
        lambda x: share(x, x.amax(0, keepdim=True), column), "ATTR_MISMATCH",
    ),
    "the greatest of all": (lambda x: share(x, x.amax(), column), "ATTR_MISMATCH"),
    "the least": (lambda x: share(x, x.amin(-1, keepdim=True), column), "OP_MISMATCH"),
    "the place of the greatest": (
        lambda x: share(x, x.max(-1, keepdim=True)[1], column), "OP_MISMATCH",
    ),
    "the greatest of something else": (lambda x: share(x, top(2 * x), column), "OP_MISMATCH"),
    "a number taken off": (lambda x: share(x, 1.0, column), "OP_MISMATCH"),
    "nothing taken off": (lambda x: x.exp() / column(x.exp()), "OP_MISMATCH"),
    "summed over the tokens": (
        lambda x: share(x, top(x), lambda m: m.sum(0, keepdim=True)), "ATTR_MISMATCH",
    ),
    "summed over all": (lambda x: share(x, top(x), torch.sum), "ATTR_MISMATCH"),
    "summed with an epsilon": (
        lambda x: share(x, top(x), lambda m: column(m) + 1e-3), "OP_MISMATCH",
    ),
    "the sum of something else": (
        lambda x: share(x, top(x), lambda m: column(m * m)), "OP_MISMATCH",
    ),
    "the sum of other logits": (
        lambda x: share(x, top(x), lambda m: column(torch.exp(x))), "OP_MISMATCH",
    ),
    "to base 2": (
        lambda x: torch.exp2(x - top(x)) / column(torch.exp2(x - top(x))), "OP_MISMATCH",
    ),
    "by a reciprocal": (
        lambda x: torch.exp(x - top(x)) * column(torch.exp(x - top(x))).reciprocal(), "OP_MISMATCH",
    ),
    "rounded": (lambda x: written_out(x).to(BF16).float(), "DTYPE_MISMATCH"),
    "rounded, one op": (lambda x: torch.softmax(x.to(BF16), -1).float(), "DTYPE_MISMATCH"),
    "rounded exponentials": (
        lambda x: torch.exp(x - top(x)).to(BF16).float() / column(torch.exp(x - top(x))),
        "DTYPE_MISMATCH",
    ),
    "summed in double": (
        lambda x: share(x, top(x), lambda m: m.sum(-1, keepdim=True, dtype=torch.float64)).float(),
        "DTYPE_MISMATCH",
    ),
    "over the tokens, one op": (lambda x: torch.softmax(x, 0), "ATTR_MISMATCH"),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("defect", WRONG)
def test_every_other_quotient_is_refused_with_a_reason(defect: str, level: str) -> None:
    score, code = WRONG[defect]
    assert read(score, level) == code
    assert read(written_out, level).scoring == "softmax"  # the control


@pytest.mark.parametrize(
    "score", [lambda x: x / top(x), lambda x: torch.sigmoid(x) / 2.0, lambda x: x.exp() * x]
)
def test_what_has_no_exponentials_on_top_is_no_candidate(score: Callable[[Tensor], Tensor]) -> None:
    assert read(score, "aot") is None


# --- the greatest and the sum in one op, as Inductor has them on a GPU ----------------------------


def online(defect: str = "") -> Any:
    from torch._inductor import inductor_prims  # noqa: F401 - registers the op

    h = Hand()
    x, w, bias = h.input("x", M, K), h.input("w", E, K), h.input("bias", E, dtype=FP32)
    logits = h.call(aten.mm.dtype, x, h.call(aten.t.default, w), FP32)
    of = h.call(aten.mul.Tensor, logits, 2.0) if defect == "of something else" else logits
    axis = 0 if defect == "another axis" else 1
    pair = h.call(prims.prepare_softmax_online.default, of, axis)
    most, total = h.item(pair, 0), h.item(pair, 1)
    if defect == "the other way round":
        most, total = total, most
    if defect == "another sum":
        total = h.call(aten.add.Tensor, total, 1.0)
    made = h.call(aten.exp.default, h.call(aten.sub.Tensor, logits, most))
    scores = h.call(aten.div.Tensor, made, total)
    picked = h.call(aten.topk.default, h.call(aten.add.Tensor, scores, bias), TOP)
    ids = h.item(picked, 1)
    weights = h.call(aten.gather.default, scores, 1, ids)
    module = h.done(weights, ids)
    got = [*found(module, Routing), *refused(module, Routing)]
    assert len(got) == 1
    return got[0]


def test_the_greatest_and_the_sum_of_one_op() -> None:
    got = online()
    calls = [n for n in got.weights.graph.nodes if n.op == "call_function"]
    assert (got.scoring, set(got.nodes)) == ("softmax", set(calls))


@pytest.mark.parametrize(
    ("defect", "code"),
    [
        ("of something else", "OP_MISMATCH"),
        ("another axis", "ATTR_MISMATCH"),
        ("the other way round", "OP_MISMATCH"),
        ("another sum", "OP_MISMATCH"),
    ],
)
def test_one_op_of_something_else_is_refused(defect: str, code: str) -> None:
    assert online(defect) == code
    assert online().scoring == "softmax"  # the control

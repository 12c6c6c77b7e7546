"""The families through operand order, interposed views and casts, epsilons and wrong literals."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch.nn import functional as F

from build import BF16, LEVELS, Hand, aten, run, trace
from build import rows as values
from k3fuse.rewriter.sources import fake_group
from tolerances import assert_close

M, K, H, E, TOP = 4, 32, 64, 16, 4
EPS = (1e-5, 1e-6, 0.1)


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(BF16)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda y: y,
    "a view": lambda y: y.view(1, M, H).view(M, H),
    "a reshape": lambda y: y.reshape(-1, H),
    "a cast to itself": lambda y: torch.ops.aten._to_copy(y, dtype=BF16),
    "a clone": lambda y: y.clone(),
    "a whole slice": lambda y: y[:],
}


def o_proj(
    order: bool, eps: float, between: str, reduce: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    def f(x: Tensor, w: Tensor, residual: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        y = BETWEEN[between](reduce(F.linear(x, w)))
        total = residual + y if order else y + residual
        return norm(total, n, eps), total

    return f


def o_proj_inputs() -> list[Tensor]:
    return [values(M, K), values(H, K) * K**-0.5, values(M, H, seed=1), values(H, seed=2)]


def taken(module: fx.GraphModule, pattern: str, target: str = "reference") -> int:
    report = run(module, target)
    return report.counts()[pattern].found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("order", [False, True])
def test_an_output_projection_keeps_its_values(order: bool, between: str, level: str) -> None:
    module = trace(o_proj(order, 1e-5, between, lambda y: y), *o_proj_inputs(), level=level)
    original = copy.deepcopy(module)
    assert taken(module, "output_projection") == 1
    for got, wanted in zip(module(*o_proj_inputs()), original(*o_proj_inputs()), strict=True):
        assert_close(got, wanted, k=K, roundings=2)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("order", [False, True])
def test_one_through_an_all_reduce(order: bool, between: str) -> None:
    with fake_group(8) as group:
        function = o_proj(order, 1e-5, between, lambda y: funcol.all_reduce(y, "sum", group))
        assert taken(trace(function, *o_proj_inputs()), "output_projection") == 1
        function = o_proj(order, 1e-5, between, lambda y: funcol.all_reduce(y, "avg", group))
        assert taken(trace(function, *o_proj_inputs()), "output_projection") == 0


@pytest.mark.parametrize("eps", EPS)
def test_the_epsilon_reaches_the_op(eps: float) -> None:
    module = trace(o_proj(False, eps, "nothing", lambda y: y), *o_proj_inputs())
    original = copy.deepcopy(module)
    assert taken(module, "output_projection") == 1
    (call,) = [n for n in module.graph.nodes if str(n.target).startswith("k3fuse.")]
    assert eps in call.args
    got, wanted = module(*o_proj_inputs())[0], original(*o_proj_inputs())[0]
    assert_close(got, wanted, k=K, roundings=2)
    if eps == 0.1:  # an epsilon baked in would show
        other = trace(o_proj(False, 1e-5, "nothing", lambda y: y), *o_proj_inputs())
        assert not torch.allclose(wanted.float(), other(*o_proj_inputs())[0].float(), rtol=0.01)


@pytest.mark.parametrize(("factor", "expected"), [(1, 1), (2, 0)])
def test_a_scaled_sum_is_left(factor: int, expected: int) -> None:
    """y + 2 residual is no residual add: its values would change."""
    h = Hand()
    x, w = h.input("x", M, K), h.input("w", H, K)
    residual, n = h.input("residual", M, H), h.input("norm", H)
    y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
    total = h.call(aten.add.Tensor, y, residual, alpha=factor)
    out = h.call(aten.rms_norm.default, total, [H], n, 1e-5)
    assert taken(h.done(out, total), "output_projection") == expected


def test_a_bias_is_no_part_of_the_family() -> None:
    def f(x: Tensor, w: Tensor, residual: Tensor, n: Tensor, b: Tensor) -> Tensor:
        return norm(F.linear(x, w, b) + residual, n, 1e-5)

    report = run(trace(f, *o_proj_inputs(), values(H)))
    (site,) = [s for s in report.sites if s.pattern == "output_projection"]
    assert [r.code.value for r in site.reasons] == ["INTERPOSED_OP"]


# --- router -------------------------------------------------------------------------------------


def route(
    scale: float, renormalize: bool, fp32: bool = True
) -> Callable[..., tuple[Tensor, Tensor]]:
    def f(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.float(), gate.float()) if fp32 else F.linear(x, gate).float()
        score = torch.sigmoid(logits)
        ids = torch.topk(score + bias, TOP)[1]
        weights = score.gather(1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * scale, ids

    return f


def route_inputs() -> list[Tensor]:
    return [values(M, K), values(E, K) * K**-0.5, values(E, dtype=torch.float32) * 0.1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.446])
def test_a_router_keeps_its_values(scale: float, renormalize: bool, level: str) -> None:
    module = trace(route(scale, renormalize), *route_inputs(), level=level)
    original = copy.deepcopy(module)
    assert taken(module, "router") == 1
    weights, ids = module(*route_inputs())
    wanted_weights, wanted_ids = original(*route_inputs())
    assert torch.equal(ids, wanted_ids)
    assert_close(weights, wanted_weights, k=K, roundings=4)


def test_bf16_logits_are_refused_on_every_target() -> None:
    for fp32, codes in ((True, []), (False, ["DTYPE_MISMATCH"])):
        report = run(trace(route(1.0, True, fp32), *route_inputs()))
        (site,) = [s for s in report.sites if s.pattern == "router"]
        assert [r.code.value for r in site.reasons] == codes


@pytest.mark.parametrize("part", ["scores", "ids too"])
def test_scores_read_outside_keep_the_router(part: str) -> None:
    """Auxiliary losses and statistics read the scores: an intermediate, not an output."""

    def f(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        score = torch.sigmoid(F.linear(x.float(), gate.float()))
        ids = torch.topk(score + bias, TOP)[1]
        return score.gather(1, ids), ids, score.mean(0) if part == "scores" else ids.sum(0)

    report = run(trace(f, *route_inputs()))
    (site,) = [s for s in report.sites if s.pattern == "router"]
    expected = ["USER_ESCAPES"] if part == "scores" else []
    assert [r.code.value for r in site.reasons] == expected

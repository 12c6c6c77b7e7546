"""What `quantize` adds to k3fuse::router: the latent row in MXFP8 and the expert plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3fuse.kernels.common.composition import Composition, CompositionError
from k3fuse.kernels.common.microscaling import dequantize_mxfp8
from k3fuse.kernels.experts.policy import TABLE as EXPERTS
from k3fuse.kernels.experts.policy import TAKING
from k3fuse.kernels.router import reference, route_bits
from k3fuse.kernels.router.policy import TABLE
from k3fuse.kernels.router.units import MAX_UNITS, PLAN_WORDS, expert_plan
from op_cases import Case, Draw, router
from traced import calls_of, outputs_of, trace

TOP_K = 4


def _case(m: int, target: str = "reference", composition: str = "") -> Case:
    case = router(Draw(m), m, 16, 40, 64, TOP_K, quantize=True, plan=True)
    case.kwargs |= {"target": target, "composition": composition}
    return case


@pytest.mark.parametrize("m", [1, 8, 9, 64])
def test_the_reference_adds_what_the_experts_read(m: int) -> None:
    case = _case(m)
    weights, ids, latent, values, scales, plan = case()
    plain = Case(case.op, case.args, {**case.kwargs, "quantize": False, "plan": False})()
    for got, wanted in zip((weights, ids, latent), plain, strict=True):
        assert torch.equal(got, wanted)
    back = dequantize_mxfp8(values.view(torch.float8_e4m3fn), scales)
    assert float((back - latent.float()).abs().max()) <= float(latent.abs().max()) / 16
    units = int(plan[0])
    assert torch.equal(plan[: 1 + 10 * units], route_bits.expert_plan(ids))
    assert plan.shape == (PLAN_WORDS,)


def _composed(outputs: int) -> str:
    """The composition text of the stock router, with the first of its outputs."""
    case = _case(3)
    rest = case.args[4:]

    def stock(x: Tensor, gate: Tensor, bias: Tensor, latent: Tensor) -> Any:
        return tuple(reference.router(x, gate, bias, latent, *rest)[:outputs])

    tensors = case.args[:4]
    torch._dynamo.mark_dynamic(tensors[0], 0)
    graph = trace(stock, tensors, dynamic=None)
    found = [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor)]
    # Placeholders are in order of use; widths tell them apart, and the row is the symbolic one.
    order = {"[40, 16]": 1, "[40]": 2, "[64, 16]": 3}
    found.sort(key=lambda n: order.get(str(list(n.meta["val"].shape)), 0))
    return Composition.from_nodes(calls_of(graph), found, outputs_of(graph)).text


def test_the_composition_is_completed() -> None:
    """On a CPU, and for more tokens than the policy has: the replaced nodes, then the rest.

    With more tokens nobody reads the MXFP8 row, so it is there and not filled.
    """
    text = _composed(3)
    for m in (5, 65):
        case = _case(m, "gb300:tp8", text)
        got = case()
        wanted = reference.completed(reference.router(*case.args), quantize=True, plan=True)
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in wanted]
        assert len(got) == 6
        for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if m <= 64 or place not in (3, 4):
                assert torch.equal(a, b)


@pytest.mark.parametrize(("m", "rounds"), [(1, True), (64, True), (65, False), (8192, False)])
def test_the_row_is_rounded_where_the_experts_read_it(
    m: int, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    rounded = reference.quantize_mxfp8

    def counted(row: Tensor) -> Any:
        seen.append(row.shape[0])
        return rounded(row)

    monkeypatch.setattr(reference, "quantize_mxfp8", counted)
    case = _case(m, "gb300:tp8", _composed(3))
    case.kwargs["plan"] = False
    case()
    assert seen == ([m] if rounds else [])


@pytest.mark.parametrize("target", ["reference", "gb300:tp8", "gb300:tp16"])
def test_the_experts_have_no_kernel_where_the_router_has_none(target: str) -> None:
    """Nor the reference, so that nothing reads what is not filled."""
    for table in (EXPERTS, TAKING):
        served = [m for m in range(1, 200) if table.lookup(target, m) is not None]
        assert served == [m for m in range(1, 200) if TABLE.lookup(target, m) is not None]
        assert served[-1] == 64


def test_a_composition_with_other_outputs_is_refused() -> None:
    with pytest.raises(CompositionError, match="the op promises"):
        _case(5, "gb300:tp8", _composed(2))()


def test_what_cannot_be_quantised_is_refused() -> None:
    for columns, message in ((0, "without a latent_weight"), (33, "a multiple of 32")):
        case = router(Draw(1), 2, 16, 40, columns, TOP_K, quantize=True)
        with pytest.raises(ValueError, match=message):
            case()
    router(Draw(1), 2, 16, 40, 33, TOP_K)()  # the control


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 64), experts=st.integers(16, 900), top_k=st.integers(1, 16),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_plans_of_any_ids(m: int, experts: int, top_k: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(m, experts, generator=rng).argsort(1)[:, :top_k].contiguous()
    plan = expert_plan(ids)
    wanted = route_bits.expert_plan(ids)
    assert torch.equal(plan[: len(wanted)], wanted)
    units = wanted[1:].reshape(-1, 10)
    places = units[:, 2:][units[:, 2:] >= 0]
    assert sorted(places.tolist()) == list(range(m * top_k))
    assert bool((ids.reshape(-1)[places.long()].bincount(minlength=experts) > 0).any())
    assert int(units[:, 1].sum()) == m * top_k
    assert bool((units[:, 0].diff() >= 0).all())


def test_too_many_places_have_no_plan() -> None:
    ids = torch.arange(17).repeat(MAX_UNITS // 16, 1)
    assert int(expert_plan(ids)[0]) == 0
    assert int(expert_plan(ids[:, :16])[0]) == 16 * 8

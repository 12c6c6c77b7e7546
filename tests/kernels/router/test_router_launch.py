"""From the op's tensors to two launches: host code of all ranks, kernels in the simulator."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.router import op, reference, route_bits
from k3fuse.kernels.router.front_builder import config_of
from k3fuse.kernels.router.launch import front_variant, launch, misfit
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.router.policy import REPLICATED_ROW, SHARDED, TABLE
from k3fuse.kernels.router.route_launch import Form
from tolerances import assert_close

TARGET, TP, K, E, L = "gb300:tp8", 8, 1024, 96, 256
CHOICE = Form(E, L, 4, renormalize=True, bias=True)
EPS = 1e-20


def row_of(m: int, target: str = TARGET) -> Row:
    row = TABLE.lookup(target, m)
    assert row is not None
    return row


def operands(m: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, K], gate [E, K], latent [L, K], bias [E]."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(m, K, generator=made).bfloat16()
    gate, latent = ((torch.randn(n, K, generator=made) * K**-0.5).bfloat16() for n in (E, L))
    return x, gate, latent, 0.05 * torch.randn(E, generator=made)


def call(
    ranks: HostRanks, row: Row, form: Form, m: int, seed: int, strided: bool = False,
    shared: list[reference.Shared] | None = None,
) -> tuple[list[list[Tensor]], list[Tensor], Any]:  # fmt: skip
    """Results of every rank, the operands, and the report of the run. shared: of each rank."""
    x, gate, latent, bias = operands(m, seed)
    wide = torch.full((m, K + 8), float("nan"), dtype=torch.bfloat16)
    wide[:, :K] = x
    rows = wide[:, :K] if strided else x

    def host(rank: int, recorder: Recorder, space: Any) -> list[Tensor]:
        runtime: Any = recorder
        return launch(
            row, TARGET, "tp", form, rows, gate, latent, bias=bias if form.bias else None,
            eps=EPS, runtime=runtime, space=space, shared=None if shared is None else shared[rank],
        )  # fmt: skip

    known = [[wide if strided else x, gate, latent, bias] for _ in range(TP)]
    for rank, mine in enumerate(shared or ()):
        known[rank] += mine.weights
    results, report = ranks.step(host, known)
    return results, [x, gate, latent, bias], report


@pytest.mark.parametrize(("multicast", "layers"), [(False, 1), (True, 3)])
def test_the_launches_of_all_ranks_compute_the_op(multicast: bool, layers: int) -> None:
    """Layers on one set of mailboxes: choice, rows alone, every rank all logits."""
    pytest.importorskip("cutlass")
    ranks = HostRanks(TP, multicast=multicast, layout=FrontMailbox(TP, E, L))
    steps = [(row_of(3), CHOICE, 3), (row_of(9), Form(E, L), 9), (REPLICATED_ROW, CHOICE, 1)]
    for turn, (row, form, m) in enumerate(steps[:layers]):
        results, given, report = call(ranks, row, form, m, turn, strided=turn == 0)
        assert len(report.launches) == row.launches == 2
        x, gate, latent, bias = given
        if form.top_k:
            wanted = reference.router(
                x, gate, bias, latent, 4, "sigmoid", True, 1.0, EPS, torch.bfloat16
            )
        else:
            wanted = reference.router_front(x, gate, latent)
        for rank, got in enumerate(results):
            for mine, first, want in zip(got, results[0], wanted, strict=True):
                assert torch.equal(mine, first), rank  # the same bits on every rank
                if want.dtype == torch.int64:
                    assert torch.equal(mine, want)
                else:
                    assert_close(mine, want, k=K)
        counter = FrontMailbox(TP, E, L).control // 4
        for space in ranks.spaces:
            assert space.armed()
            assert space.error() is None
            assert int(space.memory.view(torch.int32)[counter]) == turn + 1


@pytest.mark.parametrize("merged", [True, False])
def test_it_makes_what_the_experts_read(merged: bool) -> None:
    """The shared hidden row of each rank behind the latent row, then MXFP8 of that; two launches.

    All other results have the bits that they have without.
    """
    pytest.importorskip("cutlass")
    m, columns = 3, 16
    drawn = torch.Generator().manual_seed(1)

    def of_a_rank() -> reference.Shared:
        whole = (torch.randn(2 * columns, K, generator=drawn) * K**-0.5).bfloat16()
        halves = [half.clone() for half in whole.chunk(2)]
        return reference.Shared([whole] if merged else halves, "situ", 4.0, 25.0)

    shared = [of_a_rank() for _ in range(TP)]
    form = replace(CHOICE, quantize=True)
    fresh = lambda: HostRanks(TP, multicast=True, layout=FrontMailbox(TP, E, L))  # noqa: E731
    results, given, report = call(fresh(), row_of(m), form, m, 5, shared=shared)
    plain, _, _ = call(fresh(), row_of(m), CHOICE, m, 5)
    assert len(report.launches) == row_of(m).launches == 2
    for rank, (weights, ids, latent, hidden, values, scales) in enumerate(results):
        for mine, alone in zip((weights, ids, latent), plain[rank], strict=True):
            assert torch.equal(mine, alone)
        assert_close(hidden, shared[rank](given[0]), k=K, roundings=2)
        assert not torch.equal(hidden, results[rank - 1][3])  # the control: ranks differ
        assert torch.equal(values, route_bits.quantized(latent)[0])
        assert torch.equal(scales, route_bits.quantized(latent)[1])


def test_shared_weights_that_do_not_fit_are_named() -> None:
    x, gate, latent, _ = operands(2, 0)
    whole = torch.zeros(32, K, dtype=torch.bfloat16)

    def said(weights: list[Tensor], activation: str = "situ") -> str:
        shared = reference.Shared(weights, activation, 4.0, 25.0)
        return misfit(row_of(2), TARGET, CHOICE, x, gate, latent, shared)

    for weights, activation, message in (
        ([whole.float()], "situ", r"shared_gate_up\[0\] is torch.float32"),
        ([whole], "silu", "activation is 'silu', the front kernel computes 'situ'"),
        ([whole[:6]], "situ", "shared=3"),
    ):
        assert re.search(message, said(weights, activation)), said(weights, activation)
    assert said([whole]) == said([whole, whole]) == ""  # the control


@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
def test_every_token_count_has_kernels_that_hold_it(target: str) -> None:
    tp = int(target.partition(":tp")[2])
    for m in range(1, 65):
        row = row_of(m, target)
        assert (row.kernel, row.launches) == (SHARDED, 2)
        config = config_of(front_variant(row, target, 7168, 896, 3584, True))
        assert m <= config.m <= max(8, 2 * m)
        assert (config.tp, config.replicated, config.shared) == (tp, False, 0)
    config = config_of(front_variant(REPLICATED_ROW, target, 7168, 896, 3584, True))
    assert config.rows == (896, 3584 // tp, 0)


def test_operands_that_do_not_fit_are_named() -> None:
    x, gate, latent, _ = operands(2, 0)
    row = row_of(2)

    def said(**other: Any) -> str:
        given = {"form": CHOICE, "x": x, "gate": gate, "latent": latent, **other}
        return misfit(row, TARGET, *given.values())

    for other, message in (
        ({"x": x.float()}, "x is torch.float32, the kernel takes torch.bfloat16"),
        ({"gate": gate.float()}, "gate_weight is torch.float32"),
        ({"latent": latent.half()}, "latent_weight is torch.float16"),
        ({"form": Form(90, L, 4)}, "experts=90 is outside the kernel"),
        ({"form": Form(E, 100, 4)}, "latent=100"),
        ({"x": x[:, :520]}, "k=520"),
        ({"form": Form(E, L, 40)}, "k=40"),
    ):
        assert re.search(message, said(**other)), said(**other)
    assert said() == ""  # the control
    assert said(x=x[:, ::1], latent=None, form=Form(E, 0, 4)) == ""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_the_op_launches_on_a_gpu_and_refuses_misfits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate, latent, bias = operands(2, 1)
    asked: list[Form] = []

    def launched(row: Row, target: str, group: str, form: Form, *rest: Any, **how: Any) -> Any:
        asked.append(form)
        assert (row.kernel, target, group) == (SHARDED, TARGET, "tp")
        return ["made"]

    monkeypatch.setattr(op, "launch", launched)
    named = {"target": TARGET, "group": "tp", "composition": ""}
    there = x.as_subclass(OnGpu)
    made: Any = op._run_front(there, gate, latent, **named)
    assert made == ["made"]
    scores = (4, "sigmoid", True, 1.0, EPS, torch.bfloat16)
    made = op._run_router(there, gate, bias, latent, *scores, **named)
    assert made == ["made"]
    assert asked == [Form(E, L), CHOICE]
    odd = torch.zeros(E * K + 8, dtype=torch.bfloat16)[4:-4].view(E, K)
    made = op._run_front(there, odd, latent, **named)
    assert made == ["made"]  # all ranks go one way, wherever a weight lies
    with pytest.raises(RuntimeError, match="does not take the operands: router_front: k=520"):
        op._run_front(there[:, :520], gate[:, :520], latent[:, :520], **named)
    with pytest.raises(RuntimeError, match="'sharded_front_route' runs on a GPU"):
        op._run_front(x, gate, latent, **named)

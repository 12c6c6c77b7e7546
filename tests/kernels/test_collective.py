"""The ordered all-reduce: the order itself, two gloo ranks, and the ops that hold one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.processes import run_ranks
from torch import Tensor

import oracles
from compare import assert_matches, wide
from k3fuse.kernels.common.collective import all_reduce, ordered_all_reduce, ordered_sum
from op_cases import (
    Case,
    Draw,
    experts,
    output_add_rms_norm,
    output_attn_res,
    tail,
)

WORLD = 2
BIG = 2.0**24


def test_sum_is_in_rank_order() -> None:
    """2^24 + 1 - 2^24 is 0 in FP32 and 1 in any order that cancels first."""
    big, one = torch.tensor([BIG]), torch.tensor([1.0])
    assert ordered_sum([big, one, -big]).item() == 0.0
    assert ordered_sum([big, -big, one]).item() == 1.0
    assert ordered_sum([one, big, -big]).item() == 0.0


def test_sum_is_fp32_and_rounded_once() -> None:
    """1 + 2^-8 twice: two BF16 roundings lose it, FP32 keeps it for the one rounding."""
    parts = [torch.tensor([v], dtype=torch.bfloat16) for v in (1.0, 2.0**-9, 2.0**-9, 2.0**-8)]
    assert ordered_sum(parts).to(torch.bfloat16).item() == 1 + 2.0**-7
    step_by_step = parts[0]
    for part in parts[1:]:
        step_by_step = step_by_step + part
    assert step_by_step.item() != 1 + 2.0**-7  # control: the other rule gives another number


def test_empty_group_is_the_identity() -> None:
    x = torch.randn(3, 4)
    assert all_reduce(x, "") is x
    assert ordered_all_reduce(x, "") is x


def test_unknown_group_says_what_is_missing() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"group='0' .*call init_process_group, or use ''"):
        all_reduce(torch.ones(1), "0")


def _inputs(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    cancel = torch.tensor([[BIG, 1.0, -BIG, BIG], [1.0, -BIG, 0.0, -0.0]])
    flip = 1.0 if rank == 0 else -1.0
    return [
        flip * cancel + rank,
        torch.randn(5, 7, generator=rng),
        torch.randn(5, 14, generator=rng).bfloat16()[:, 3:10],
        torch.randn(4, 6, generator=rng).half(),
        torch.zeros(0, 7),
    ]


def _cases(rank: int, group: str) -> dict[str, Case]:
    """Ops of rank `rank`: its own shard of the sharded operands, the same replicated ones."""
    own, same = Draw(100 + rank), Draw(7)
    cases = {
        "attn_res": output_attn_res(same, 3, 32, 48, 2, prefix=True, bank=True, norm=True),
        "block_write": output_attn_res(same, 3, 32, 48, 2, prefix=False, bank=True, norm=True),
        "add_rms_norm": output_add_rms_norm(same, 3, 32, 48, "round_sum"),
        "experts": experts(same, 3, 64, 32, 4, 2, hidden=96, shared=16, mxfp4=True),
        "tail": tail(same, 3, 64, 96),
    }
    sharded: dict[str, dict[int, Any]] = {
        "attn_res": {0: own.rows(3, 32), 1: own.weight(48, 32)},
        "block_write": {0: own.rows(3, 32), 1: own.weight(48, 32)},
        "add_rms_norm": {0: own.rows(3, 32), 1: own.weight(48, 32)},
        "experts": {8: [own.weight(32, 96)], 9: own.weight(96, 16)},
        "tail": {0: own.rows(3, 64), 1: own.rows(3, 96)},
    }
    for name, changes in sharded.items():
        args = list(cases[name].args)
        for index, value in changes.items():
            args[index] = value
        cases[name] = Case(cases[name].op, tuple(args), {**cases[name].kwargs, "group": group})
    return cases


def _worker(rank: int, folder: str) -> None:
    from k3fuse.kernels import register_all

    register_all()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    result: dict[str, Any] = {"sums": [ordered_all_reduce(t, name) for t in _inputs(rank)]}
    stock = [t.clone(memory_format=torch.contiguous_format) for t in _inputs(rank)]
    for t in stock:
        dist.all_reduce(t)
    result["own"] = [all_reduce(t, name) for t in _inputs(rank)]
    result["stock"] = stock
    result["ops"] = {key: case() for key, case in _cases(rank, name).items()}
    compiled = torch.compile(_compiled, backend="aot_eager", fullgraph=True)
    case = _cases(rank, name)["tail"]
    result["compiled"] = compiled(case.args, name)
    try:
        all_reduce(torch.ones(1), "no such group")
    except ValueError as err:
        result["error"] = str(err)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _compiled(args: tuple[Any, ...], group: str) -> Tensor:
    kwargs = {"target": "reference", "group": group, "composition": ""}
    delta: Tensor = torch.ops.k3fuse.tail(*args, **kwargs)
    return delta


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_worker, WORLD, folder)
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(WORLD)]


def test_two_ranks_get_the_ordered_sum_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for i, (first, second) in enumerate(zip(_inputs(0), _inputs(1), strict=True)):
        expected = (first.float() + second.float()).to(first.dtype)
        for rank in ranks:
            got = rank["sums"][i]
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), i


def test_references_reduce_as_the_group_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for own, stock in zip(rank["own"], rank["stock"], strict=True):
            assert torch.equal(own, stock)
    # Control: the reduction happened.
    assert not torch.equal(ranks[0]["own"][1], _inputs(0)[1])


def test_two_ranks_agree_on_every_op(ranks: list[dict[str, Any]]) -> None:
    for name, outputs in ranks[0]["ops"].items():
        for mine, other in zip(outputs, ranks[1]["ops"][name], strict=True):
            assert torch.equal(mine, other), name
    assert torch.equal(ranks[0]["compiled"], ranks[0]["ops"]["tail"][0])
    assert torch.equal(ranks[1]["compiled"], ranks[1]["ops"]["tail"][0])


def test_unknown_group_lists_the_known_ones(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "group='no such group' is no process group" in rank["error"]
        assert "pass the group_name of one of them" in rank["error"]


def _close(actual: Tensor, expected: Any, roundings: int, what: str) -> None:
    rounded = oracles.rounded(expected, actual.dtype)
    assert_matches(actual, rounded, k=96, roundings=roundings, what=what)


def test_two_rank_ops_match_float64(ranks: list[dict[str, Any]]) -> None:
    local = [_cases(rank, "") for rank in range(WORLD)]
    got = ranks[0]["ops"]

    def row(name: str) -> Any:
        return sum(wide(c[name].args[0]) @ wide(c[name].args[1]).T for c in local)

    for name in ("attn_res", "block_write"):
        _, _, prefix, blocks, n, norm, proj, out_norm, eps, out_eps, _ = local[0][name].args
        new_prefix = row(name) + (0 if prefix is None else wide(prefix))
        _close(got[name][1], new_prefix, 3, name)
        p = wide(got[name][1])
        expected = oracles.attn_res(p, blocks, n, norm, proj, out_norm, eps, out_eps)
        _close(got[name][0], expected, 1, name)
    _, _, residual, norm, eps, _ = local[0]["add_rms_norm"].args
    _close(got["add_rms_norm"][1], row("add_rms_norm") + wide(residual), 3, "new residual")
    expected = oracles.rms(wide(got["add_rms_norm"][1]), eps) * wide(norm)
    _close(got["add_rms_norm"][0], expected, 1, "add_rms_norm")

    routed, shared = (
        sum(part)
        for part in zip(*(oracles.experts(c["experts"].args, True) for c in local), strict=True)
    )
    norm, up = local[0]["experts"].args[10:12]
    _close(got["experts"][0], oracles.finish_experts(routed, shared, norm, up, 1e-5), 8, "experts")
    routed, shared = (np.sum([wide(c["tail"].args[i]) for c in local], axis=0) for i in (0, 1))
    norm, up = local[0]["tail"].args[2:4]
    _close(got["tail"][0], oracles.finish_experts(routed, shared, norm, up, 1e-5), 6, "tail")
    # Control: one rank's own result is not the group's.
    for name, case in local[0].items():
        assert not torch.allclose(case()[0].float(), got[name][0].float(), rtol=0.05, atol=0.05)

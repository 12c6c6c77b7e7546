"""From the op's tensors to the row-sharded launch of every rank; what is refused; what is built."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_runs import BF16, band, exact, operands
from sharded_runs import SMALL, full
from tests.processes import run_ranks
from torch import Tensor

from host_ranks import MULTICAST, HostRanks, Recorder
from k3fuse.kernels.attention_projection import op, sharded_launch
from k3fuse.kernels.attention_projection.builder import MLA, rows_shape
from k3fuse.kernels.attention_projection.policy import SHARDED, SHARDED_STREAM, TABLE
from k3fuse.kernels.attention_projection.reference import attention_projection, row_sharded
from k3fuse.kernels.attention_projection.sharded_builder import (
    BUILDER,
    SPLIT,
    sharded_of,
    split_shape,
)
from k3fuse.kernels.attention_projection.sharded_cases import cases
from k3fuse.kernels.attention_projection.sharded_launch import launch, misfit, variant
from k3fuse.kernels.attention_projection.share import RowMailbox
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.build.residency import Member, co_residency
from k3fuse.kernels.check import CheckTarget
from k3fuse.kernels.common import dispatch
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import compare
from k3fuse.kernels.simulator import Inside, Launch, Multicast, Owned, TensorMap, simulate_sequence
from stored import store

TARGET, TP, K = "gb300:tp8", 8, 512
ROWS, SPLIT_ROWS = (80, 64, 24), (64, 64, 0)


def row_of(m: int, kernel: str = SHARDED_STREAM) -> Row:
    found = SHARDED.lookup(TARGET, m)
    assert found is not None
    return replace(found, kernel=kernel)


def simulate(ranks: HostRanks, recorders: list[Recorder], known: list[list[Tensor]]) -> None:
    """Run what every rank launched; each address has to lie in a tensor of the rank."""
    ((chosen, _),) = recorders[0].launched
    built = store().get(chosen)

    def value(parameter: Any, number: Any, rank: int) -> Any:
        if parameter.kind == "i32":
            return number
        if number == MULTICAST:
            return Multicast(tuple(ranks.mailboxes))
        address = number.address if isinstance(number, Rows) else number
        for owner, box in enumerate(ranks.mailboxes):
            if address == box.data_ptr():
                return Owned(box, owner)
        (inside,) = [t for t in known[rank] if 0 <= address - t.data_ptr() < t.nbytes]
        if not isinstance(number, Rows):
            return Inside(inside, address - inside.data_ptr())
        # A map of a part: the rows themselves, since a map of the simulator begins with a tensor.
        first = (address - inside.data_ptr()) // (inside.stride(0) * 2)
        part = inside[first : first + number.number].clone()
        return TensorMap.of(part, parameter.tiles.with_rows(number.number, part.stride(0) * 2))

    plan = built.plan
    params = [
        [value(p, n, rank) for p, n in zip(plan.parameters, each.launched[0][1], strict=True)]
        for rank, each in enumerate(recorders)
    ]
    made = Launch(
        built.ptx, plan.grid, plan.block, params, cluster=plan.cluster,
        dynamic_smem=plan.dynamic_smem, pdl=plan.pdl, names=[p.name for p in plan.parameters],
    )  # fmt: skip
    simulate_sequence([made], ranks=TP)


@pytest.mark.parametrize(("multicast", "kernel"), [(True, SHARDED_STREAM), (False, "stationary")])
def test_the_launches_of_all_ranks_compute_the_op(multicast: bool, kernel: str) -> None:
    pytest.importorskip("cutlass")
    m = 3
    ranks = HostRanks(TP, multicast=multicast, layout=RowMailbox(TP, sum(SPLIT_ROWS)))
    x, weights = operands(m, ROWS, K)
    recorders, results, known = [], [], []
    for rank in range(TP):
        pairs = zip(weights, SPLIT_ROWS, strict=True)
        mine = [torch.cat([w[:s], w[s:].roll(rank, 0)]) for w, s in pairs]
        recorder: Any = Recorder()

        def space(group: str, tp: int, at: int = rank) -> Any:
            assert (group, tp) == ("tp", TP)
            return ranks.spaces[at]

        outs = launch(
            row_of(m, kernel), TARGET, "tp", x, mine, SPLIT_ROWS, runtime=recorder, space=space
        )
        recorders.append(recorder)
        results.append((outs, mine))
        known.append([x, *mine, *outs])
    simulate(ranks, recorders, known)
    for outs, mine in results:
        for out, weight in zip(outs, mine, strict=True):
            assert compare(out, exact(x, weight), band(K)).ok
    for rank_space in ranks.spaces:
        assert rank_space.armed()
        assert rank_space.error() is None


def test_every_token_count_has_a_kernel_that_holds_it() -> None:
    for tp, forms in MLA.items():
        target = f"gb300:tp{tp}"
        assert SHARDED.targets == TABLE.targets
        for m in range(1, 65):
            found = SHARDED.lookup(target, m)
            assert found is not None
            assert (found.kernel, found.launches, found.hops) == (SHARDED_STREAM, 1, 1)
            for rows in forms:
                made = sharded_of(variant(found, target, 7168, rows, SPLIT[rows], True))
                assert m <= made.engine.m <= max(8, 2 * m)
                assert sum(part.rows for part in made.share.parts) == sum(rows) - 2112 + 2112 // tp


def test_operands_that_do_not_fit_are_named() -> None:
    x, weights = operands(2, ROWS, K)

    def said(*, group: str = "tp", split: tuple[int, ...] = SPLIT_ROWS, **changed: Any) -> str:
        given = {"x": x, "weights": weights, **changed}
        return misfit(row_of(2), TARGET, given["x"], given["weights"], split, group)

    assert said() == ""
    assert "no group is named" in said(group="")
    assert "x is torch.float32" in said(x=x.float())
    assert "there are 9 weights" in said(weights=[weights[0]] * 9, split=(64,) * 9)
    assert "s0=60 is outside the kernel; use a multiple of 32" in said(split=(60, 64, 0))
    assert "s2=32 is outside the kernel" in said(split=(64, 64, 32))


def test_the_op_takes_the_table_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = operands(2, ROWS, K)
    seen: list[Any] = []

    def run(table: Any, *_: Any, kernel: Any, misfit: Any, **__: Any) -> list[Tensor]:
        seen.append((table, misfit(row_of(2)), kernel(row_of(2))))
        return []

    monkeypatch.setattr(dispatch, "run", run)
    monkeypatch.setattr(sharded_launch, "launch", lambda *given: ["launched", *given[-1]])
    how: dict[str, Any] = {"target": TARGET, "group": "tp", "composition": ""}
    op._run(x, weights, **how, row_sharded=SPLIT_ROWS)
    assert seen == [(SHARDED, "", ["launched", *SPLIT_ROWS])]


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ([64], "row_sharded=[64] for 3 weights; give one number a weight"),
        ([64, 65, 0], "row_sharded[1]=65; weights[1] has 64 rows, name 0 to as many"),
        ([-1, 0, 0], "row_sharded[0]=-1"),
    ],
)
def test_rows_that_weights_do_not_have_are_refused(split: list[int], text: str) -> None:
    x, weights = operands(2, ROWS, K)
    how: dict[str, Any] = {"target": "reference", "group": "", "composition": ""}
    with pytest.raises(ValueError, match=re.escape(text)):
        torch.ops.k3fuse.attention_projection(x, weights, **how, row_sharded=split)
    outs = torch.ops.k3fuse.attention_projection(x, weights, **how, row_sharded=[64, 64, 0])
    for out, wanted in zip(outs, attention_projection(x, weights), strict=True):
        assert torch.equal(out, wanted + 0.0)


def _one_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x, weights = operands(5, (48, 24), 64)
    weights[0][32:] += rank  # the rank's own rows
    group = dist.group.WORLD
    assert group is not None
    wanted = attention_projection(x, weights)
    outs = row_sharded(x, weights, (32, 24), group.group_name)
    for out, whole in zip(outs, wanted, strict=True):
        torch.testing.assert_close(out, whole, rtol=0, atol=2.0**-7)
    # Rows of another rank come from there: what this one holds in their place does not matter.
    weights[0][16 * (1 - rank) : 16 * (2 - rank)] = float("nan")
    again = row_sharded(x, weights, (32, 24), group.group_name)
    assert all(torch.equal(a, b) for a, b in zip(again, outs, strict=True))
    with pytest.raises(ValueError, match=r"row_sharded\[0\]=31 rows do not divide by the 2 ranks"):
        row_sharded(x, weights, (31, 24), group.group_name)
    dist.destroy_process_group()


def test_the_reference_gathers_the_shares(tmp_path: Path) -> None:
    run_ranks(_one_rank, 2, str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"tp": 17}, {}, "tp=17 is outside the kernel; use 1 to 16"),
        ({"s0": 44}, {}, "s0=44 is outside the kernel; use a multiple of 8 up to n0=88"),
        ({"s0": 96}, {}, "s0=96"),
        ({"n0": 90}, {}, "n0=90 is outside the kernel; use a multiple of 8"),
        ({"s0": 0, "s1": 0}, {}, "s0=0 is outside the kernel; use rows to split"),
        ({"n1": 0, "s1": 0}, {}, "n2=12 is outside the kernel; use rows, 0 behind the last"),
        ({}, {"multicast": 2}, "multicast=2"),
        ({}, {"timeout": -1}, "timeout=-1"),
        ({"m": 16}, {"max_m": 8}, "max_m=8 is outside the kernel; use m to 64"),
        ({"n2": 9000}, {"stream": 0}, "rows=9072 is outside the kernel"),
        ({"x": 1}, {}, "no shape 'x'"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", {**SMALL, **shape}, config)
    BUILDER.variant("sm_103a", SMALL, {})  # the control


def test_the_mailbox_divides() -> None:
    box = RowMailbox(8, 2112)
    assert (box.row, box.data) == (4224, 2 * 64 * 4224)
    assert box.error < box.total
    with pytest.raises(ValueError, match="columns=2100 with tp=16: each rank has a multiple of 4"):
        RowMailbox(16, 2100)


def fits(variant_: Any) -> None:
    """No spills, one wave, resident at once on every chip that has it."""
    built = store().get(variant_)
    assert built.resources.spill_bytes == 0
    assert built.plan.ctas <= 128
    member = Member.built(built.plan, built.resources, variant_.name)
    for sms in {"sm_90a": (132,), "sm_103a": (148, 152)}[variant_.arch]:
        assert co_residency([member], sms).fits


def test_all_ctas_are_resident_at_once() -> None:
    pytest.importorskip("cutlass")
    fits(full(MLA[16][1], 64))


@pytest.mark.nightly
@pytest.mark.parametrize(("arch", "stream"), [("sm_90a", 0), ("sm_103a", 0), ("sm_103a", 1)])
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_every_kernel(arch: str, stream: int, tp: int, m: int) -> None:
    for rows in MLA[tp]:
        shape = {"m": m, "tp": tp, **rows_shape(rows), **split_shape(SPLIT[rows])}
        for multicast in (0, 1):
            fits(BUILDER.variant(arch, shape, {"stream": stream, "multicast": multicast}))


def test_the_cases_are_those_of_latent_attention() -> None:
    found = cases(CheckTarget(TARGET, "sm_103a", 8), 8)
    assert [case.waits for case in found] == [True, True]
    assert [case.name.count("s") > 1 for case in found] == [True, True]
    step = found[0].small(1) if found[0].small is not None else None
    assert step is not None
    assert set(step.invariants) == {"mailboxes armed", "ranks equal", "calls counted"}
    assert cases(CheckTarget(TARGET, "sm_103a", 8), 65) == ()
    assert step.outputs[0].expected.dtype == BF16

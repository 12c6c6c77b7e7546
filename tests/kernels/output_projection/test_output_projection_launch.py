"""From the op's tensors to launches: the host code of all ranks, its kernels in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.attn_res.launch import launch as launch_attn_res
from k3fuse.kernels.attn_res.policy import TABLE as ATTN_RES
from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.numerics import linear, rms_norm
from k3fuse.kernels.common.operands import block_rows, pitch, readable
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.launch import Form, Residual, launch, variants
from k3fuse.kernels.output_projection.policy import TABLE
from tolerances import assert_close

HIDDEN = 7168
EPS = 1e-5
SLOTS = 9


def rows(m: int, width: int, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(m, width, generator=made).bfloat16()


def weight(seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return (1 + 0.1 * torch.randn(HIDDEN, generator=made)).bfloat16()


class Step:
    """One layer: the same residual stream on all ranks, an x and a weight of each."""

    def __init__(self, target: str, m: int, seed: int) -> None:
        self.target, self.m = target, m
        _, self.tp = chip_of(target)
        k = 12288 // self.tp
        self.x = [rows(m, k, seed + r) for r in range(self.tp)]
        self.w = [0.02 * rows(HIDDEN, k, seed + 100 + r) for r in range(self.tp)]
        self.prefix = rows(m, HIDDEN, seed + 200)
        self.bank = torch.stack([rows(m, HIDDEN, seed + 300 + i) for i in range(SLOTS)], dim=1)
        self.weights = [weight(seed + 400 + i) for i in range(3)]

    def reduced(self) -> Tensor:
        """The all-reduced rows: partials rounded, added in rank order, rounded."""
        partials = [linear(x, w) for x, w in zip(self.x, self.w, strict=True)]
        return ordered_sum(partials).bfloat16()

    def run(
        self, ranks: HostRanks, form: Form, *, separate: bool = False, seed: int | None = None
    ) -> tuple[list[list[Tensor]], Any]:
        row = TABLE.lookup(self.target, self.m)
        assert row is not None
        inputs: list[list[Tensor]] = []
        given: list[Residual] = []
        for rank in range(self.tp):
            prefix, bank = self.prefix.clone(), self.bank.clone()
            weights = [w.clone() for w in self.weights]
            blocks = [bank]
            if separate:
                blocks = [bank[:, i].contiguous() for i in range(form.blocks)]
            mixed = form.blocks >= 0
            inputs.append([self.x[rank], self.w[rank], prefix, *blocks, *weights])
            given.append(
                Residual(
                    form, prefix if form.prefix else None, blocks if mixed else (),
                    weights[0] if mixed else None, weights[1] if mixed else None,
                    weights[2] if form.norm else None, EPS, EPS,
                )
            )  # fmt: skip

        def call(rank: int, recorder: Recorder, space: Any) -> list[Tensor]:
            runtime: Any = recorder
            return launch(
                row, self.target, "tp", self.x[rank], self.w[rank], given[rank],
                runtime=runtime, space=space,
            )  # fmt: skip

        return ranks.step(call, inputs, seed)


def expected(step: Step, form: Form) -> list[Tensor]:
    reduced = step.reduced()
    if form.blocks < 0:
        total = reduced.float() + step.prefix.float()
        source = total.bfloat16() if form.round_mix else total
        out = rms_norm(source, step.weights[2], EPS, torch.bfloat16, form.round_before)
        return [out, total.bfloat16()]
    rest = (
        [step.bank], form.blocks, step.weights[0], step.weights[1],
        step.weights[2] if form.norm else None, EPS, EPS, form.round_mix,
    )  # fmt: skip
    if not form.prefix:
        return [*attn_res(reduced, None, *rest), reduced]
    return attn_res(step.prefix, reduced, *rest)


DELTA = Form(4, prefix=True, norm=True, round_mix=False, round_before=False)
BLOCK_WRITE = Form(1, prefix=False, norm=True, round_mix=False, round_before=False)
ADD = Form(-1, prefix=True, norm=True, round_mix=True, round_before=True)


@pytest.mark.parametrize(
    ("target", "m", "form", "multicast", "launches"),
    [
        ("gb300:tp8", 3, BLOCK_WRITE, False, 1),
        ("gb300:tp8", 12, ADD, True, 2),
    ],
)
def test_the_launches_of_all_ranks_compute_the_op(
    target: str, m: int, form: Form, multicast: bool, launches: int
) -> None:
    pytest.importorskip("cutlass")
    step = Step(target, m, seed=m)
    ranks = HostRanks(step.tp, multicast=multicast)
    results, report = step.run(ranks, form)
    assert len(report.launches) == launches
    wanted = expected(step, form)
    for rank, got in enumerate(results):
        for mine, first, want in zip(got, results[0], wanted, strict=True):
            assert torch.equal(mine, first), rank  # the same bits on every rank
            assert_close(mine, want, k=12288 // step.tp, roundings=4)
        assert not torch.equal(got[1], step.prefix)
    assert all(space.armed() and space.error() is None for space in ranks.spaces)


def test_a_second_call_uses_the_other_parity() -> None:
    pytest.importorskip("cutlass")
    ranks = HostRanks(8, multicast=True)
    counters = []
    for m, seed in ((2, 50), (1, 60)):
        step = Step("gb300:tp8", m, seed)
        results, _ = step.run(ranks, DELTA)
        for mine, want in zip(results[7], expected(step, DELTA), strict=True):
            assert_close(mine, want, k=1536, roundings=4)
        place = ranks.box.control // 4
        counters.append({int(s.memory.view(torch.int32)[place]) for s in ranks.spaces})
        assert all(space.armed() for space in ranks.spaces)
    assert counters == [{1}, {2}]


def test_rows_that_cannot_be_read_in_place_are_copied() -> None:
    wide = rows(4, HIDDEN + 8, 1)
    kept = wide[:, :HIDDEN]
    assert readable(kept) is kept
    assert pitch(kept) == HIDDEN + 8
    odd = rows(4, HIDDEN + 4, 2)[:, 4:]  # its rows are 8 bytes off
    copied = readable(odd)
    assert copied is not odd
    assert torch.equal(copied, odd)
    assert (pitch(copied), copied.data_ptr() % 16) == (HIDDEN, 0)
    lone = rows(1, HIDDEN, 3).flatten().as_strided((1, HIDDEN), (5, 1))
    assert readable(lone) is lone
    assert pitch(lone) == HIDDEN


def test_blocks_come_from_a_bank_in_place_and_share_a_pitch() -> None:
    bank = rows(3, SLOTS * HIDDEN, 4).view(3, SLOTS, HIDDEN)
    found = block_rows([bank], 4)
    assert [b.data_ptr() for b in found] == [bank[:, i].data_ptr() for i in range(4)]
    assert {pitch(b) for b in found} == {SLOTS * HIDDEN}
    mixed = block_rows([bank[:, 0], bank[:, 1].contiguous()], 2)
    assert {pitch(b) for b in mixed} == {HIDDEN}
    assert torch.equal(mixed[0], bank[:, 0])
    assert block_rows([bank], 0) == []


@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
def test_every_token_count_has_kernels_that_hold_it(target: str) -> None:
    _, tp = chip_of(target)
    kinds = {}
    for m in range(1, 65):
        row = TABLE.lookup(target, m)
        assert row is not None
        made = [config_of(v) for v in variants(row, target, DELTA, multicast=True)]
        assert [c.stage for c in made] == ([FUSED] if m <= 8 else [PRODUCER, CONSUMER])
        assert all(c.m >= m and c.tp == tp and c.k * tp == 12288 for c in made)
        assert len(made) == row.launches
        kinds[m] = made[0].two_shot
    # Two-shot where the rows of one-shot exchange would be more than 3.7 MB a rank.
    assert [m for m, two in kinds.items() if two] == list(range(256 // tp + 1, 65))


def test_on_a_cpu_the_composition_runs_and_without_one_the_device_is_named() -> None:
    weights = [weight(i) for i in range(3)]
    x, w, prefix = rows(2, 1536, 5), rows(HIDDEN, 1536, 6), rows(2, HIDDEN, 7)
    with pytest.raises(
        RuntimeError, match="'fused_mailbox' runs on a GPU, the operands are on cpu"
    ):
        torch.ops.k3fuse.output_projection_attn_res(
            x, w, prefix, [], 0, weights[0], weights[1], weights[2], EPS, EPS, False,
            target="gb300:tp8", group="", composition="",
        )  # fmt: skip


def test_attn_res_alone() -> None:
    pytest.importorskip("cutlass")
    m, blocks = 5, 3
    step = Step("gb300:tp8", m, seed=9)
    prefix, delta, bank = step.prefix, rows(m, HIDDEN, 10), step.bank
    recorder = Recorder()
    runtime: Any = recorder
    row = ATTN_RES.lookup("gb300:tp8", m)
    assert row is not None
    given = (prefix, delta, [bank], blocks, *step.weights, EPS, EPS, False)
    results = launch_attn_res(row, "gb300:tp8", *given, runtime=runtime)
    HostRanks.simulate([recorder], [[prefix, delta, bank, *step.weights, *results]])
    for got, want in zip(results, attn_res(*given), strict=True):
        assert_close(got, want, k=HIDDEN, roundings=2)

"""From the tensors of the tail and the next layer's AttnRes to launches, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tail_calls import HIDDEN, Call, rows
from tail_runs import same
from torch import Tensor

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.attn_res.launch import launch as launch_attn_res
from k3fuse.kernels.attn_res.policy import TABLE as ATTN_RES
from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.tail.builder import BUILDER, config_of
from k3fuse.kernels.tail.launch import launch_mixed, misfit_mixed, variant
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.policy import MIXED, MIXED_TABLE, TABLE
from k3fuse.kernels.tail.problem import EPS
from tolerances import assert_close

SLOTS = 9  # of a bank, of which one is not read


def operands(m: int, blocks: int, *, norm: bool = True, round_mix: bool = False) -> Mix:
    """A prefix whose rows lie apart and a bank: rows that are read in place."""
    wide, bank = rows(m, HIDDEN + 8, 41), rows(m, SLOTS * HIDDEN, 42).view(m, SLOTS, HIDDEN)
    bank[:, blocks:] = float("nan")
    weights = rows(3, HIDDEN, 43)
    return Mix(
        wide[:, 8:], [bank], blocks, weights[0], weights[1] * 0.05,
        weights[2] if norm else None, EPS, 2 * EPS, round_mix,
    )  # fmt: skip


class MixCall(Call):
    """One layer's tail and the AttnRes behind it."""

    def run_mixed(self, ranks: HostRanks, mix: Mix) -> tuple[list[list[Tensor]], list[Variant]]:
        """(delta, mixed, new_prefix) by rank, and the kernels."""
        row = MIXED_TABLE.lookup(self.target, self.m)
        assert row is not None
        copies = [self._copy(mix) for _ in range(self.tp)]
        norms = [self.norm.clone() for _ in range(self.tp)]
        inputs = []
        for r, one in enumerate(copies):
            weights = [one.score_norm_weight, one.score_proj_weight]
            weights += [] if one.out_norm_weight is None else [one.out_norm_weight]
            base = one.prefix._base
            assert base is not None
            given = [self.routed[r], self.shared[r], norms[r], self.up]
            inputs.append([*given, base, *one.blocks, *weights])
        recorders: list[Recorder] = []

        def call(rank: int, recorder: Recorder, space: Any) -> list[Tensor]:
            runtime: Any = recorder
            recorders.append(recorder)
            return list(launch_mixed(
                row, self.target, "tp", self.routed[rank], self.shared[rank], norms[rank],
                self.up, EPS, self.round_before, copies[rank], runtime=runtime, space=space,
            ))  # fmt: skip

        results, report = ranks.step(call, inputs)
        assert len(report.launches) == row.launches
        return results, [kernel for kernel, _ in recorders[0].launched]

    @staticmethod
    def _copy(mix: Mix) -> Mix:
        base = mix.prefix._base
        assert base is not None
        return replace(
            mix, prefix=base.clone()[:, 8:], blocks=[block.clone() for block in mix.blocks],
            score_norm_weight=mix.score_norm_weight.clone(),
            score_proj_weight=mix.score_proj_weight.clone(),
            out_norm_weight=None if mix.out_norm_weight is None else mix.out_norm_weight.clone(),
        )  # fmt: skip


def apart(target: str, delta: Tensor, mix: Mix) -> list[Tensor]:
    """[mixed, new_prefix] of the launch of AttnRes alone."""
    row = ATTN_RES.lookup(target, delta.shape[0])
    assert row is not None
    recorder = Recorder()
    runtime: Any = recorder
    found = launch_attn_res(
        row, target, mix.prefix, delta, mix.blocks, mix.num_blocks, mix.score_norm_weight,
        mix.score_proj_weight, mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
        runtime=runtime,
    )  # fmt: skip
    base = mix.prefix._base
    assert base is not None
    known = [delta, base, *mix.blocks, mix.score_norm_weight, mix.score_proj_weight, *found]
    known += [] if mix.out_norm_weight is None else [mix.out_norm_weight]
    HostRanks.simulate([recorder], [known])
    return found


def compare_apart(target: str, m: int, mix: Mix, *, multicast: bool = True) -> list[Variant]:
    """All ranks, then the tail alone on the same mailboxes; AttnRes alone; equal bits."""
    tp = chip_of(target)[1]
    ranks = HostRanks(tp, multicast=multicast, layout=TailMailbox(tp))
    call = MixCall(target, m, seed=m)
    results, kernels = call.run_mixed(ranks, mix)
    for result in results:
        assert all(same(a, b) for a, b in zip(result, results[0], strict=True))
    delta, mixed, new_prefix = results[0]
    assert_close(delta, call.expected(), k=LATENT, roundings=3)
    plain = call.run(ranks)
    assert same(plain[0], delta)
    assert all(space.error() is None for space in ranks.spaces)
    alone = apart(target, delta, mix)
    assert same(mixed, alone[0])
    assert same(new_prefix, alone[1])
    wanted = attn_res(
        mix.prefix, delta, mix.blocks, mix.num_blocks, mix.score_norm_weight,
        mix.score_proj_weight, mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
    )  # fmt: skip
    assert_close(mixed, wanted[0], k=HIDDEN)
    assert torch.equal(new_prefix, wanted[1])
    return kernels


def test_a_call_with_attn_res_and_one_without_on_the_same_mailboxes() -> None:
    (kernel,) = compare_apart("gb300:tp8", 1, operands(1, 8))
    assert config_of(kernel).blocks == 8


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
@pytest.mark.parametrize(("m", "blocks"), [(2, 0), (8, 8), (9, 8), (33, 1)])
def test_every_policy_row(target: str, m: int, blocks: int) -> None:
    kernels = compare_apart(target, m, operands(m, blocks), multicast=m != 8)
    ops = [kernel.op for kernel in kernels]
    assert ops == (["tail"] if m <= 8 else ["tail", "attn_res"])


@pytest.mark.nightly
@pytest.mark.parametrize("form", [{"norm": False}, {"round_mix": True}])
def test_every_form(form: dict[str, bool]) -> None:
    compare_apart("gb300:tp8", 3, operands(3, 4, **form))


@pytest.mark.parametrize("target", MIXED_TABLE.targets)
def test_up_to_8_tokens_are_one_launch(target: str) -> None:
    for m in range(1, 65):
        row, plain = MIXED_TABLE.lookup(target, m), TABLE.lookup(target, m)
        assert row is not None
        assert plain is not None
        if target == "reference":
            assert row.kernel == target
            continue
        assert (row.kernel, row.launches) == ((MIXED, 1) if m <= 8 else (plain.kernel, 2))
        assert row.hops == plain.hops
        if row.kernel == MIXED:
            config = config_of(variant(row, target, True, True, 8))
            assert (config.m, config.blocks, config.max_m) == (8, 8, 64)


def test_operands_that_do_not_fit_are_named() -> None:
    norm, up = rows(1, LATENT, 3)[0], torch.empty(HIDDEN, LATENT, dtype=torch.bfloat16)
    given = rows(2, LATENT, 1), rows(2, HIDDEN, 2), norm, up
    mix = operands(2, 8)
    assert misfit_mixed(*given, mix) == ""
    assert misfit_mixed(*given, replace(mix, out_norm_weight=None)) == ""
    assert "norm_weight is torch.float32" in misfit_mixed(given[0], given[1], norm.float(), up, mix)
    wrong: dict[str, dict[str, Any]] = {
        "prefix is torch.float32": {"prefix": mix.prefix.float()},
        "prefix is (2, 7160)": {"prefix": mix.prefix[:, 8:]},
        "blocks[0] is torch.float16": {"blocks": [mix.blocks[0].half()]},
        "score_norm_weight is torch.float32": {"score_norm_weight": mix.score_norm_weight.float()},
        "out_norm_weight is torch.float16": {"out_norm_weight": rows(1, HIDDEN, 1)[0].half()},
        "num_blocks is 9, the kernel takes 0 to 8": {"num_blocks": 9},
    }
    for message, fields in wrong.items():
        assert message in misfit_mixed(*given, replace(mix, **fields)), message


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({}, {"blocks": 9}, "blocks=9 is outside the kernel; use -1 to 8"),
        ({}, {"blocks": -2}, "blocks=-2 is outside the kernel; use -1 to 8"),
        ({"m": 9}, {"blocks": 0}, "m=9 is outside the kernel; use 1 to 8 with blocks=0"),
        ({"tp": 4, "rows": 64}, {"blocks": 8}, "m=8 is outside the kernel; use 1 to 3 with"),
        ({"tp": 4, "rows": 896}, {"blocks": 8}, "rows=896 is outside the kernel; use 7168 / tp"),
        ({}, {"norm": 2}, "norm=2 is outside the kernel; use 0 or 1"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)
    # Without AttnRes the shape is one that the kernel covers.
    BUILDER.variant("sm_103a", shape, {})

"""From the op's tensors to the launch: the host code of all ranks, its kernel in the simulator."""

from __future__ import annotations

import pytest
import torch
from tail_calls import HIDDEN, Call, check, rows

from host_ranks import HostRanks
from k3fuse.kernels.common.exchange import Workspace
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.launch import misfit, variant
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.policy import TABLE
from k3fuse.kernels.tail.problem import EPS


def test_two_calls_of_all_ranks_compute_the_op() -> None:
    """Both forms of the rounding, on one set of mailboxes."""
    ranks = HostRanks(8, multicast=True, layout=TailMailbox(8))
    counters = []
    for m, round_before in ((3, True), (1, False)):
        call = Call("gb300:tp8", m, seed=m, round_before=round_before)
        results = call.run(ranks)
        check(call, results)
        place = ranks.box.control // 4
        counters.append({int(s.memory.view(torch.int32)[place]) for s in ranks.spaces})
        assert all(space.error() is None for space in ranks.spaces)
    assert counters == [{1}, {2}]


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
@pytest.mark.parametrize("m", [1, 9, 33])
@pytest.mark.parametrize("multicast", [False, True])
def test_every_policy_row(target: str, m: int, multicast: bool) -> None:
    tp = chip_of(target)[1]
    call = Call(target, m, seed=m)
    check(call, call.run(HostRanks(tp, multicast=multicast, layout=TailMailbox(tp))))


@pytest.mark.parametrize("target", ["gb300:tp8", "gb300:tp16"])
def test_every_token_count_has_a_kernel_that_holds_it(target: str) -> None:
    _, tp = chip_of(target)
    owners = []
    for m in range(1, 65):
        row = TABLE.lookup(target, m)
        assert row is not None
        config = config_of(variant(row, target, True, multicast=True))
        assert config.m >= m
        assert (config.tp, config.hidden, config.max_m) == (tp, HIDDEN, 64)
        assert config.box == TailMailbox(tp)
        owners += [m] if config.two_shot else []
    # Two-shot where the latent partials of one-shot exchange would be more than 3.7 MB a rank.
    assert owners == [m for m in range(1, 65) if tp == 16 and m > 32]


def test_operands_that_do_not_fit_are_named() -> None:
    routed, shared = rows(2, LATENT, 1), rows(2, HIDDEN, 2)
    norm, up = rows(1, LATENT, 3)[0], torch.empty(HIDDEN, LATENT, dtype=torch.bfloat16)
    assert misfit(routed, shared, norm, up) == ""
    assert "norm_weight is torch.float32" in misfit(routed, shared, norm.float(), up)
    assert "up_weight is (7160, 3584)" in misfit(routed, shared, norm, up[8:])
    assert "up_weight is torch.float16" in misfit(routed, shared, norm, up.half())


def test_on_a_cpu_the_composition_runs_and_without_one_the_device_is_named() -> None:
    routed, shared = rows(2, LATENT, 1), rows(2, HIDDEN, 2)
    norm, up = rows(1, LATENT, 3)[0], torch.empty(HIDDEN, LATENT, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="'latent_tail' runs on a GPU, the operands are on cpu"):
        torch.ops.k3fuse.tail(
            routed, shared, norm, up, EPS, target="gb300:tp8", group="", composition=""
        )


def test_a_workspace_is_one_area_a_layout() -> None:
    boxes = HostRanks(2, multicast=False, layout=TailMailbox(2)).spaces
    assert all(isinstance(space, Workspace) and space.armed() for space in boxes)
    layout = TailMailbox(16)
    assert layout.total < 20 << 20
    with pytest.raises(ValueError, match="tp=3: the 7168 columns"):
        TailMailbox(3)

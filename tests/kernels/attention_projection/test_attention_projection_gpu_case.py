"""The projection's GPU cases on a stand-in device: order, bookkeeping and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.bench import ARMED, BF16, GPU_CASES, Local, Shared
from k3fuse.kernels.attention_projection.builder import config_of
from k3fuse.kernels.attention_projection.policy import STATIONARY
from k3fuse.kernels.attention_projection.sharded_builder import OP, sharded_of
from k3fuse.kernels.attention_projection.share import PRODUCERS
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.check.gpu import run_case
from stand_in import StandIn, at

K = 512


class Functional(StandIn):
    """Kernels that do what they promise; one that would poll in vain is an error.

    broken: "scaled" outputs, words that are left "unarmed", or columns that are not "sent".
    """

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        self.launched.append(variant)
        by_name = dict(zip(parameter_names(variant), values, strict=True))
        given = SimpleNamespace(**by_name)
        x = at(given.x, (given.m, K)).double()
        scale = 1.01 if self.broken == "scaled" else 1.0

        def product(i: int, rows: int) -> Tensor:
            return (x @ at(by_name[f"weight{i}"], (rows, K)).double().t() * scale).to(BF16)

        if variant.op != OP:
            for i, rows in enumerate(config_of(variant).rows):
                at(by_name[f"out{i}"], (given.m, rows)).copy_(product(i, rows))
            return
        share = sharded_of(variant).share
        box, m = share.box, given.m
        own = at(given.mailbox, (box.total // 4,), torch.int32)
        counters = own[box.control // 4 : box.control // 4 + PRODUCERS]
        call = int(counters[0])
        counters.fill_(call + 1)

        def rows_of(address: int) -> Tensor:
            words = at(address, (box.total // 4,), torch.int32)
            start = box.at(call, 0) // 4
            return words[start : start + m * box.row // 4].view(m, -1).view(BF16)

        for i, part in enumerate(share.parts):
            found = product(i, part.rows)
            out = at(by_name[f"out{part.weight}"], (m, share.rows[part.weight]))
            if not part.split:
                out[:, part.start :] = found
                continue
            first = share.firsts[part.weight] + given.rank * part.rows
            peers = [by_name[f"mailbox{owner}"] for owner in range(share.tp)]
            for owner, peer in enumerate(peers):
                if self.broken != "sent" or owner == given.rank:
                    rows_of(peer)[:, first : first + part.rows] = found + 0.0
        mine = rows_of(given.mailbox)
        assert not (mine.view(torch.int32) == ARMED).any(), "polls what nobody sends"
        for i, columns in enumerate(share.split):
            first = share.firsts[i]
            out = at(by_name[f"out{i}"], (m, share.rows[i]))
            out[:, :columns] = mine[:, first : first + columns]
        if self.broken != "unarmed":
            mine.view(torch.int32).fill_(ARMED)


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3fuse.kernels.check.gpu.REPEATS", 1)
    monkeypatch.setattr("k3fuse.kernels.check.gpu.ROUNDS", 2)


def local(device: Functional) -> Local:
    return Local(device, "small", 8, (40, 24), tokens=(1, 9), timed=(2,), k=K)


def shared(device: Functional) -> Shared:
    return Shared(device, "shared", 8, (64, 32, 24), (64, 32, 0), tokens=(1, 9), timed=(2,), k=K)


def test_a_rank_by_itself() -> None:
    device = Functional()
    case = local(device)
    assert case.ways(1) == (STATIONARY,)
    done = run_case(case, device, replays=4)
    assert done.passed, done.faults
    assert done.replays == 4
    assert {v.arch for v in device.launched} == {"sm_90a"}
    # A launch is a second on this device; the others launch none of our kernels.
    (times,) = done.microseconds.values()
    assert times == {STATIONARY: pytest.approx(1e6), "torch.mm": 0, "copy": 0}


def test_ranks_that_share_rows() -> None:
    device = Functional()
    case = shared(device)
    done = run_case(case, device, replays=4)
    assert done.passed, done.faults
    sharded = [v for v in device.launched if v.op == OP]
    assert len(sharded) >= 8 * (2 + 4)
    assert {(v.arch, v.tuning("multicast"), v.tuning("stream")) for v in sharded} == {
        ("sm_90a", 0, 0)
    }
    (times,) = done.microseconds.values()
    assert times == {
        f"shared, {STATIONARY}": pytest.approx(1e6),
        f"whole weights, {STATIONARY}": pytest.approx(1e6), "torch.mm": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "fault", "make"),
    [
        ("scaled", "elements of out0 are not the exact ones", local),
        ("scaled", "elements of out0 of rank 0 are not the exact ones", shared),
        ("unarmed", "the last rank's mailbox is not armed", shared),
        ("sent", "the first rank's mailbox does not hold the others' columns", shared),
    ],
)
def test_a_wrong_kernel_is_a_fault(
    broken: str, fault: str, make: Callable[[Functional], Local]
) -> None:
    device = Functional(broken)
    done = run_case(make(device), device, replays=1)
    assert fault in "; ".join(done.faults)


def test_the_sizes() -> None:
    assert list(GPU_CASES) == [
        "kda-tp8", "kda-tp16", "mla-tp8", "mla-tp16", "mla-shared-tp8", "mla-shared-tp16",
    ]  # fmt: skip

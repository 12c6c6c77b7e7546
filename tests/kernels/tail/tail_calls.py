"""The tail's host code on every rank, its kernels in the simulator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.policy import chip_of
from k3fuse.kernels.tail.launch import launch
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.policy import TABLE
from k3fuse.kernels.tail.problem import EPS
from k3fuse.kernels.tail.reference import latent_up
from tolerances import assert_close

HIDDEN = 7168


def rows(m: int, width: int, seed: int, scale: float = 1.0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(m, width, generator=made) * scale).bfloat16()


class Call:
    """One layer's tail: a routed and a shared partial of each rank, the weights of all."""

    def __init__(self, target: str, m: int, seed: int, round_before: bool = True) -> None:
        self.target, self.m, self.round_before = target, m, round_before
        _, self.tp = chip_of(target)
        self.routed = [rows(m, LATENT, seed + r) for r in range(self.tp)]
        self.shared = [rows(m, HIDDEN, seed + 100 + r) for r in range(self.tp)]
        self.norm = rows(1, LATENT, seed + 200)[0]
        self.up = rows(HIDDEN, LATENT, seed + 201, LATENT**-0.5)

    def expected(self) -> Tensor:
        """The reference of one rank that has the whole sum."""
        latent = ordered_sum(self.routed).bfloat16()
        up = latent_up(latent, self.norm, self.up, EPS, "", self.round_before)
        return up + ordered_sum(self.shared).bfloat16()

    def run(self, ranks: HostRanks) -> list[Tensor]:
        """The host code of every rank, then the kernels; outputs by rank."""
        row = TABLE.lookup(self.target, self.m)
        assert row is not None
        norms = [self.norm.clone() for _ in range(self.tp)]
        inputs = [[self.routed[r], self.shared[r], norms[r], self.up] for r in range(self.tp)]

        def call(rank: int, recorder: Recorder, space: Any) -> list[Tensor]:
            runtime: Any = recorder
            return [
                launch(
                    row, self.target, "tp", self.routed[rank], self.shared[rank], norms[rank],
                    self.up, EPS, self.round_before, runtime=runtime, space=space,
                )
            ]  # fmt: skip

        results, report = ranks.step(call, inputs)
        assert len(report.launches) == row.launches == 1
        return [result[0] for result in results]


def check(call: Call, results: list[Tensor]) -> None:
    for rank, got in enumerate(results):
        assert torch.equal(got.view(torch.int16), results[0].view(torch.int16)), rank
    assert_close(results[0], call.expected(), k=LATENT, roundings=3)

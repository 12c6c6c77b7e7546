"""The tail with AttnRes behind it on one GPU that stands in for all ranks.

In one launch and in two: the finished rows, the mixed ones and the prefix must have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.check.gpu import Device, Timed
from k3fuse.kernels.check.gpu_ranks import Recorder
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import EXACT, compare, tolerance
from k3fuse.kernels.tail.launch import launch_mixed
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.one_device import Emulated, Made
from k3fuse.kernels.tail.policy import MIXED, ONE_SHOT
from k3fuse.kernels.tail.problem import BF16, EPS

TOKENS = (1, 2, 3, 5, 8)
TIMED = (1, 8)
BLOCKS = 8
WAYS = {"one launch": MIXED, "two launches": ONE_SHOT}


class EmulatedMix(Emulated):
    """All ranks of one group on one device; AttnRes of 8 blocks with an output norm."""

    def __init__(
        self,
        device: Device,
        tp: int,
        *,
        tokens: Sequence[int] = TOKENS,
        timed: Sequence[int] = TIMED,
        seed: int = 0,
    ) -> None:
        super().__init__(device, tp, tokens=tokens, timed=timed, seed=seed)
        self.name = f"tp{tp}_attn_res"
        rows = max((*tokens, *timed))
        generator = torch.Generator().manual_seed(seed + 1)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(BF16)

        self.sources = {
            "prefix": normal(rows, HIDDEN),
            "bank": normal(rows, BLOCKS, HIDDEN),
            "score_norm": normal(HIDDEN),
            "score_proj": normal(HIDDEN, scale=0.05),
            "out_norm": normal(HIDDEN),
        }
        self.mix_there = {name: device.put(tensor) for name, tensor in self.sources.items()}
        self.notes = [
            *self.notes[:2],
            "time: rank 0 alone with the other ranks' rows delivered, PDL without a predecessor to "
            "overlap; one launch against the tail and AttnRes, both in one graph",
        ]

    def ways(self, m: int) -> Sequence[str]:
        """AttnRes in the tail's launch, and in its own."""
        return list(WAYS)

    def wrong(self, m: int, way: str) -> str:
        """As for the tail; mixed rows and prefix as the reference makes them of its rows."""
        if fault := super().wrong(m, way):
            return fault
        outputs = {name: rows[:, 0].cpu() for name, rows in self.outputs(m, way).items()}
        given = _mix(self.sources, m)
        mixed, new_prefix = attn_res(
            given.prefix, outputs["out"], given.blocks, BLOCKS, given.score_norm_weight,
            given.score_proj_weight, given.out_norm_weight, EPS, EPS, False,
        )  # fmt: skip
        for name, wanted, band in (
            ("mixed", mixed, tolerance(BF16, HIDDEN)), ("new_prefix", new_prefix, EXACT)
        ):  # fmt: skip
            inside = compare(outputs[name], wanted, band)
            if not inside.ok:
                return f"{name} is outside the tolerance: {inside}"
        return ""

    def time(self, m: int) -> Timed:
        """Rank 0's one launch, and its two, the others' rows there."""
        copies = self._copies()
        ways = {way: self._launches(self._row(m, way), m, copies) for way in WAYS}
        return Timed(self._put_back(m, two_shot=False), ways)

    def _row(self, m: int, way: str) -> Row:
        return Row(1, 8, WAYS[way], 1 if WAYS[way] == MIXED else 2, "emulated")

    def _record(self, row: Row, m: int, rank: int, weight: Tensor, timeout: int = 0) -> Made:
        recorder = Recorder(self.device.arch, timeout)
        runtime: Any = recorder
        there = self.there
        results = launch_mixed(
            row, self.target, "emulated", there["routed"][rank, :m], there["shared"][rank, :m],
            there["norm"], weight, EPS, True, _mix(self.mix_there, m), runtime=runtime,
            space=lambda group, tp: self.spaces[rank],
        )  # fmt: skip
        return Made(recorder.calls, dict(zip(("out", "mixed", "new_prefix"), results, strict=True)))


def _mix(sources: Mapping[str, Tensor], m: int) -> Mix:
    """The first m tokens."""
    return Mix(
        sources["prefix"][:m], [sources["bank"][:m]], BLOCKS, sources["score_norm"],
        sources["score_proj"], sources["out_norm"], EPS, EPS, False,
    )  # fmt: skip

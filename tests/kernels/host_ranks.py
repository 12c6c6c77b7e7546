"""The host code of every rank, one after the other; their kernels then run in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.exchange import Mapped, Workspace
from k3fuse.kernels.common.mailbox import Mailbox
from k3fuse.kernels.simulator import Inside, Launch, Multicast, Owned, simulate_sequence
from k3fuse.kernels.simulator.sequence import SequenceReport
from stored import store

MULTICAST = 1 << 60  # an address that no tensor has


class Recorder:
    """A runtime that keeps what would have been launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Variant, tuple[int, ...]]] = []

    def kernel(self, variant: Variant) -> Callable[..., None]:
        return lambda *values: self.launched.append((variant, values))


class HostRanks:
    """`tp` ranks with mailboxes in host memory. multicast: whether the fabric has it.

    layout: of other mailboxes than the output projection's.
    """

    def __init__(self, tp: int, *, multicast: bool, layout: Any = None) -> None:
        self.tp = tp
        self.box = layout or Mailbox(tp)
        self.mailboxes = [torch.empty(self.box.total, dtype=torch.uint8) for _ in range(tp)]
        addresses = tuple(m.data_ptr() for m in self.mailboxes)
        provider: Any = None
        self.spaces = [
            Workspace("tp", rank, self.box, memory, Mapped(
                addresses, MULTICAST if multicast else 0, None), provider)
            for rank, memory in enumerate(self.mailboxes)
        ]  # fmt: skip
        for space in self.spaces:
            space.fill()

    def step(
        self, call: Callable[[int, Recorder, Callable[[str, int], Workspace]], list[Tensor]],
        inputs: list[list[Tensor]], seed: int | None = None,
    ) -> tuple[list[list[Tensor]], SequenceReport]:  # fmt: skip
        """Call the host code of each rank, then run what they launched; returns their results.

        inputs: the tensors of each rank that the kernels may touch, besides results and mailboxes.
        """
        recorders = [Recorder() for _ in range(self.tp)]
        results = []
        for rank, recorder in enumerate(recorders):

            def space(_: str, tp: int, at: int = rank) -> Workspace:
                assert tp == self.tp
                return self.spaces[at]

            results.append(call(rank, recorder, space))
        known = [[*inputs[rank], *results[rank]] for rank in range(self.tp)]
        return results, self.simulate(recorders, known, self.mailboxes, seed)

    @classmethod
    def simulate(
        cls,
        recorders: list[Recorder],
        known: list[list[Tensor]],
        mailboxes: list[Tensor] | None = None,
        seed: int | None = None,
    ) -> SequenceReport:
        """Run what each rank launched. known: the tensors of each rank that may be touched."""
        launches = []
        for place, (variant, _) in enumerate(recorders[0].launched):
            assert all(r.launched[place][0] == variant for r in recorders)
            built = store().get(variant)
            plan = built.plan
            params = [
                [
                    cls._value(p.kind, v, known[rank], mailboxes or [])
                    for p, v in zip(plan.parameters, recorder.launched[place][1], strict=True)
                ]
                for rank, recorder in enumerate(recorders)
            ]
            launches.append(
                Launch(
                    built.ptx, plan.grid, plan.block, params, cluster=plan.cluster,
                    dynamic_smem=plan.dynamic_smem, pdl=plan.pdl,
                    names=[p.name for p in plan.parameters],
                )
            )  # fmt: skip
        return simulate_sequence(launches, ranks=len(recorders), seed=seed)

    @staticmethod
    def _value(kind: str, value: int, tensors: list[Tensor], mailboxes: list[Tensor]) -> Any:
        if kind != "pointer" or not value:
            return value
        if value == MULTICAST:
            return Multicast(tuple(mailboxes))
        for rank, mailbox in enumerate(mailboxes):
            if value == mailbox.data_ptr():
                return Owned(mailbox, rank)
        for tensor in tensors:
            offset = value - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                return Inside(tensor, offset)
        raise AssertionError(f"{value:#x} is the address of no tensor of the rank")

"""The MoE half of a layer: router, experts and tail of all ranks, each on what came before it.

The host code of the ops (policy row, launch) runs for every rank; all launches then run in the
simulator, in stream order, with Kimi K3's sizes. Few experts are in memory: the correction bias
chooses among those alone.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from host_ranks import Recorder
from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.exchange import Mapped, Workspace
from k3fuse.kernels.common.numerics import linear, rms_norm
from k3fuse.kernels.common.policy import Row, Table
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.experts import launch as experts
from k3fuse.kernels.experts import policy as experts_policy
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.builder import k3
from k3fuse.kernels.experts.cases import SITU, Problem, kernel, problem
from k3fuse.kernels.router import launch as router
from k3fuse.kernels.router import policy as router_policy
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.router.reference import Shared
from k3fuse.kernels.router.reference import router as route
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.simulator import (
    Inside,
    Launch,
    Multicast,
    Owned,
    TensorMap,
    simulate_sequence,
)
from k3fuse.kernels.tail.mailbox import TailMailbox
from stored import store

TARGET, TP, HIDDEN, LATENT = "gb300:tp8", 8, 7168, 3584
EXPERTS, IN_MEMORY = 896, 18
EPS = 1e-5
BF16 = torch.bfloat16
# A rounding that falls on the other side moves delta by less than one of its own: the slots' rows,
# their sum, the normalised latent row (twice), up, delta. 1 % is more than five of them.
ROUNDINGS = 5


def row_of(table: Table, m: int) -> Row:
    row = table.lookup(TARGET, m)
    assert row is not None
    return row


class Boxes:
    """Mailboxes of one layout, with a multicast address that no tensor has."""

    def __init__(self, layout: Any, multicast: int) -> None:
        self.memory = [torch.empty(layout.total, dtype=torch.uint8) for _ in range(TP)]
        self.multicast = multicast
        addresses = tuple(box.data_ptr() for box in self.memory)
        none: Any = None
        self.spaces = [
            Workspace("tp", rank, layout, box, Mapped(addresses, multicast, none), none)
            for rank, box in enumerate(self.memory)
        ]
        for space in self.spaces:
            space.fill()

    def value(self, address: int) -> Multicast | Owned | None:
        """What an address means to the simulator."""
        if address == self.multicast:
            return Multicast(tuple(self.memory))
        for rank, box in enumerate(self.memory):
            if address == box.data_ptr():
                return Owned(box, rank)
        return None


class Half:
    """The MoE half of a layer on all ranks; weights of every rank, mailboxes of both exchanges."""

    def __init__(self) -> None:
        self.front = Boxes(FrontMailbox(TP, EXPERTS, LATENT), 1 << 60)
        self.tail = Boxes(TailMailbox(TP), 1 << 61)
        variant = kernel("sm_103a", k3(TP, 8))
        self.ranks = [problem(variant, 1, seed=r, experts=IN_MEMORY) for r in range(TP)]
        drawn = torch.Generator().manual_seed(1)

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=drawn) * columns**-0.5).to(BF16)

        self.gate, self.down, self.up = (
            matrix(EXPERTS, HIDDEN), matrix(LATENT, HIDDEN), matrix(HIDDEN, LATENT),
        )  # fmt: skip
        width = 2 * 6144 // TP
        self.shared = [
            Shared([matrix(width, HIDDEN)], SITU.name, SITU.beta, SITU.linear_beta)
            for _ in range(TP)
        ]
        self.norm = (1 + 0.1 * torch.randn(LATENT, generator=drawn)).to(BF16)
        self.bias = 0.05 * torch.randn(EXPERTS, generator=drawn)
        self.bias[IN_MEMORY:] -= 2  # scores are below 1
        # One device has one set of counts; here each rank stands for a device.
        count = experts.arrivals(self.norm.device)
        self.counts = [torch.zeros_like(count) for _ in range(TP)]
        self.form = Form(EXPERTS, LATENT, 16, renormalize=True, bias=True, quantize=True, plan=True)

    def call(self, rank: int, m: int, x: Tensor, runtime: Any) -> list[Tensor]:
        """The host code of one rank: what its router returned, then delta."""
        made = router.launch(
            row_of(router_policy.TABLE, m), TARGET, "tp", self.form, x, self.gate, self.down,
            shared=self.shared[rank], bias=self.bias, eps=1e-20, runtime=runtime,
            space=lambda group, tp: self.front.spaces[rank],
        )  # fmt: skip
        weights, ids, latent, shared_row, latent_q, latent_scale = made[:6]
        own = self.ranks[rank]
        given = experts.Operands(
            latent, weights, ids, own.w13, own.w13_scale, own.w2, own.w2_scale, None, [],
            down_of(own), self.norm, self.up, shared_row, latent_q, latent_scale,
        )  # fmt: skip
        row = row_of(experts_policy.TAKING, m)
        assert experts.misfit(row, TARGET, given, SITU) == ""
        with mock.patch.object(experts, "arrivals", return_value=self.counts[rank]):
            (delta,) = experts.launch(
                row, TARGET, "tp", given, SITU, EPS, {"round_before_weight"}, runtime=runtime,
                space=lambda group, tp: self.tail.spaces[rank],
            )  # fmt: skip
        return [*made, delta]

    def expected(self, x: Tensor, drop: int = -1) -> Tensor:
        """The composition on the CPU; drop: a rank whose routed partial is left out."""
        routed, shared = [], []
        for rank, own in enumerate(self.ranks):
            weights, ids, latent, row = route(
                x, self.gate, self.bias, self.down, 16, "sigmoid", True, 1.0, 1e-20, BF16,
                self.shared[rank],
            )  # fmt: skip
            rows = reference.routed_rows(
                latent, ids, own.w13, own.w13_scale, own.w2, own.w2_scale, SITU, False
            )
            part = reference.weighted_sum(rows, weights)
            routed.append(torch.zeros_like(part) if rank == drop else part)
            shared.append(linear(row, down_of(own)))
        latent = rms_norm(ordered_sum(routed).to(BF16), self.norm, EPS, BF16, True)
        return linear(latent, self.up) + ordered_sum(shared).to(BF16)


def down_of(own: Problem) -> Tensor:
    """The shared expert's down-projection."""
    assert own.shared is not None
    return own.shared[1]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All memory that the host code makes: its kernels run later."""
    found: list[Tensor] = []
    empty = Tensor.new_empty

    def keep(self: Tensor, *size: Any, **how: Any) -> Tensor:
        found.append(empty(self, *size, **how))
        return found[-1]

    monkeypatch.setattr(Tensor, "new_empty", keep)
    return found


def simulate(half: Half, recorders: list[Recorder], known: list[list[Tensor]]) -> int:
    """Run what each rank launched; known: its tensors. Returns the number of launches."""
    launches = []
    for place, (variant, _) in enumerate(recorders[0].launched):
        built = store().get(variant)
        plan = built.plan
        params = []
        for rank, recorder in enumerate(recorders):
            assert recorder.launched[place][0] == variant
            values = zip(plan.parameters, recorder.launched[place][1], strict=True)
            params.append([value_of(half, known[rank], p, value) for p, value in values])
        launches.append(
            Launch(
                built.ptx, plan.grid, plan.block, params, cluster=plan.cluster,
                dynamic_smem=plan.dynamic_smem, pdl=plan.pdl,
                names=[p.name for p in plan.parameters],
            )
        )  # fmt: skip
    simulate_sequence(launches, ranks=len(recorders))
    return len(launches)


def value_of(half: Half, tensors: list[Tensor], parameter: Any, value: Any) -> Any:
    """One parameter as the simulator takes it."""
    if parameter.kind not in ("pointer", "tensor_map") or not value:
        return value
    address = value.address if isinstance(value, Rows) else value
    if (found := half.front.value(address) or half.tail.value(address)) is not None:
        return found
    for space in (*half.front.memory, *half.tail.memory):
        offset = address - space.data_ptr()
        if 0 < offset < space.nbytes:  # words beside the slots
            return Inside(space, offset)
    (tensor,) = [t for t in tensors if 0 <= address - t.data_ptr() < t.nbytes]
    if parameter.tiles is None:
        return Inside(tensor, address - tensor.data_ptr())
    tiles = parameter.tiles
    if isinstance(value, Rows):
        tiles = tiles.with_rows(value.number, value.pitch)
    return TensorMap.of(tensor, tiles)


@pytest.mark.nightly
def test_each_op_takes_what_the_one_before_it_made(kept: list[Tensor]) -> None:
    """One token, then three, on one set of mailboxes; four launches a step."""
    pytest.importorskip("cutlass")
    half = Half()
    for m in (1, 3):
        x = torch.randn(m, HIDDEN, generator=torch.Generator().manual_seed(m)).to(BF16)
        recorders = [Recorder() for _ in range(TP)]
        results, known = [], []
        for rank, recorder in enumerate(recorders):
            kept.clear()
            results.append(half.call(rank, m, x, recorder))
            own = half.ranks[rank]
            known.append([
                *kept, x, half.gate, half.down, half.up, half.norm, half.bias, own.w13,
                own.w13_scale, own.w2, own.w2_scale, down_of(own), *half.shared[rank].weights,
                half.counts[rank],
            ])  # fmt: skip
        assert simulate(half, recorders, known) == 4
        for got in results[1:]:
            for mine, first in zip(got[:3], results[0][:3], strict=True):
                assert torch.equal(mine, first)  # weights, ids, latent: the same on all ranks
            assert torch.equal(got[-1].view(torch.int16), results[0][-1].view(torch.int16))
        band = tolerance(BF16, HIDDEN, ROUNDINGS)
        delta, wanted = results[0][-1], half.expected(x)
        found = compare(delta, wanted, band)
        assert found.ok, found
        assert not compare(delta, half.expected(x, drop=5), band).ok  # the control
        assert not compare((delta.float() * 1.01).to(BF16), wanted, band).ok

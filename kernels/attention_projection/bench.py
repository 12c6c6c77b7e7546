"""The attention projection on one GPU: `k3fuse kernels gpu attention_projection`.

`Local` runs a rank's projection by each engine that the chip has, and times it beside torch.mm and
beside a copy that moves as many bytes. `Shared` runs the ranks of a row-sharded one after the
other, each with the others' columns delivered into both parities of its mailbox, so that nobody
waits. The launches are those of the op's own host code, built for the device.

Inputs are small multiples of powers of two: every sum is exact in FP32, whatever its order, so each
output has one right value, by either engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection import launch, sharded_launch
from k3fuse.kernels.attention_projection.builder import KDA, MLA, STREAM_ARCHS
from k3fuse.kernels.attention_projection.policy import (
    SHARDED,
    SHARDED_STREAM,
    STATIONARY,
    STREAM,
    TABLE,
)
from k3fuse.kernels.attention_projection.sharded_builder import SPLIT
from k3fuse.kernels.attention_projection.share import PRODUCERS, RowMailbox
from k3fuse.kernels.check.gpu import Device, GpuCase, Timed
from k3fuse.kernels.check.gpu_ranks import TIMEOUT, Call, Recorder, exact, workspaces
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.mailbox import PARITIES, SENTINEL
from k3fuse.kernels.common.policy import TP_SIZES, Row, Table

BF16 = torch.bfloat16
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64)
TIMED = (1, 2, 4, 8, 16, 64)
ARMED = SENTINEL - (1 << 32)


def engines(device: Device) -> tuple[str, ...]:
    """What the chip has: first the one that the policy names there."""
    return (STREAM, STATIONARY) if device.arch in STREAM_ARCHS else (STATIONARY,)


def row_of(table: Table, target: str, m: int, kernel: str) -> Row:
    """The policy's row for m tokens, by another kernel."""
    found = table.lookup(target, m)
    if found is None:
        raise ValueError(f"m={m} is outside the policy of {target}")
    return replace(found, kernel=kernel)


class Local:
    """One rank's projection. rows: of each weight. tokens: to compare; timed: to time; k: size."""

    op = "attention_projection"

    def __init__(
        self,
        device: Device,
        name: str,
        tp: int,
        rows: Sequence[int],
        *,
        tokens: Sequence[int] = TOKENS,
        timed: Sequence[int] = TIMED,
        k: int = HIDDEN,
        seed: int = 0,
    ) -> None:
        self.device, self.name, self.target = device, name, f"gb300:tp{tp}"
        self.tokens, self.timed = tokens, timed
        made = torch.Generator().manual_seed(seed)
        self.x = exact(made, max((*tokens, *timed)), k, unit=1.0)
        self.weights = [exact(made, n, k, unit=2.0**-7) for n in rows]
        self.there = device.put(self.x), [device.put(w) for w in self.weights]
        self.recorded: dict[tuple[int, str], tuple[list[Call], list[Tensor]]] = {}
        self.marker = device.put(torch.zeros(1))
        self.notes = [
            f"one rank's weights of {', '.join(map(str, rows))} rows, K = {k}",
            "copy: reads and writes together as many bytes as x, weights and outputs have: the "
            "floor at the bandwidth that a copy reaches here",
            "time: PDL without a predecessor to overlap",
        ]

    def ways(self, m: int) -> Sequence[str]:
        """Each engine of the chip."""
        return engines(self.device)

    def step(self, m: int, way: str) -> None:
        """One call."""
        calls, outs = self._calls(m, way)
        for out in outs:
            out.fill_(float("nan"))
        for call in calls:
            self.device.launch(*call)

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """[m, n] of each weight."""
        return {f"out{i}": out for i, out in enumerate(self._calls(m, way)[1])}

    def wrong(self, m: int, way: str) -> str:
        """Every element bit by bit."""
        for (name, out), wanted in zip(self.outputs(m, way).items(), self.expected, strict=True):
            differ = int((bits(out.cpu()) != bits(wanted[:m])).sum())
            if differ:
                return f"{differ} elements of {name} are not the exact ones"
        return ""

    def compared(self) -> Mapping[str, int]:
        """Nothing more: all bits have been compared with the exact ones."""
        return {}

    def after(self) -> str:
        """Nothing is kept between two steps."""
        return ""

    def time(self, m: int) -> Timed:
        """Each engine, torch.mm, and a copy of as many bytes; weights in turn."""
        x, weights = self.there[0][:m], self.there[1]
        size = sum(w.nbytes for w in weights)
        copies = [[w.clone() for w in weights] for _ in range(2 + 2 * self.device.l2_bytes // size)]
        moved = size + x.nbytes + sum(m * w.shape[0] * 2 for w in weights)
        halves = [
            (torch.cat([w.view(-1) for w in copy])[: moved // 4], x.new_empty(moved // 4))
            for copy in copies
        ]
        ways: dict[str, Callable[[int], None]] = {}
        for engine in engines(self.device):
            made = [self._record(m, engine, copy) for copy in copies]
            ways[engine] = partial(self._run, made)

        def stock(number: int) -> None:
            for weight in copies[number % len(copies)]:
                torch.mm(x, weight.t())

        def floor(number: int) -> None:
            source, target = halves[number % len(halves)]
            target.copy_(source)

        def mark() -> None:
            # An empty graph is none: the marker is in both that are subtracted.
            self.marker.zero_()

        return Timed(mark, {**ways, "torch.mm": stock, "copy": floor})

    @cached_property
    def expected(self) -> list[Tensor]:
        """The exact outputs of all tokens, on the CPU."""
        return [(self.x.double() @ w.double().t()).to(BF16) for w in self.weights]

    def _run(self, made: Sequence[tuple[list[Call], list[Tensor]]], number: int) -> None:
        for call in made[number % len(made)][0]:
            self.device.launch(*call)

    def _calls(self, m: int, way: str) -> tuple[list[Call], list[Tensor]]:
        """Launches and outputs, recorded once: graphs need fixed addresses."""
        if (m, way) not in self.recorded:
            self.recorded[m, way] = self._record(m, way, self.there[1])
        return self.recorded[m, way]

    def _record(
        self, m: int, way: str, weights: Sequence[Tensor]
    ) -> tuple[list[Call], list[Tensor]]:
        recorder = Recorder(self.device.arch, 0)
        runtime: Any = recorder
        row = row_of(TABLE, self.target, m, way)
        outs = launch.launch(row, self.target, self.there[0][:m], weights, runtime=runtime)
        return recorder.calls, outs


class Shared(Local):
    """All ranks of a row-sharded projection, one after the other. split: see `Share`."""

    def __init__(
        self, device: Device, name: str, tp: int, rows: Sequence[int], split: Sequence[int],
        **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__(device, name, tp, rows, **sizes)
        self.tp, self.split = tp, tuple(split)
        self.box = RowMailbox(tp, sum(split))
        self.words = device.put(torch.zeros(tp, self.box.total // 4, dtype=torch.int32))
        self.spaces = workspaces(self.box, self.words)
        for space in self.spaces:
            space.fill()
        self.sent = device.put(self.delivered)
        self.per_rank: dict[tuple[int, str], list[tuple[list[Call], list[Tensor]]]] = {}
        self.notes = [
            f"{tp} ranks one after the other on one device, the others' columns delivered; rows "
            "published by stores to each mailbox; the ranks' own rows are equal, too",
            "time: rank 0 alone with the other ranks' columns there, so without the hop; whole "
            "weights by the same engine",
        ]

    def step(self, m: int, way: str) -> None:
        """One call of every rank."""
        rows = self._rows(m)
        for rank, (calls, outs) in enumerate(self._ranks(m, way)):
            for out in outs:
                out.fill_(float("nan"))
            rows[rank].copy_(self.sent[rank, :m].expand(PARITIES, -1, -1))
            for call in calls:
                self.device.launch(*call)

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """[m, ranks, n] of each weight."""
        made = [outs for _, outs in self._ranks(m, way)]
        return {
            f"out{i}": torch.stack([outs[i] for outs in made], dim=1)
            for i in range(len(self.weights))
        }

    def wrong(self, m: int, way: str) -> str:
        """Every element on every rank, and what the mailboxes hold behind the call."""
        for i, (name, out) in enumerate(self.outputs(m, way).items()):
            wanted = self.expected[i][:m].clone()
            wanted[:, : self.split[i]] += 0.0
            for rank in range(self.tp):
                differ = int((bits(out[:, rank].cpu()) != bits(wanted)).sum())
                if differ:
                    return f"{differ} elements of {name} of rank {rank} are not the exact ones"
        rows = self._rows(m).cpu()
        parity = (int(self.control[0, 0]) - 1) % PARITIES
        if not bool((rows[-1, parity] == ARMED).all()):
            return "the last rank's mailbox is not armed behind its call"
        # The first rank's holds what the others have published behind its call.
        if not torch.equal(rows[0, parity], self.delivered[0, :m]):
            return "the first rank's mailbox does not hold the others' columns"
        return ""

    def after(self) -> str:
        """All counters equal, no poll gave up."""
        for space in self.spaces:
            if (error := space.error()) is not None:
                return f"rank {space.rank}: {error.sentence()}"
        low, high = (int(number) for number in self.control.aminmax())
        return "" if low == high else f"counters of calls differ: {low} to {high}"

    def time(self, m: int) -> Timed:
        """Rank 0's kernel, the others' columns there; whole weights; torch.mm."""
        whole = super().time(m)
        engine = engines(self.device)[0]
        size = sum(w.nbytes for w in self.weights) // 2
        copies = [
            [w.clone() for w in self.there[1]] for _ in range(2 + 2 * self.device.l2_bytes // size)
        ]
        made = [self._share(m, engine, 0, copy) for copy in copies]
        first = self._rows(m)[0, 0]
        sent = self.sent[0, :m].clone()

        def put_back() -> None:
            self.control[0].zero_()
            first.copy_(sent)

        ways = {f"whole weights, {engine}": whole.ways[engine], "torch.mm": whole.ways["torch.mm"]}
        return Timed(put_back, {f"shared, {engine}": partial(self._run, made), **ways})

    @property
    def control(self) -> Tensor:
        """Counters of calls [rank, CTA]."""
        start = self.box.control // 4
        return self.words[:, start : start + PRODUCERS]

    @cached_property
    def delivered(self) -> Tensor:
        """Words [rank, token, columns / 2] of all other ranks' columns; a rank's own are armed."""
        rows = [out[:, :n] + 0.0 for out, n in zip(self.expected, self.split, strict=True)]
        words = torch.cat(rows, dim=1).view(torch.int32).repeat(self.tp, 1, 1)
        first = 0
        for columns in self.split:
            share = columns // self.tp // 2
            for rank in range(self.tp):
                words[rank, :, first + rank * share : first + (rank + 1) * share] = ARMED
            first += columns // 2
        return words

    def _rows(self, m: int) -> Tensor:
        """Words [rank, parity, m, columns / 2] of the mailboxes."""
        data = self.words[:, : self.box.data // 4]
        return data.view(self.tp, PARITIES, self.box.max_m, -1)[:, :, :m]

    def _ranks(self, m: int, way: str) -> list[tuple[list[Call], list[Tensor]]]:
        if (m, way) not in self.per_rank:
            weights = self.there[1]
            self.per_rank[m, way] = [
                self._share(m, way, rank, weights, TIMEOUT) for rank in range(self.tp)
            ]
        return self.per_rank[m, way]

    def _share(
        self, m: int, way: str, rank: int, weights: Sequence[Tensor], timeout: int = 0
    ) -> tuple[list[Call], list[Tensor]]:
        recorder = Recorder(self.device.arch, timeout)
        runtime: Any = recorder
        row = row_of(SHARDED, self.target, m, SHARDED_STREAM if way == STREAM else STATIONARY)
        outs = sharded_launch.launch(
            row, self.target, "emulated", self.there[0][:m], weights, self.split,
            runtime=runtime, space=lambda group, tp: self.spaces[rank],
        )  # fmt: skip
        return recorder.calls, outs


def bits(rows: Tensor) -> Tensor:
    """BF16 as integers."""
    return rows.contiguous().view(torch.int16)


# Name -> the case on a device, as `k3fuse kernels gpu` finds them.
GPU_CASES: Mapping[str, Callable[[Device], GpuCase]] = {
    **{
        f"{kind}-tp{tp}": partial(Local, name=f"{kind}-tp{tp}", tp=tp, rows=forms[tp][0])
        for kind, forms in (("kda", KDA), ("mla", MLA))
        for tp in TP_SIZES
    },
    **{
        f"mla-shared-tp{tp}": partial(
            Shared, name=f"mla-shared-tp{tp}", tp=tp, rows=MLA[tp][1], split=SPLIT[MLA[tp][1]]
        )
        for tp in TP_SIZES
    },
}

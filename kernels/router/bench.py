"""The router on one GPU that stands in for all ranks: `k3fuse kernels gpu`.

Mailboxes and results of all ranks lie on the device, the peers' addresses are those of the other
mailboxes. All ranks' front kernels run, then all ranks' route kernels: nobody has to wait. The
launches are those of the op's own host code (`launch.py`), built for the device.

Inputs are small multiples of powers of two: every sum is exact in FP32, whatever its order, so that
logits and latent have one right value each, and the route kernel's bits are those of its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.check.gpu import Device, GpuCase, Timed
from k3fuse.kernels.check.gpu_ranks import TIMEOUT, Call, Recorder, exact, state, workspaces
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import TP_SIZES, Row, chip_of
from k3fuse.kernels.router import reference, route_bits
from k3fuse.kernels.router.launch import launch
from k3fuse.kernels.router.layout import EXPERTS, LATENT, PRODUCERS, FrontMailbox
from k3fuse.kernels.router.policy import REPLICATED_ROW, TABLE
from k3fuse.kernels.router.route_launch import Form

BF16 = torch.bfloat16
TOP_K, EPS = 16, 1e-20
TOKENS = (1, 2, 3, 5, 8, 9, 16, 33, 64)
TIMED = (1, 8, 64)


class Emulated:
    """All ranks of one group on one device.

    tokens: counts to compare; timed: counts to time; k, experts, latent: sizes.
    """

    op = "router"

    def __init__(
        self,
        device: Device,
        tp: int,
        *,
        tokens: Sequence[int] = TOKENS,
        timed: Sequence[int] = TIMED,
        k: int = HIDDEN,
        experts: int = EXPERTS,
        latent: int = LATENT,
        seed: int = 0,
    ) -> None:
        self.device, self.tp, self.name = device, tp, f"tp{tp}"
        self.tokens, self.timed = tokens, timed
        self.target = f"gb300:tp{tp}"
        chip_of(self.target)
        self.box, self.rows = FrontMailbox(tp, experts, latent), max((*tokens, *timed))
        self.choice = Form(experts, latent, TOP_K, renormalize=True, bias=True)
        generator = torch.Generator().manual_seed(seed)
        self.inputs = {
            "x": exact(generator, self.rows, k, unit=1.0),
            "gate": exact(generator, experts, k, unit=2.0**-7),
            "latent": exact(generator, latent, k, unit=2.0**-7),
            "bias": 0.05 * torch.randn(experts, generator=generator),
        }
        self.there = {name: device.put(tensor) for name, tensor in self.inputs.items()}
        self.words = device.put(torch.zeros(tp, self.box.total // 4, dtype=torch.int32))
        self.spaces = workspaces(self.box, self.words)
        self.reset()
        self.recorded: dict[tuple[int, str], list[tuple[list[Call], list[Tensor]]]] = {}
        self.notes = [
            f"{tp} ranks on one device, rows published by stores to each mailbox",
            "all ranks' front kernels, then all ranks' route kernels; twice a step: rows copied "
            "out, then the choice",
            "replicated: every rank computes all logits (one token)",
            "time: rank 0 alone with the other ranks' columns delivered, PDL without a predecessor "
            "to overlap; whole weights in PyTorch: what a rank does without k3fuse, in one graph",
        ]

    def ways(self, m: int) -> Sequence[str]:
        """Sharded; every rank all logits, too, for one token."""
        return ["sharded", *(["replicated"] if m == 1 else [])]

    def step(self, m: int, way: str) -> None:
        """Two calls of all ranks: gather, then choice."""
        for form in (Form(self.box.experts, self.box.latent), self.choice):
            made = self._calls(m, way, form)
            for _, results in made:
                for tensor in results:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            for stage in range(2):
                for calls, _ in made:
                    self.device.launch(*calls[stage])

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """[m, ranks, ...] each."""
        found = {}
        for form, names in (
            (Form(self.box.experts, self.box.latent), ("logits", "latent")),
            (self.choice, ("weights", "ids", "latent of the choice")),
        ):
            made = [results for _, results in self._calls(m, way, form)]
            for i, name in enumerate(names):
                found[name] = torch.stack([results[i] for results in made], dim=1)
        return found

    def wrong(self, m: int, way: str) -> str:
        """Every element bit by bit, on every rank."""
        found = {name: rows.cpu() for name, rows in self.outputs(m, way).items()}
        for name, rows in found.items():
            wanted = self.expected[name][:m]
            for rank in range(self.tp):
                differ = int((_words(rows[:, rank]) != _words(wanted)).sum())
                if differ:
                    return f"{differ} elements of {name} of rank {rank} are not the exact ones"
        return ""

    def compared(self) -> Mapping[str, int]:
        """Nothing more: all bits have been compared with the exact ones."""
        return {}

    def after(self) -> str:
        """All mailboxes armed, all counters equal, no poll gave up."""
        return state(self.spaces, self.control)

    def time(self, m: int) -> Timed:
        """Rank 0's kernels of the policy, the others' columns there; and whole weights in torch."""
        row = TABLE.lookup(self.target, m)
        if row is None:
            raise ValueError(f"m={m} is outside the policy of {self.target}")
        there = self.there
        size = there["gate"].nbytes + there["latent"].nbytes
        copies = [
            (there["gate"].clone(), there["latent"].clone())
            for _ in range(2 + 2 * self.device.l2_bytes // size)
        ]
        made = [self._record(row, m, 0, self.choice, *copy) for copy in copies]
        sent = self.device.put(self.published[:m].contiguous())
        first = self.words[0, : m * self.box.row // 4].view(m, -1)

        def put_back() -> None:
            self.control[0].zero_()
            first.copy_(sent)

        def kernels(number: int) -> None:
            for call in made[number % len(copies)][0]:
                self.device.launch(*call)

        def stock(number: int) -> None:
            gate, latent = copies[number % len(copies)]
            reference.router(
                there["x"][:m], gate, there["bias"], latent, TOP_K, "sigmoid", True, 1.0, EPS, BF16
            )

        return Timed(put_back, {row.kernel or "": kernels, "whole weights in PyTorch": stock})

    def reset(self) -> None:
        """Arm everything."""
        for space in self.spaces:
            space.fill()

    @property
    def control(self) -> Tensor:
        """Counters of calls [rank, CTA]."""
        start = self.box.control // 4
        return self.words[:, start : start + PRODUCERS]

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """The exact rows of all tokens, on the CPU, as they are published: no -0.0."""
        given = self.inputs
        x = given["x"].double()
        logits = (x @ given["gate"].double().t()).float() + 0.0
        latent = (x @ given["latent"].double().t()).to(BF16) + 0.0
        weights, ids = route_bits.route(logits, given["bias"], TOP_K, eps=EPS)
        return {
            "logits": logits, "latent": latent, "weights": weights, "ids": ids,
            "latent of the choice": latent,
        }  # fmt: skip

    @cached_property
    def published(self) -> Tensor:
        """Rows of the mailbox, int32 [token, words]."""
        parts = (
            self.expected[name].contiguous().view(torch.int32) for name in ("logits", "latent")
        )
        return torch.cat(list(parts), dim=1)

    def _calls(self, m: int, way: str, form: Form) -> list[tuple[list[Call], list[Tensor]]]:
        """Launches and results of each rank, recorded once: graphs need fixed addresses."""
        key = m, f"{way} {form.top_k}"
        if key not in self.recorded:
            row = TABLE.lookup(self.target, m) if way == "sharded" else REPLICATED_ROW
            if row is None:
                raise ValueError(f"m={m} is outside the policy of {self.target}")
            weights = self.there["gate"], self.there["latent"]
            self.recorded[key] = [
                self._record(row, m, rank, form, *weights, timeout=TIMEOUT)
                for rank in range(self.tp)
            ]
        return self.recorded[key]

    def _record(
        self, row: Row, m: int, rank: int, form: Form, gate: Tensor, latent: Tensor,
        timeout: int = 0,
    ) -> tuple[list[Call], list[Tensor]]:  # fmt: skip
        recorder = Recorder(self.device.arch, timeout)
        runtime: Any = recorder
        results = launch(
            row, self.target, "emulated", form, self.there["x"][:m], gate, latent,
            bias=self.there["bias"] if form.bias else None, eps=EPS, runtime=runtime,
            space=lambda group, tp: self.spaces[rank],
        )  # fmt: skip
        return recorder.calls, results


def _words(rows: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(kinds[rows.element_size()])


# Name -> the case on a device, as `k3fuse kernels gpu` finds them.
GPU_CASES: Mapping[str, Callable[[Device], GpuCase]] = {
    f"tp{tp}": partial(Emulated, tp=tp) for tp in TP_SIZES
}

"""The output projection on one GPU that stands in for all ranks: `k3fuse kernels gpu`.

Mailboxes, weights and outputs of all ranks lie on the device; the peers' addresses are those of the
other mailboxes. What would wait for a rank that cannot run at the same time runs in another order:

    split     all producers, then all consumers, one-shot: nobody has to wait
    fused     all producers; then, rank by rank, the fused kernel, whose own partial was taken back
    two-shot  all producers; then all consumers at once, for as many tokens as fit the device

The launches are those of the op's own host code (`launch.py`), built for the device.

Inputs are small multiples of powers of two: every sum is exact in FP32, whatever its order, so that
partials and new prefixes have one right value each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.residency import Member, co_residency
from k3fuse.kernels.check.gpu import Device, GpuCase, Timed
from k3fuse.kernels.check.gpu_ranks import TIMEOUT, Call, Recorder, exact, state, workspaces
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.geometry import CLUSTER, REGISTER_K
from k3fuse.kernels.common.mailbox import HIDDEN, MAX_M, PARITIES, PRODUCERS, SENTINEL, Mailbox
from k3fuse.kernels.common.policy import TP_SIZES, Row, chip_of
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.output_projection.builder import BUILDER
from k3fuse.kernels.output_projection.config import CONSUMER
from k3fuse.kernels.output_projection.launch import Form, Residual, launch
from k3fuse.kernels.output_projection.plan import FUSED_TOKENS
from k3fuse.kernels.output_projection.policy import FUSED, ONE_SHOT, TABLE, TWO_SHOT
from k3fuse.kernels.output_projection.simulated import consumed

BF16 = torch.bfloat16
EPS = 1e-5  # rms_norm_eps of Kimi K3
BLOCKS = 8
FORM = Form(BLOCKS, prefix=True, norm=True, round_mix=False, round_before=False)
TOKENS = (1, 2, 3, 5, 8, 9, 16, 33, 64)
TIMED = (1, 8, 64)
SIMULATED = 8  # tokens whose outputs are compared with the simulator's
EMPTY = SENTINEL - (1 << 32)


class Emulated:
    """All ranks of one group on one device. tokens: at most so many; counts: those to compare."""

    op = "output_projection"

    def __init__(
        self,
        device: Device,
        tp: int,
        *,
        tokens: Sequence[int] = TOKENS,
        timed: Sequence[int] = TIMED,
        seed: int = 0,
    ) -> None:
        self.device, self.tp, self.name = device, tp, f"tp{tp}"
        self.tokens, self.timed = tokens, timed
        self.target = f"gb300:tp{tp}"
        chip_of(self.target)
        self.box, self.rows = Mailbox(tp), max((*tokens, *timed))
        self.k = 16 * REGISTER_K // tp
        generator = torch.Generator().manual_seed(seed)
        self.inputs = {
            "x": exact(generator, tp, self.rows, self.k, unit=1.0),
            "weight": exact(generator, tp, HIDDEN, self.k, unit=2.0**-8),
            "prefix": exact(generator, self.rows, HIDDEN, unit=0.5),
            "blocks": exact(generator, BLOCKS, self.rows, HIDDEN, unit=0.5),
            "score_norm": exact(generator, HIDDEN, unit=0.5),
            "score_proj": exact(generator, HIDDEN, unit=2.0**-6),
            "out_norm": exact(generator, HIDDEN, unit=0.5),
        }
        self.there = {name: device.put(tensor) for name, tensor in self.inputs.items()}
        self.words = device.put(torch.zeros(tp, self.box.total // 4, dtype=torch.int32))
        self.spaces = workspaces(self.box, self.words)
        self.reset()
        self.recorded: dict[tuple[int, str], tuple[list[list[Call]], list[list[Tensor]]]] = {}
        self.notes = self._notes()

    def ways(self, m: int) -> Sequence[str]:
        """Split always, fused up to 8 tokens where one rank fits, two-shot where all fit."""
        fused = ["fused"] if m <= FUSED_TOKENS and self.fused_ranks else []
        return [*fused, "split", *(["two-shot"] if m <= self.two_shot_tokens else [])]

    def step(self, m: int, way: str) -> None:
        """One step of all ranks."""
        calls, results = self._calls(m, way)
        for tensor in (tensor for made in results for tensor in made):
            tensor.fill_(float("nan"))
        if way != "fused":
            self._in_order([stages[0] for stages in calls])
            consumers = [stages[1] for stages in calls]
            if way == "two-shot":
                self.device.together(consumers)
            else:
                self._in_order(consumers)
            return
        pieces, _ = self._calls(m, "split")
        self._in_order([stages[0] for stages in pieces])
        slots, control = self.slots, self.control
        for rank, (call,) in enumerate(calls):
            # The producers have counted this call and published every partial. The fused kernel
            # does both again; what it sends to ranks that have consumed already is taken back.
            control[rank] -= 1
            slots[rank, :, rank, :m] = EMPTY
            self._in_order([call])
            slots[:rank, :, rank, :m] = EMPTY

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """[m, ranks, H] each."""
        _, results = self._calls(m, way)
        names = ("out", "new_prefix")
        return {
            name: torch.stack([made[i] for made in results], dim=1) for i, name in enumerate(names)
        }

    def wrong(self, m: int, way: str) -> str:
        """New prefixes bit by bit, outputs within the tolerance, all ranks equal bit by bit."""
        found = {name: rows.cpu() for name, rows in self.outputs(m, way).items()}
        out, new_prefix = (rows[:m] for rows in self.expected)
        for name, rows in found.items():
            for rank in range(self.tp):
                if not torch.equal(_words(rows[:, rank]), _words(rows[:, 0])):
                    return f"{name} of rank {rank} has other bits than rank 0's"
        differ = int((_words(found["new_prefix"][:, 0]) != _words(new_prefix)).sum())
        if differ:
            return f"{differ} elements of new_prefix are not the exact sum"
        inside = compare(found["out"][:, 0], out, tolerance(BF16, self.k, 3))
        return "" if inside.ok else f"out is outside the tolerance: {inside}"

    def compared(self) -> Mapping[str, int]:
        """Elements of out that differ from the simulator's, of the first tokens."""
        m = min(SIMULATED, self.rows)
        wanted = consumed(self.device.arch, self.tp, self.partials[:, :m], self.inputs)
        got = self.outputs(*next(key for key in self.recorded if key[0] >= m))["out"][:m, 0].cpu()
        differ = int((_words(got) != _words(wanted)).sum())
        return {f"elements of out with other bits than the simulator's, of {got.numel():,}": differ}

    def after(self) -> str:
        """All mailboxes armed, all counters equal, no poll gave up."""
        return state(self.spaces, self.control)

    def time(self, m: int) -> Timed:
        """Rank 0's kernels of the policy, the others' partials there; and cuBLAS, sum, AttnRes."""
        row = TABLE.lookup(self.target, m)
        if row is None:
            raise ValueError(f"m={m} is outside the policy of {self.target}")
        weight, there = self.there["weight"][0], self.there
        copies = [weight.clone() for _ in range(2 + 2 * self.device.l2_bytes // weight.nbytes)]
        made = [self._record(row, m, 0, copy) for copy in copies]  # with the outputs, to keep them
        partials = self.device.put(self.partials[:, :m].contiguous())
        put_back = self._deliver(row, m, partials)
        blocks = list(there["blocks"][:, :m])

        def kernels(number: int) -> None:
            self._in_order(made[number % len(copies)][0])

        def unfused(number: int) -> None:
            partials[0] = F.linear(there["x"][0, :m], copies[number % len(copies)])
            row_ = partials.sum(0, dtype=torch.float32).to(BF16)
            attn_res(
                there["prefix"][:m], row_, blocks, BLOCKS, there["score_norm"],
                there["score_proj"], there["out_norm"], EPS, EPS, False,
            )  # fmt: skip

        return Timed(put_back, {row.kernel or "": kernels, "cuBLAS + sum + AttnRes": unfused})

    # --- memory ---------------------------------------------------------------------------------

    @property
    def slots(self) -> Tensor:
        """One-shot slots [owner, parity, rank, token, words]."""
        part = self.words[:, : self.box.receive // 4]
        return part.view(self.tp, PARITIES, self.tp, MAX_M, HIDDEN // 2)

    @property
    def received(self) -> Tensor:
        """Receive slots [owner, parity, rank, token, words]."""
        part = self.words[:, self.box.receive // 4 : self.box.gather // 4]
        return part.view(self.tp, PARITIES, self.tp, MAX_M, HIDDEN // 2 // self.tp)

    @property
    def gathered(self) -> Tensor:
        """Gather rows [owner, parity, token, words]."""
        part = self.words[:, self.box.gather // 4 : self.box.data // 4]
        return part.view(self.tp, PARITIES, MAX_M, HIDDEN // 2)

    @property
    def control(self) -> Tensor:
        """Counters of calls [rank, CTA]."""
        start = self.box.control // 4
        return self.words[:, start : start + PRODUCERS]

    def reset(self) -> None:
        """Arm everything."""
        for space in self.spaces:
            space.fill()

    # --- what is right ---------------------------------------------------------------------------

    @cached_property
    def partials(self) -> Tensor:
        """Each rank's rounded partial rows [rank, token, H], on the CPU."""
        x, weight = self.inputs["x"], self.inputs["weight"]
        return torch.stack(
            [(a.float() @ w.float().t()).to(BF16) for a, w in zip(x, weight, strict=True)]
        )

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, new_prefix) of all tokens, on the CPU."""
        given = self.inputs
        out, new_prefix = attn_res(
            given["prefix"], ordered_sum(list(self.partials)).to(BF16), list(given["blocks"]),
            BLOCKS, given["score_norm"], given["score_proj"], given["out_norm"], EPS, EPS, False,
        )  # fmt: skip
        return out, new_prefix

    # --- launches --------------------------------------------------------------------------------

    @cached_property
    def fused_ranks(self) -> int:
        """Ranks whose fused kernels the device holds at once."""
        variant = BUILDER.variant(self.device.arch, {"tp": self.tp}, {"multicast": 0})
        built = self.device.built(variant)
        member = Member.built(built.plan, built.resources, "fused kernel")
        found = co_residency([member] * self.tp, self.device.sms)
        return sum(placed == member.ctas for placed in found.placed)

    @cached_property
    def two_shot_tokens(self) -> int:
        """Tokens whose two-shot consumers of all ranks the device holds at once."""
        config = {"stage": CONSUMER, "two_shot": 1, "multicast": 0, "timeout": TIMEOUT}
        built = self.device.built(
            BUILDER.variant(self.device.arch, {"tp": self.tp, "m": MAX_M}, config)
        )
        need = Member.built(built.plan, built.resources, "consumer").need
        for m in range(MAX_M, 0, -1):
            members = [Member("consumer", CLUSTER * m, need)] * self.tp
            if co_residency(members, self.device.sms).fits:
                return m
        return 0

    def _notes(self) -> list[str]:
        sms = self.device.sms
        fused = (
            f"fused: {sms} SMs hold {self.fused_ranks} of {self.tp} ranks at once, so the ranks' "
            "fused kernels run one after the other, behind all ranks' producers"
            if self.fused_ranks
            else f"fused: left out, {sms} SMs do not hold one rank's grid"
        )
        return [
            f"{self.tp} ranks on one device, partials published by stores to each mailbox; "
            f"delta form, {BLOCKS} blocks",
            "split: all producers, then all consumers, one-shot",
            fused,
            f"two-shot: all ranks' consumers at once, up to M = {self.two_shot_tokens}, which "
            f"{sms} SMs hold",
            "time: rank 0 alone with the other ranks' partials delivered, PDL without a "
            "predecessor to overlap; unfused: cuBLAS, a sum over ranks that are in memory already, "
            "AttnRes in PyTorch, all in one graph",
        ]

    def _calls(self, m: int, way: str) -> tuple[list[list[Call]], list[list[Tensor]]]:
        """Launches and results of each rank, recorded once: graphs need fixed addresses."""
        if (m, way) not in self.recorded:
            kernel = {"fused": FUSED, "split": ONE_SHOT, "two-shot": TWO_SHOT}[way]
            most = FUSED_TOKENS if way == "fused" else m if way == "two-shot" else MAX_M
            row = Row(1, most, kernel, 1 if way == "fused" else 2, "emulated")
            made = [self._record(row, m, rank, timeout=TIMEOUT) for rank in range(self.tp)]
            self.recorded[m, way] = [calls for calls, _ in made], [results for _, results in made]
        return self.recorded[m, way]

    def _record(
        self, row: Row, m: int, rank: int, weight: Tensor | None = None, timeout: int = 0
    ) -> tuple[list[Call], list[Tensor]]:
        there = self.there
        recorder = Recorder(self.device.arch, timeout)
        runtime: Any = recorder
        results = launch(
            row, self.target, "emulated", there["x"][rank, :m],
            there["weight"][rank] if weight is None else weight,
            Residual(
                FORM, there["prefix"][:m], list(there["blocks"][:, :m]), there["score_norm"],
                there["score_proj"], there["out_norm"], EPS, EPS,
            ),
            runtime=runtime, space=lambda group, tp: self.spaces[rank],
        )  # fmt: skip
        return recorder.calls, results

    def _in_order(self, calls: Sequence[Call]) -> None:
        for variant, values in calls:
            self.device.launch(variant, values)

    def _deliver(self, row: Row, m: int, partials: Tensor) -> Callable[[], None]:
        """Put back what the other ranks send to rank 0 in call 0, and the number of that call.

        The last operation is a kernel: in a graph, PDL has no edge from a copy of memory.
        """
        sent = partials.view(torch.int32)
        if row.kernel == TWO_SHOT:
            width = HIDDEN // 2 // self.tp
            reduced = partials.sum(0, dtype=torch.float32).to(BF16).view(torch.int32)

            def put_back() -> None:
                self.received[0, 0, 1:, :m] = sent[1:, :, :width]
                self.gathered[0, 0, :m, width:] = reduced[:, width:]
                self.control[0].fill_(0)
        else:

            def put_back() -> None:
                self.slots[0, 0, 1:, :m] = sent[1:]
                self.control[0].fill_(0)

        return put_back


def _words(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


# Name -> the case on a device, as `k3fuse kernels gpu` finds them.
GPU_CASES: Mapping[str, Callable[[Device], GpuCase]] = {
    f"tp{tp}": partial(Emulated, tp=tp) for tp in TP_SIZES
}

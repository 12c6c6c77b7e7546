"""The tail on one GPU that stands in for all ranks: `k3fuse kernels gpu tail`.

A rank's kernel waits for all ranks, and one device holds one rank's grid. So the ranks run one
after the other, each with what the others send delivered into its mailbox, in both parities: it
finds the one of its own call. What it sends is taken back. A step has two passes, so that every
rank reads the others' real columns, two-shot three:

    normalised rows (two-shot)   of each token's owner; the others' are stand-ins
    columns                      of each rank; the others' are stand-ins
    finished rows                with the columns of the pass before

The launches are those of the op's own host code (`launch.py`), built for the device. Partials are
small multiples of powers of two: their sums are exact in FP32, whatever their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3fuse.kernels.check.gpu import Device, Timed
from k3fuse.kernels.check.gpu_ranks import TIMEOUT, Call, Recorder, exact, workspaces
from k3fuse.kernels.check.run import Launch, run_sequence
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.numerics import rms_norm
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.tail.builder import BUILDER, config_of
from k3fuse.kernels.tail.cases import ROUNDINGS
from k3fuse.kernels.tail.emulated import Mailboxes
from k3fuse.kernels.tail.launch import launch
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.policy import ONE_SHOT, TABLE, TWO_SHOT
from k3fuse.kernels.tail.problem import BF16, EPS, Problem, disarmed, mailboxes

TOKENS = (1, 2, 3, 5, 8, 9, 16, 33, 64)
TIMED = (1, 8, 64)
SIMULATED = 4  # tokens whose columns are compared with the simulator's
WAYS = {"one-shot": ONE_SHOT, "two-shot": TWO_SHOT}


@dataclass(frozen=True)
class Made:
    """One call of the host code on one rank: its launches, and what they write, by name.

    The finished rows are "out".
    """

    calls: Sequence[Call]
    results: Mapping[str, Tensor]


class Emulated:
    """All ranks of one group on one device. tokens: counts to compare; timed: counts to time."""

    op = "tail"

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
        rows = max((*tokens, *timed))
        generator = torch.Generator().manual_seed(seed)
        self.inputs = {
            "routed": exact(generator, tp, rows, LATENT, unit=0.125),
            "shared": exact(generator, tp, rows, HIDDEN, unit=0.125),
            "norm": exact(generator, LATENT, unit=0.5),
            "weight": exact(generator, HIDDEN, LATENT, unit=2.0**-7),
        }
        self.there = {name: device.put(tensor) for name, tensor in self.inputs.items()}
        self.boxes = Mailboxes(device, tp, self.there["routed"], self.there["shared"])
        self.spaces = workspaces(self.boxes.layout, self.boxes.words)
        self.reset()
        self.recorded: dict[tuple[int, str], list[Made]] = {}
        self.notes = [
            f"{tp} ranks on one device, one after the other, each with what the others send "
            "delivered; rows published by stores to each mailbox",
            "a step: all ranks with stand-ins for the others' columns, then all with the real "
            "ones; two-shot: a pass for the normalised rows before",
            "time: rank 0 alone with the other ranks' rows delivered, PDL without a predecessor to "
            "overlap; unfused: sums over ranks that are in memory already, RMSNorm and the whole "
            "up-projection by cuBLAS, all in one graph",
        ]

    def ways(self, m: int) -> Sequence[str]:
        """One-shot and two-shot."""
        return list(WAYS)

    def step(self, m: int, way: str) -> None:
        """All ranks, two or three times."""
        made = self._calls(m, way)
        two_shot = way == "two-shot"
        finished = torch.ones_like(made[0].results["out"])
        normed = self.boxes.stand_ins(m) if two_shot else None
        for turn in range(3 if two_shot else 2):
            for rank, one in enumerate(made):
                for result in one.results.values():
                    result.fill_(float("nan"))
                self.boxes.deliver(rank, m, finished, normed)
                for call in one.calls:
                    self.device.launch(*call)
                self.boxes.look(rank, m, two_shot)
                if two_shot and turn == 0:
                    self.boxes.keep(rank, m)
                self.boxes.clear(rank, m, two_shot)
            if two_shot and turn == 0:
                normed = self.boxes.kept[:m]
            else:
                finished = torch.cat(
                    [one.results["out"][:, self.boxes.own(rank)] for rank, one in enumerate(made)],
                    dim=1,
                )

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """What is written, [m, ranks, H] each."""
        made = self._calls(m, way)
        return {
            name: torch.stack([one.results[name] for one in made], dim=1)
            for name in made[0].results
        }

    def wrong(self, m: int, way: str) -> str:
        """Within the tolerance of the reference; all ranks equal bit by bit."""
        outputs = self.outputs(m, way)
        for name, rows in outputs.items():
            for rank in range(self.tp):
                if not torch.equal(_words(rows[:, rank]), _words(rows[:, 0])):
                    return f"{name} of rank {rank} has other bits than rank 0's"
        out = outputs["out"].cpu()
        inside = compare(out[:, 0], self.expected[:m], tolerance(BF16, LATENT, ROUNDINGS))
        return "" if inside.ok else f"out is outside the tolerance: {inside}"

    def compared(self) -> Mapping[str, int]:
        """Elements of rank 0's columns that differ from the simulator's, of the first tokens."""
        m, way = next((key for key in self.recorded if key[0] >= SIMULATED), (0, ""))
        if not m:
            return {}
        got = self.outputs(m, way)["out"][:SIMULATED, 0, self.boxes.own(0)].cpu()
        differ = int((_words(got) != _words(simulated(self._problem(SIMULATED)))).sum())
        return {f"elements of out with other bits than the simulator's, of {got.numel():,}": differ}

    def after(self) -> str:
        """All armed but the last normalised rows, counters equal, every word waited for."""
        if missed := int(self.boxes.missed.sum()):
            return f"{missed} times a kernel left words unread, or not armed again"
        return disarmed(self.boxes.layout, list(self.boxes.words.cpu()))

    def time(self, m: int) -> Timed:
        """Rank 0's kernel of the policy, the others' rows there; and what it replaces."""
        row = TABLE.lookup(self.target, m)
        if row is None:
            raise ValueError(f"m={m} is outside the policy of {self.target}")
        there, copies = self.there, self._copies()

        def unfused(number: int) -> None:
            latent = there["routed"][:, :m].sum(0, dtype=torch.float32).to(BF16)
            row_ = rms_norm(latent, there["norm"], EPS, BF16, True)
            up = F.linear(row_, copies[number % len(copies)])
            torch.add(up, there["shared"][:, :m].sum(0, dtype=torch.float32).to(BF16))

        ways = {row.kernel or "": self._launches(row, m, copies), "sums + norm + cuBLAS": unfused}
        return Timed(self._put_back(m, row.kernel == TWO_SHOT), ways)

    def _copies(self) -> list[Tensor]:
        """Copies of the weights: what a rank reads of them exceeds the L2 cache twice."""
        weight = self.there["weight"]
        part = weight.nbytes // self.tp
        return [weight.clone() for _ in range(2 + 2 * self.device.l2_bytes // part)]

    def _put_back(self, m: int, two_shot: bool) -> Callable[[], None]:
        """What one call of rank 0 consumes, and its counter."""
        finished = self.device.put(self.expected[:m].contiguous())
        normed = self.device.put(self._problem(m).normed()) if two_shot else None

        def put_back() -> None:
            self.boxes.control[0].zero_()
            self.boxes.clear(0, m, two_shot)
            self.boxes.deliver(0, m, finished, normed)

        return put_back

    def _launches(self, row: Row, m: int, copies: Sequence[Tensor]) -> Callable[[int], None]:
        """Rank 0's launches of a row, with the weights in turn."""
        # Weights and results stay as long as the launches: those have nothing but addresses.
        made = [(copy, self._record(row, m, 0, copy)) for copy in copies]

        def kernels(number: int) -> None:
            for call in made[number % len(made)][1].calls:
                self.device.launch(*call)

        return kernels

    def reset(self) -> None:
        """Arm everything."""
        for space in self.spaces:
            space.fill()

    @cached_property
    def expected(self) -> Tensor:
        """The finished rows of all tokens, on the CPU."""
        return self._problem(self.inputs["routed"].shape[1]).expected()

    def _problem(self, m: int) -> Problem:
        """The first m tokens on the CPU, for the device's architecture."""
        given = self.inputs
        variant = BUILDER.variant(
            self.device.arch, {"m": 8, "tp": self.tp}, {"multicast": 0, "round_before": 1}
        )
        config = config_of(variant)
        return Problem(
            config, m, list(given["routed"][:, :m]), list(given["shared"][:, :m]), given["norm"],
            given["weight"], [], arch=self.device.arch,
        )  # fmt: skip

    def _row(self, m: int, way: str) -> Row:
        """What serves m tokens in this way."""
        found = TABLE.lookup(self.target, m)
        if found is None:
            raise ValueError(f"m={m} is outside the policy of {self.target}")
        return Row(1, found.m_max, WAYS[way], 1, "emulated")

    def _calls(self, m: int, way: str) -> list[Made]:
        """Launches and results of each rank, recorded once: graphs need fixed addresses."""
        if (m, way) not in self.recorded:
            row = self._row(m, way)
            weight = self.there["weight"]
            self.recorded[m, way] = [
                self._record(row, m, rank, weight, TIMEOUT) for rank in range(self.tp)
            ]
        return self.recorded[m, way]

    def _record(self, row: Row, m: int, rank: int, weight: Tensor, timeout: int = 0) -> Made:
        recorder = Recorder(self.device.arch, timeout)
        runtime: Any = recorder
        there = self.there
        out = launch(
            row, self.target, "emulated", there["routed"][rank, :m], there["shared"][rank, :m],
            there["norm"], weight, EPS, True, runtime=runtime,
            space=lambda group, tp: self.spaces[rank],
        )  # fmt: skip
        return Made(recorder.calls, {"out": out})


def _words(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


def simulated(problem: Problem) -> Tensor:
    """Rank 0's columns of the finished rows in the simulator, with the reference's elsewhere."""
    problem.boxes += mailboxes(problem.config.box)
    problem.deliver(0)
    values: dict[str, Any] = dict(problem.values(0))
    values |= {"mailbox": problem.boxes[0]}
    values |= {f"mailbox{rank}": box for rank, box in enumerate(problem.boxes)}
    config = problem.config
    variant = BUILDER.variant(
        problem.arch, {"m": 8, "tp": config.tp}, {"multicast": 0, "round_before": 1}
    )
    names = (*config.addresses, *config.sizes)
    run_sequence([Launch(variant, [{name: values[name] for name in names}])])
    return problem.out[0][:, : config.rows]

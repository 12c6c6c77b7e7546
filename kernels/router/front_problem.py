"""Inputs, mailboxes and expected rows of the front kernel on all ranks, on the CPU.

For the checks and tests: the tensors of every rank by the kernel's parameter names, and what the
reference says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.run import Launch, Value
from k3fuse.kernels.common.mailbox import PARITIES, SENTINEL
from k3fuse.kernels.common.numerics import linear, linear_fp32, situ
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.router.front_builder import BUILDER, config_of
from k3fuse.kernels.router.front_config import Config
from k3fuse.kernels.router.layout import FrontMailbox
from k3fuse.kernels.simulator import Fresh, Inside, Multicast, Owned

BF16 = torch.bfloat16
BETA, LINEAR_BETA = 4.0, 25.0  # of Kimi K3's SiTU
ARMED = SENTINEL - (1 << 32)  # as a signed word


def mailboxes(layout: FrontMailbox, ranks: int, calls: int = 0) -> list[Tensor]:
    """Armed mailboxes of a group, int32 words, `calls` calls counted."""
    boxes = []
    for _ in range(ranks):
        box = torch.full((layout.total // 4,), calls, dtype=torch.int32)
        box[: layout.data // 4] = ARMED
        box[layout.error // 4 :] = 0
        boxes.append(box)
    return boxes


def row(layout: FrontMailbox, box: Tensor, call: int, token: int) -> tuple[Tensor, Tensor]:
    """Views of a token's logits [E] FP32 and latent [L] BF16 in a mailbox."""
    start = layout.at(call, token) // 4
    words = box[start : start + layout.row // 4]
    middle = layout.latent_offset // 4
    return words[:middle].view(torch.float32), words[middle:].view(BF16)


def rows(layout: FrontMailbox, box: Tensor, call: int, m: int) -> tuple[Tensor, Tensor]:
    """Logits [m, E] and latent [m, L] of a call, copied."""
    found = [row(layout, box, call, token) for token in range(m)]
    return torch.stack([a for a, _ in found]), torch.stack([b for _, b in found])


def rearm(layout: FrontMailbox, box: Tensor, call: int, m: int) -> None:
    """Arm a call's rows again, as the route kernel does."""
    start = layout.at(call, 0) // 4
    box[start : start + m * layout.row // 4] = ARMED


@dataclass
class Problem:
    """One step of one layer on all ranks. Lists are by rank; shared parts are empty without.

    merged: gate and up of the shared expert lie in one weight [2 S, K]. The weights of gate and
    latent, and x, are the same memory for all ranks: nobody writes it. ranks: those that launch,
    each with a mailbox; one alone shows its own columns and what it costs.
    """

    config: Config
    m: int
    x: Tensor
    gate: Tensor
    latent: Tensor
    shared: list[Tensor]
    boxes: list[Tensor]
    merged: bool = True
    arch: str = "sm_103a"
    ranks: Sequence[int] = ()
    hidden: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.ranks or range(self.config.tp)
        if self.config.shared:
            self.hidden = [torch.empty(self.m, self.config.shared, dtype=BF16) for _ in self.boxes]

    def values(self, rank: int) -> dict[str, Value]:
        """Every parameter by name, for one rank."""
        config, place = self.config, list(self.ranks).index(rank)
        found: dict[str, Value] = {
            "x": self.x, "mailbox": self.boxes[place], "gate_weight": self.gate,
            "multicast": Multicast(tuple(self.boxes)), "m": self.m, "rank": rank,
            "x_pitch": self.x.stride(0),
        }  # fmt: skip
        if config.latent:
            found["latent_weight"] = self.latent
        if config.shared:
            weight, half = self.shared[rank], self.shared[rank].nbytes // 2
            found |= {
                "shared_gate": weight, "shared_up": Inside(weight, half),
                "hidden": Fresh(self.hidden[place]), "beta": float_bits(BETA),
                "linear_beta": float_bits(LINEAR_BETA),
            }  # fmt: skip
            if not self.merged:
                gate, up = weight.chunk(2)
                found |= {"shared_gate": gate.clone(), "shared_up": up.clone()}
        found |= {f"mailbox{owner}": Owned(box, owner) for owner, box in enumerate(self.boxes)}
        return found

    def launch(self, variant: Variant) -> Launch:
        """The kernel on all ranks of the step."""
        names = [p.name for p in BUILDER.plan(variant).parameters]
        values = [self.values(rank) for rank in self.ranks]
        chosen = [{name: rank[name] for name in names} for rank in values]
        return Launch(variant, chosen, self.needed(config_of(variant)))

    def needed(self, config: Config) -> dict[str, int]:
        """Bytes that have to move at least, summed over the ranks, by parameter."""
        ranks, width = len(self.ranks), config.k * 2
        logits, latent, shared = config.rows
        published = self.m * (logits * 4 + latent * 2)
        found = {
            "x": ranks * self.m * width,
            "gate_weight": ranks * logits * width,
            "mailbox": ranks * ranks * published,
        }
        if config.latent:
            found["latent_weight"] = ranks * latent * width
        if config.shared:
            found["shared_gate"] = found["shared_up"] = ranks * shared * width // 2
            found["hidden"] = ranks * self.m * config.shared * 2
        return found

    def expected(self) -> tuple[Tensor, Tensor]:
        """Logits [m, E] FP32 and latent [m, L] BF16 of the reference."""
        return linear_fp32(self.x, self.gate), linear(self.x, self.latent)

    def expected_hidden(self, rank: int) -> Tensor:
        """The shared hidden row [m, S] of one rank: gate and up are rounded first."""
        gate, up = linear(self.x, self.shared[rank]).chunk(2, dim=-1)
        return situ(gate, up, BETA, LINEAR_BETA).to(BF16)

    def published(self, rank: int, call: int = 0) -> tuple[Tensor, Tensor]:
        """What lies in one rank's mailbox after call number `call`."""
        return rows(self.config.box, self.boxes[rank], call, self.m)

    def unequal(self, call: int = 0) -> str:
        """One line where two ranks hold different words, "" where all are equal."""
        start = self.config.box.at(call, 0) // 4
        end = start + self.m * self.config.box.row // 4
        for rank, box in enumerate(self.boxes):
            if not torch.equal(box[start:end], self.boxes[0][start:end]):
                return f"the rows of rank {rank} differ from rank 0's"
        return ""

    def strays(self, call: int = 0) -> str:
        """One line where a word is written that is none of the step's, "" where none is."""
        layout = self.config.box
        other = (call + 1) % PARITIES
        for rank, box in enumerate(self.boxes):
            rest = box[layout.at(call, 0) // 4 + self.m * layout.row // 4 :]
            rest = rest[: (layout.max_m - self.m) * layout.row // 4]
            if not bool((rest == ARMED).all()):
                return f"rank {rank}: words beyond the last token are written"
            start = layout.at(other, 0) // 4
            if not bool((box[start : start + layout.parity // 4] == ARMED).all()):
                return f"rank {rank}: words of the other parity are written"
            counters = box[layout.control // 4 : layout.error // 4]
            if not bool((counters == call + 1).all()):
                return f"rank {rank}: counters are not all {call + 1}"
        return ""


def make(
    config: Config,
    m: int,
    seed: int = 0,
    boxes: Sequence[Tensor] | None = None,
    *,
    arch: str = "sm_103a",
    weights: Problem | None = None,
    ranks: Sequence[int] = (),
) -> Problem:
    """Random inputs: x about 1, outputs about 1. boxes: armed ones to use.

    weights: a problem to take them from. ranks: those that launch, all by default.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    k, scale = config.k, config.k**-0.5
    x = normal(m, k)
    boxes = list(boxes) if boxes is not None else mailboxes(config.box, len(ranks) or config.tp)
    if weights is not None:
        return Problem(
            config, m, x, weights.gate, weights.latent, weights.shared, boxes, arch=arch,
            ranks=ranks,
        )  # fmt: skip
    shared = []
    if config.shared:
        base = normal(2 * config.shared, k, scale=scale)
        shared = [base.roll(rank, 0) for rank in range(config.tp)]
    return Problem(
        config,
        m,
        x,
        normal(config.experts, k, scale=scale),
        normal(config.latent, k, scale=scale),
        shared,
        boxes,
        arch=arch,
        ranks=ranks,
    )

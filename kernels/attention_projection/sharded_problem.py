"""Inputs, mailboxes and expected rows of the row-sharded kernel on all ranks, on the CPU.

For the checks and tests: the tensors of every rank by the kernel's parameter names, and what the
reference says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.cases import mapped
from k3fuse.kernels.attention_projection.reference import published
from k3fuse.kernels.attention_projection.sharded_builder import BUILDER, sharded_of
from k3fuse.kernels.attention_projection.share import RowMailbox, Share
from k3fuse.kernels.attention_projection.stream_config import StreamConfig
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.run import Launch, Value
from k3fuse.kernels.common.mailbox import SENTINEL
from k3fuse.kernels.common.numerics import linear
from k3fuse.kernels.simulator import Fresh, Inside, Multicast, Owned

BF16 = torch.bfloat16
ARMED = SENTINEL - (1 << 32)  # as a signed word


def mailboxes(layout: RowMailbox, ranks: int, calls: int = 0) -> list[Tensor]:
    """Armed mailboxes of a group, int32 words, `calls` calls counted."""
    boxes = []
    for _ in range(ranks):
        box = torch.full((layout.total // 4,), calls, dtype=torch.int32)
        box[: layout.data // 4] = ARMED
        box[layout.error // 4 :] = 0
        boxes.append(box)
    return boxes


@dataclass
class Problem:
    """One step of one layer. x [m, k] and the split rows of `weights[rank][i]` [n_i, k] are equal.

    ranks: those that launch, each with a mailbox and outputs; boxes and outs are in their order.
    One that launches alone needs the others' columns: `deliver`.
    """

    share: Share
    k: int
    x: Tensor
    weights: list[list[Tensor]]
    ranks: Sequence[int]
    boxes: list[Tensor]
    outs: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outs = self.outs or [
            [torch.empty(self.m, n, dtype=BF16) for n in self.share.rows] for _ in self.ranks
        ]

    @property
    def m(self) -> int:
        """Tokens."""
        return self.x.shape[0]

    def values(self, variant: Variant, place: int) -> dict[str, Value]:
        """Every parameter by name, for the `place`-th of `ranks`."""
        rank, share = self.ranks[place], self.share
        parts = [part.of(self.weights[rank][part.weight], rank) for part in share.parts]
        read: dict[str, Value]
        ranked = enumerate(zip(self.ranks, self.boxes, strict=True))
        peers = {f"mailbox{owner}": Owned(box, at) for at, (owner, box) in ranked}
        if isinstance(sharded_of(variant).engine, StreamConfig):
            plan = BUILDER.plan(variant)
            tiles = {p.name: p.tiles for p in plan.parameters if p.tiles is not None}
            read = {"x": mapped(self.x, tiles["x"])}
            read |= {
                f"weight{i}": mapped(part.clone(), tiles[f"weight{i}"])
                for i, part in enumerate(parts)
            }
        else:
            read = {"x": self.x, "x_pitch": self.x.stride(0)}
            read |= {f"weight{i}": inside(part) for i, part in enumerate(parts)}
        return {
            **read,
            **{f"out{i}": Fresh(out) for i, out in enumerate(self.outs[place])},
            "mailbox": self.boxes[place], "multicast": Multicast(tuple(self.boxes)),
            **peers, "m": self.m, "rank": rank,
        }  # fmt: skip

    def launch(self, made: Variant | Built) -> Launch:
        """The kernel on all ranks of the step."""
        variant = made.variant if isinstance(made, Built) else made
        names = [p.name for p in BUILDER.plan(variant).parameters]
        given = [self.values(variant, place) for place in range(len(self.ranks))]
        if len(self.ranks) < self.share.tp:
            # Ranks that are not there: what is meant for them goes to a box that nobody reads.
            spare = torch.zeros_like(self.boxes[0])
            for values in given:
                values |= {n: spare for n in names if n.startswith("mailbox") and n not in values}
        chosen = [{name: values[name] for name in names} for values in given]
        return Launch(made, chosen, self.needed(), polled=frozenset({"mailbox"}))

    def needed(self) -> dict[str, int]:
        """Bytes that have to move at least, summed over the ranks, by parameter."""
        share, ranks = self.share, len(self.ranks)
        row = self.m * share.box.row
        # Each mailbox is written by all ranks, read, and armed again.
        written = row * (ranks if ranks == share.tp else 1)
        found = {"x": ranks * self.x.nbytes, "mailbox": 2 * ranks * row + written}
        found |= {
            f"weight{i}": ranks * part.rows * self.k * 2 for i, part in enumerate(share.parts)
        }
        return found | {f"out{i}": ranks * self.m * n * 2 for i, n in enumerate(share.rows)}

    def expected(self, rank: int) -> list[Tensor]:
        """Outputs of one rank by the reference."""
        rows = [linear(self.x, weight) for weight in self.weights[rank]]
        return published(rows, self.share.split)

    def deliver(self, rows: Sequence[Tensor], call: int = 0) -> None:
        """Put the columns of ranks that do not launch into the mailboxes of those that do.

        rows: published columns of each weight [m, split_i], of all ranks.
        """
        layout = self.share.box
        for box in self.boxes:
            for token in range(self.m):
                start = layout.at(call, token) // 4
                there = box[start : start + layout.row // 4].view(BF16)
                for weight, split in enumerate(self.share.split):
                    own, first = split // self.share.tp, self.share.firsts[weight]
                    for rank in range(self.share.tp):
                        if rank not in self.ranks:
                            low, high = rank * own, (rank + 1) * own
                            there[first + low : first + high] = rows[weight][token, low:high]

    def disarmed(self) -> str:
        """One line where a word of a mailbox is not armed, "" where all are."""
        for rank, box in zip(self.ranks, self.boxes, strict=True):
            left = int((box[: self.share.box.data // 4] != ARMED).sum())
            if left:
                return f"rank {rank}: {left} words of the mailbox are not armed"
        return ""

    def miscounted(self, calls: int = 1) -> str:
        """One line where a counter is not `calls`, or a poll gave up; "" for nothing."""
        layout = self.share.box
        for rank, box in zip(self.ranks, self.boxes, strict=True):
            counters = box[layout.control // 4 : layout.error // 4]
            if not bool((counters == calls).all()):
                return f"rank {rank}: counters are not all {calls}"
            if int(box[layout.error // 4]):
                return f"rank {rank}: error word {int(box[layout.error // 4]):#x}"
        return ""

    def unequal(self) -> str:
        """One line where two ranks have different bits in split columns, "" for none."""
        for place, outs in enumerate(self.outs):
            for i, split in enumerate(self.share.split):
                here, first = (o[i][:, :split].view(torch.int16) for o in (outs, self.outs[0]))
                if not torch.equal(here, first):
                    return f"out{i} of rank {self.ranks[place]} differs from the first rank's"
        return ""


def inside(part: Tensor) -> Value:
    """An address within the weight that a part is a view of."""
    whole = part._base if part._base is not None else part
    return Inside(whole, part.data_ptr() - whole.data_ptr())


def make(
    share: Share,
    k: int,
    m: int,
    seed: int = 0,
    *,
    ranks: Sequence[int] = (),
    boxes: Sequence[Tensor] | None = None,
    weights: Problem | None = None,
) -> Problem:
    """Random inputs: x about 1, outputs about 1. ranks: those that launch, all by default.

    boxes: armed ones to use. weights: a problem to take them from.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = ranks or range(share.tp)
    x = torch.randn(m, k, generator=generator).to(BF16)
    found = list(boxes) if boxes is not None else mailboxes(share.box, len(ranks))
    if weights is not None:
        return Problem(share, k, x, weights.weights, ranks, found)
    base = [(torch.randn(n, k, generator=generator) * k**-0.5).to(BF16) for n in share.rows]
    of_ranks = []
    for rank in range(share.tp):
        # The rows of a rank's own are other ones on every rank.
        pairs = zip(base, share.split, strict=True)
        of_ranks.append(
            [torch.cat([w[:s], w[s:].roll(rank, 0)]) if s < w.shape[0] else w for w, s in pairs]
        )
    return Problem(share, k, x, of_ranks, ranks, found)

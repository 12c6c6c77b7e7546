"""Inputs, outputs and expected results of a tail on all ranks, on the CPU, for checks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.run import Launch, Value
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.mailbox import SENTINEL
from k3fuse.kernels.common.numerics import rms_norm
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.simulator import Fresh, Multicast, Owned
from k3fuse.kernels.tail.builder import BUILDER
from k3fuse.kernels.tail.config import Config
from k3fuse.kernels.tail.mailbox import CTAS, LATENT, TailMailbox

BF16 = torch.bfloat16
EPS = 1e-5  # rms_norm_eps of Kimi K3
ARMED = SENTINEL - (1 << 32)  # as a signed word


def mailboxes(layout: TailMailbox) -> list[Tensor]:
    """Armed mailboxes of a group, int32 words, no call counted yet."""
    boxes = []
    for _ in range(layout.tp):
        box = torch.zeros(layout.total // 4, dtype=torch.int32)
        box[: layout.data // 4] = ARMED
        boxes.append(box)
    return boxes


def disarmed(layout: TailMailbox, boxes: Sequence[Tensor]) -> str:
    """One line that says what is not as it has to be between two calls, "" where all is.

    Everything is armed but the normalised rows of the last call; all control pairs agree.
    """
    for rank, box in enumerate(boxes):
        pairs = box[layout.control // 4 : layout.error // 4].reshape(CTAS, 2)
        call, tokens = (int(word) for word in pairs[0])
        if not (pairs == pairs[0]).all():
            return f"rank {rank}: control pairs differ"
        open_ = box[: layout.data // 4] != ARMED
        if call:
            start = layout.normed_at(call - 1) // 4
            open_[start : start + tokens * layout.latent_row // 4] = False
        left = open_.nonzero()
        if len(left):
            return f"rank {rank}: {len(left)} words not armed, the first at {int(left[0])}"
        if int(box[layout.error // 4]):
            return f"rank {rank}: error word {int(box[layout.error // 4]):#x}"
    return ""


@dataclass
class Problem:
    """One call on all ranks. Lists are by rank; `norm` and `weight` are copies, as on a machine.

    routed [m, 3584], shared [m, H], norm [3584], weight [H, 3584] for H = config.hidden.
    """

    config: Config
    m: int
    routed: list[Tensor]
    shared: list[Tensor]
    norm: Tensor
    weight: Tensor
    boxes: list[Tensor]
    arch: str = "sm_103a"
    out: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        tp = self.config.tp
        self.out += [torch.zeros(self.m, self.config.hidden, dtype=BF16) for _ in range(tp)]
        self.norms = [self.norm.clone() for _ in range(tp)]
        # A rank reads its own rows alone, so one tensor can stand for all copies.
        self.weights = [self.weight] * tp

    def latent(self) -> Tensor:
        """The all-reduced latent rows: added in rank order, rounded."""
        return ordered_sum(self.routed).to(BF16)

    def normed(self) -> Tensor:
        """The normalised latent rows."""
        return rms_norm(self.latent(), self.norm, EPS, BF16, self.config.round_before)

    def expected(self) -> Tensor:
        """The finished rows of the reference."""
        up = (self.normed().float() @ self.weight.float().t()).to(BF16)
        return up + ordered_sum(self.shared).to(BF16)

    def values(self, rank: int) -> dict[str, Value]:
        """Every parameter by name, for one rank."""
        found: dict[str, Value] = {
            "routed": _whole(self.routed[rank]), "shared": _whole(self.shared[rank]),
            "norm": self.norms[rank], "weight": self.weights[rank], "out": Fresh(self.out[rank]),
            "mailbox": self.boxes[rank], "multicast": Multicast(tuple(self.boxes)),
            "m": self.m, "rank": rank, "routed_pitch": self.routed[rank].stride(0),
            "shared_pitch": self.shared[rank].stride(0), "eps": float_bits(EPS),
        }  # fmt: skip
        for owner, box in enumerate(self.boxes):
            found[f"mailbox{owner}"] = Owned(box, owner)
        return found

    def launch(self, variant: Variant) -> Launch:
        """The kernel on all ranks."""
        names = [p.name for p in BUILDER.plan(variant).parameters]
        ranks = [self.values(rank) for rank in range(self.config.tp)]
        chosen = [{name: values[name] for name in names} for values in ranks]
        return Launch(variant, chosen, self.needed())

    def alone(self, variant: Variant, rank: int) -> Launch:
        """The kernel on one rank with all that it waits for delivered, so no poll is repeated."""
        self.deliver(rank)
        values: dict[str, Value] = dict(self.values(rank))
        values |= {"mailbox": self.boxes[rank], "multicast": Multicast((self.boxes[rank],))}
        values |= {f"mailbox{i}": box for i, box in enumerate(self.boxes)}
        names = [p.name for p in BUILDER.plan(variant).parameters]
        return Launch(variant, [{name: values[name] for name in names}])

    def needed(self) -> dict[str, int]:
        """Bytes that have to move at least, summed over the ranks, by parameter."""
        config, tp, m = self.config, self.config.tp, self.m
        latent, row = m * LATENT * 2, m * config.hidden * 2
        # Read, armed again and stored by the publisher: latent slots (a token's owner has them all
        # in two-shot form), the columns of the shared slots, normalised and finished rows.
        slots = latent if config.two_shot else tp * latent
        return {
            "routed": tp * latent, "shared": tp * row, "norm": tp * LATENT * 2,
            "weight": config.hidden * LATENT * 2, "out": tp * row,
            "mailbox": 3 * tp * (slots + row + row + latent),
        }  # fmt: skip

    def unequal(self) -> str:
        """One line where two ranks hold different bits, "" where all are equal."""
        for rank, row in enumerate(self.out):
            if not torch.equal(row.view(torch.int16), self.out[0].view(torch.int16)):
                return f"out of rank {rank} differs from rank 0's"
        return ""

    def disarmed(self) -> str:
        """See `disarmed`."""
        return disarmed(self.config.box, self.boxes)

    def deliver(self, rank: int, call: int = 0) -> None:
        """Put what the others send to `rank` in call number `call` into its mailbox, as it is.

        With the finished and the normalised rows it is all that the rank waits for.
        """
        layout, box = self.config.box, self.boxes[rank]
        part = self.config.rows
        for other in range(self.config.tp):
            columns = slice(rank * part, (rank + 1) * part)
            self._put(box, layout.latent_at(call, other), self.routed[other])
            self._put(box, layout.shared_at(call, other), self.shared[other][:, columns])
        self._put(box, layout.row_at(call), self.expected())
        self._put(box, layout.normed_at(call), self.normed())

    @staticmethod
    def _put(box: Tensor, start: int, rows: Tensor) -> None:
        clean = torch.where(rows == 0, torch.zeros_like(rows), rows)
        words = clean.contiguous().view(torch.int32).reshape(-1)
        box[start // 4 : start // 4 + len(words)] = words


def _whole(rows: Tensor) -> Tensor:
    """The buffer whose first columns the rows are."""
    return rows if rows.is_contiguous() or rows._base is None else rows._base


def make(
    config: Config,
    m: int,
    seed: int = 0,
    boxes: Sequence[Tensor] | None = None,
    *,
    arch: str = "sm_103a",
) -> Problem:
    """Random inputs: latent, shared and finished rows about 1. boxes: armed ones to use."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    tp = config.tp
    return Problem(
        config,
        m,
        [normal(m, LATENT, scale=tp**-0.5) for _ in range(tp)],
        [normal(m, config.hidden, scale=tp**-0.5) for _ in range(tp)],
        normal(LATENT),
        normal(config.hidden, LATENT, scale=LATENT**-0.5),
        list(boxes) if boxes is not None else mailboxes(config.box),
        arch,
    )

"""Inputs, outputs and expected results of an output projection on all ranks, on the CPU.

For the checks and tests: the tensors of every rank by the kernels' parameter names, the mailboxes,
and what the reference says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.run import Launch, Value
from k3fuse.kernels.common.collective import ordered_sum
from k3fuse.kernels.common.mailbox import HIDDEN, PARITIES, SENTINEL, Mailbox
from k3fuse.kernels.common.numerics import rms_norm
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.output_projection.builder import BUILDER, config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER, Config
from k3fuse.kernels.simulator import Fresh, Multicast, Owned

BF16 = torch.bfloat16
EPS = OUT_EPS = 1e-5  # rms_norm_eps of Kimi K3
ARMED = SENTINEL - (1 << 32)  # as a signed word


def mailboxes(layout: Mailbox, ranks: int) -> list[Tensor]:
    """Armed mailboxes of a group, int32 words, no call counted yet."""
    boxes = []
    for _ in range(ranks):
        box = torch.zeros(layout.total // 4, dtype=torch.int32)
        box[: layout.data // 4] = ARMED
        boxes.append(box)
    return boxes


def disarmed(layout: Mailbox, boxes: Sequence[Tensor]) -> str:
    """One line that says which words of which rank are not armed, "" where all are."""
    for rank, box in enumerate(boxes):
        left = (box[: layout.data // 4] != ARMED).nonzero()
        if len(left):
            return f"rank {rank}: {len(left)} words not armed, the first at {int(left[0])}"
        if int(box[layout.error // 4]):
            return f"rank {rank}: error word {int(box[layout.error // 4]):#x}"
    return ""


@dataclass
class Problem:
    """One step of one layer on all ranks. config: of any stage; its form and sizes count.

    Lists are by rank; inputs that are equal on all ranks are copies, as on a machine.
    """

    config: Config
    m: int
    x: list[Tensor]
    weight: list[Tensor]
    prefix: Tensor
    blocks: list[Tensor]
    score_norm: Tensor
    score_proj: Tensor
    out_norm: Tensor
    boxes: list[Tensor]
    out: list[Tensor] = field(default_factory=list)
    new_prefix: list[Tensor] = field(default_factory=list)
    arch: str = "sm_103a"
    pitch: int = 0  # elements between rows of x, k by default

    def __post_init__(self) -> None:
        for rows in (self.out, self.new_prefix):
            rows += [torch.zeros(self.m, HIDDEN, dtype=BF16) for _ in range(self.config.tp)]
        self._copies: list[dict[str, Tensor]] = []
        for _ in range(self.config.tp):
            named = {
                "prefix": self.prefix, "score_norm": self.score_norm,
                "score_proj": self.score_proj, "out_norm": self.out_norm,
                **{f"block{i}": block for i, block in enumerate(self.blocks)},
            }  # fmt: skip
            self._copies.append({name: tensor.clone() for name, tensor in named.items()})

    def partials(self) -> list[Tensor]:
        """Each rank's partial row, FP32 sums rounded once, [m, HIDDEN]."""
        return [(x.float() @ w.float().t()).to(BF16) for x, w in zip(self.x, self.weight)]  # noqa: B905

    def expected(self, partials: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """(out, new_prefix) of the reference, from these partials or its own."""
        config = self.config
        row = ordered_sum(list(partials if partials is not None else self.partials())).to(BF16)
        norm = self.out_norm if config.norm else None
        if config.blocks < 0:
            total = row.float() + self.prefix.float()
            source = total.to(BF16) if config.round_mix else total
            out = rms_norm(source, self.out_norm, OUT_EPS, BF16, config.round_before)
            return out, total.to(BF16)
        rest = (
            self.blocks, config.blocks, self.score_norm, self.score_proj, norm, EPS, OUT_EPS,
            config.round_mix,
        )  # fmt: skip
        if config.prefix:
            out, new_prefix = attn_res(self.prefix, row, *rest)
            return out, new_prefix
        return attn_res(row, None, *rest)[0], row

    def values(self, rank: int) -> dict[str, Value]:
        """Every parameter of every stage by name, for one rank."""
        k = self.config.k
        found: dict[str, Value] = {
            **self._copies[rank],
            "out": Fresh(self.out[rank]), "new_prefix": Fresh(self.new_prefix[rank]),
            "mailbox": self.boxes[rank], "multicast": Multicast(tuple(self.boxes)),
            "m": self.m, "rank": rank, "x_pitch": self.pitch or k, "prefix_pitch": HIDDEN,
            "block_pitch": HIDDEN, "eps": float_bits(EPS), "out_eps": float_bits(OUT_EPS),
        }  # fmt: skip
        if self.x:
            found |= {"x": self.x[rank], "weight": self.weight[rank]}
        for owner, box in enumerate(self.boxes):
            found[f"mailbox{owner}"] = Owned(box, owner)
        return found

    def launch(self, variant: Variant) -> Launch:
        """One kernel on all ranks."""
        names = [p.name for p in BUILDER.plan(variant).parameters]
        ranks = [self.values(rank) for rank in range(self.config.tp)]
        chosen = [{name: values[name] for name in names} for values in ranks]
        needed = self.needed(config_of(variant))
        return Launch(variant, chosen, needed, frozenset({"mailbox"}))

    def needed(self, config: Config) -> dict[str, int]:
        """Bytes that a stage has to move at least, summed over the ranks, by parameter."""
        tp, row = config.tp, 2 * HIDDEN
        found = {}
        # What lands in a rank's mailbox: in one-shot form every rank's row, in two-shot form the
        # partials of its columns and the gathered row; read, re-armed (written) by the consumer.
        slots = self.m * row * (2 if config.two_shot else tp)
        if config.stage != CONSUMER:
            found["weight"] = tp * HIDDEN * config.k * 2
            found["x"] = tp * self.m * config.k * 2
            found["mailbox"] = tp * self.m * row * (1 if config.two_shot else tp)
        if config.stage != PRODUCER:
            found["mailbox"] = found.get("mailbox", 0) + 2 * tp * slots
            if config.two_shot:
                found["mailbox"] += tp * self.m * row
            found |= {"out": tp * self.m * row, "new_prefix": tp * self.m * row}
            if config.prefix:
                found["prefix"] = tp * self.m * row
            found |= dict.fromkeys(config.block_pointers, tp * self.m * row)
            if config.blocks > 0:
                found |= {"score_norm": tp * row, "score_proj": tp * row}
            if config.norm:
                found["out_norm"] = tp * row
        return found

    def deliver(self, partials: Mapping[int, Tensor], call: int = 0, count: bool = True) -> None:
        """Put partials [m, HIDDEN] by rank where call number `call` would publish them.

        Words are stored as they are. count: the call is counted too, as a producer does.
        """
        config, layout = self.config, self.config.box
        parity = call % PARITIES
        for owner, box in enumerate(self.boxes):
            for rank, partial in partials.items():
                words = partial.contiguous().view(torch.int32)
                width = words.shape[1]
                if config.two_shot:
                    width //= config.tp
                    words = words[:, owner * width : (owner + 1) * width]
                    start = layout.receive + parity * layout.receive_parity
                    start += rank * layout.max_m * layout.part
                else:
                    start = layout.slot(parity, rank)
                box[start // 4 : start // 4 + self.m * width] = words.reshape(-1)
            if count:
                box[layout.control // 4 : layout.error // 4] = call + 1

    def random_partials(self, seed: int) -> list[Tensor]:
        """Partials of all ranks without a projection; no word is the sentinel."""
        generator = torch.Generator().manual_seed(seed)
        scale = self.config.tp**-0.5
        return [
            (torch.randn(self.m, HIDDEN, generator=generator) * scale).to(BF16)
            for _ in range(self.config.tp)
        ]

    def unequal(self) -> str:
        """One line where two ranks hold different bits, "" where all are equal."""
        for name, rows in (("out", self.out), ("new_prefix", self.new_prefix)):
            for rank, row in enumerate(rows):
                if not torch.equal(row.view(torch.int16), rows[0].view(torch.int16)):
                    return f"{name} of rank {rank} differs from rank 0's"
        return ""

    def disarmed(self) -> str:
        """See `disarmed`."""
        return disarmed(self.config.box, self.boxes)


def make(
    config: Config,
    m: int,
    seed: int = 0,
    boxes: Sequence[Tensor] | None = None,
    *,
    arch: str = "sm_103a",
    project: bool = True,
) -> Problem:
    """Random inputs: x and sources about 1, the all-reduced row too.

    boxes: armed ones to use. project False: there is no x and weight, for the consumer alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    ranks = config.tp if project else 0
    base = normal(HIDDEN if project else 1, config.k, scale=(config.k * config.tp) ** -0.5)
    return Problem(
        config,
        m,
        [normal(m, config.k) for _ in range(ranks)],
        [base.roll((31 * rank, rank), (0, 1)) for rank in range(ranks)],
        normal(m, HIDDEN),
        [normal(m, HIDDEN, scale=1 + 0.1 * i) for i in range(max(config.blocks, 0))],
        normal(HIDDEN),
        normal(HIDDEN, scale=0.05),
        normal(HIDDEN),
        list(boxes) if boxes is not None else mailboxes(config.box, config.tp),
        arch=arch,
    )


def variants(
    tp: int, m: int, config: Mapping[str, int] | None = None, *, fused: bool, arch: str = "sm_103a"
) -> tuple[Variant, ...]:
    """The kernels of one call: the fused one, or producer and consumer, for up to `m` tokens."""
    stages = (FUSED,) if fused else (PRODUCER, CONSUMER)
    shape = {"tp": tp, "m": m}
    return tuple(BUILDER.variant(arch, shape, {**(config or {}), "stage": s}) for s in stages)

"""A tail with AttnRes behind it on all ranks, on the CPU, for checks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.simulator import Fresh
from k3fuse.kernels.tail.config import Config
from k3fuse.kernels.tail.problem import BF16, EPS, Problem, make


@dataclass
class Sources:
    """What AttnRes mixes with the finished row, equal on all ranks.

    prefix and each block [m, H]; score_norm, score_proj, out_norm [H].
    """

    prefix: Tensor
    blocks: list[Tensor]
    score_norm: Tensor
    score_proj: Tensor
    out_norm: Tensor

    def named(self) -> dict[str, Tensor]:
        """By the kernel's parameters."""
        return {
            "prefix": self.prefix, "score_norm": self.score_norm, "score_proj": self.score_proj,
            "out_norm": self.out_norm, **{f"block{i}": b for i, b in enumerate(self.blocks)},
        }  # fmt: skip


@dataclass
class MixProblem(Problem):
    """One call on all ranks; `sources` is read when the call is made. Lists are by rank."""

    sources: Sources = field(kw_only=True)
    mixed: list[Tensor] = field(default_factory=list, kw_only=True)
    new_prefix: list[Tensor] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for rows in (self.mixed, self.new_prefix):
            rows += [torch.zeros(self.m, HIDDEN, dtype=BF16) for _ in range(self.config.tp)]

    def mix(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(mixed, new_prefix) of the reference, from these finished rows."""
        config, given = self.config, self.sources
        mixed, new_prefix = attn_res(
            given.prefix, delta, given.blocks, config.blocks, given.score_norm, given.score_proj,
            given.out_norm if config.norm else None, EPS, EPS, config.round_mix,
        )  # fmt: skip
        return mixed, new_prefix

    def values(self, rank: int) -> dict[str, Value]:
        """Every parameter by name, for one rank; copies of the sources, as on a machine."""
        bits = float_bits(EPS)
        return {
            **super().values(rank),
            **{name: tensor.clone() for name, tensor in self.sources.named().items()},
            "mixed": Fresh(self.mixed[rank]), "new_prefix": Fresh(self.new_prefix[rank]),
            "prefix_pitch": HIDDEN, "block_pitch": HIDDEN, "mix_eps": bits, "out_eps": bits,
        }  # fmt: skip

    def needed(self) -> dict[str, int]:
        """Bytes that have to move at least, summed over the ranks, by parameter."""
        config, tp, row = self.config, self.config.tp, 2 * HIDDEN
        found = dict.fromkeys(
            ("prefix", "mixed", "new_prefix", *config.block_pointers), tp * self.m * row
        )
        if config.blocks:
            found |= {"score_norm": tp * row, "score_proj": tp * row}
        if config.norm:
            found["out_norm"] = tp * row
        return {**super().needed(), **found}

    def unequal(self) -> str:
        """One line where two ranks hold different bits, "" where all are equal."""
        for name, rows in (("mixed", self.mixed), ("new_prefix", self.new_prefix)):
            for rank, row in enumerate(rows):
                if not torch.equal(row.view(torch.int16), rows[0].view(torch.int16)):
                    return f"{name} of rank {rank} differs from rank 0's"
        return super().unequal()


def make_mixed(
    config: Config,
    m: int,
    seed: int = 0,
    boxes: Sequence[Tensor] | None = None,
    *,
    arch: str = "sm_103a",
) -> MixProblem:
    """Random inputs: those of `make`, prefix about 1, blocks of growing size."""
    plain = make(config, m, seed, boxes, arch=arch)
    generator = torch.Generator().manual_seed(1000 + seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    sources = Sources(
        normal(m, HIDDEN),
        [normal(m, HIDDEN, scale=1 + 0.1 * i) for i in range(max(config.blocks, 0))],
        normal(HIDDEN),
        normal(HIDDEN, scale=0.05),
        normal(HIDDEN),
    )
    return MixProblem(
        config, m, plain.routed, plain.shared, plain.norm, plain.weight, plain.boxes, arch,
        sources=sources,
    )  # fmt: skip

"""Inputs, outputs and expected results of a route kernel on all ranks, on the CPU.

For the checks and tests: the tensors of every rank by the kernel's parameter names, the mailboxes
as the front kernels leave them, and what must come out, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.run import Launch, Value
from k3fuse.kernels.common.mailbox import SENTINEL
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.router import route_bits
from k3fuse.kernels.router.route_builder import BUILDER, config_of
from k3fuse.kernels.router.route_config import BLOCK, Config, arrivals_offset
from k3fuse.kernels.router.units import PLAN_WORDS
from k3fuse.kernels.simulator import Fresh, Inside

BF16 = torch.bfloat16
ARMED = SENTINEL - (1 << 32)  # as a signed word
EPS = 1e-20


@dataclass
class Problem:
    """One step of one layer. logits [m, E] FP32, latent [m, L] BF16 or None, bias [E] FP32 or None.

    boxes: a mailbox a rank, int32; made where they are not given. calls: calls before this one.
    """

    config: Config
    logits: Tensor
    latent: Tensor | None
    bias: Tensor | None
    ranks: int = 1
    scale: float = 1.0
    boxes: list[Tensor] = field(default_factory=list)
    calls: int = 0
    results: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.boxes and self.config.mailbox:
            self.boxes = mailboxes(self.config, self.ranks)
        self.arrivals = [torch.zeros(1, dtype=torch.int32) for _ in range(self.ranks)]
        self.results = [self._outputs() for _ in range(self.ranks)]

    @property
    def m(self) -> int:
        """Tokens."""
        return self.logits.shape[0]

    def _outputs(self) -> dict[str, Tensor]:
        config, m = self.config, self.m
        dtype = torch.float32 if config.wide else BF16
        made = {
            "weights": torch.zeros(m, config.top_k, dtype=dtype),
            "ids": torch.zeros(m, config.top_k, dtype=torch.int64),
            "logits_out": torch.zeros(m, config.experts),
            "latent": torch.zeros(m, config.latent, dtype=BF16),
            "latent_q": torch.zeros(m, config.latent, dtype=torch.uint8),
            "latent_scale": torch.zeros(m, config.latent // BLOCK, dtype=torch.uint8),
            "plan": torch.full((PLAN_WORDS,), -7, dtype=torch.int32),
        }
        return {name: made[name] for name in config.pointers if name in made}

    def expected(self) -> dict[str, Tensor]:
        """What each output must hold; the plan as far as it goes."""
        config = self.config
        found: dict[str, Tensor] = {}
        if config.top_k:
            weights, ids = route_bits.route(
                self.logits, self.bias, config.top_k,
                scoring="softmax" if config.softmax else "sigmoid",
                renormalize=config.renormalize, scale=self.scale, eps=EPS,
                weights_dtype=torch.float32 if config.wide else BF16,
            )  # fmt: skip
            found |= {"weights": weights, "ids": ids}
            if config.plan:
                found["plan"] = route_bits.expert_plan(ids)
        else:
            found["logits_out"] = published(self.logits)
        if self.latent is not None:
            found["latent"] = published(self.latent)
            if config.quantize:
                source = self.latent if config.local_latent else found["latent"]
                found["latent_q"], found["latent_scale"] = route_bits.quantized(source)
        return {name: found[name] for name in config.pointers if name in found}

    def values(self, rank: int) -> dict[str, Value]:
        """Every parameter by name, for one rank."""
        config = self.config
        found: dict[str, Value] = {name: Fresh(out) for name, out in self.results[rank].items()}
        found |= {"m": self.m, "scale": float_bits(self.scale), "eps": float_bits(EPS)}
        if config.mailbox:
            found["mailbox"] = self.boxes[rank]
            found["arrivals"] = Inside(self.boxes[rank], arrivals_offset(config.box))
        else:
            found["arrivals"] = self.arrivals[rank]
        given = {"logits": self.logits, "latent_in": self.latent, "bias": self.bias}
        found |= {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        names = (*config.pointers, *config.sizes)
        return {name: found[name] for name in names}

    def launch(self, variant: Variant | Built) -> Launch:
        """The kernel on all ranks."""
        return Launch(variant, [self.values(rank) for rank in range(self.ranks)], self.needed())

    def needed(self) -> dict[str, int]:
        """Bytes that have to move at least, summed over the ranks, by parameter."""
        config, m = self.config, self.m
        found = {name: out.nbytes for name, out in self.results[0].items()}
        if config.plan:
            found["plan"] = 4 * len(self.expected()["plan"])
        row = 4 * config.experts * (not config.local_logits and config.moves_logits)
        row += 2 * config.latent * (not config.local_latent and config.moves_latent)
        if config.mailbox:
            found["mailbox"] = 2 * m * row  # read, and armed again
        if self.bias is not None and config.bias:
            found["bias"] = self.bias.nbytes
        found |= {"logits": self.logits.nbytes}
        found |= {"latent_in": self.latent.nbytes} if self.latent is not None else {}
        return {name: self.ranks * found[name] for name in config.pointers if name in found}

    def deliver(self, ranks: range | None = None) -> None:
        """Put the rows into the mailboxes, as the front kernels of `ranks` do; count the call."""
        config = self.config
        if not config.mailbox:
            return
        box = config.box
        words = row_words(config, self.logits, self.latent)
        owner = owners(config)
        for memory in self.boxes:
            for token in range(self.m):
                start = box.at(self.calls, token) // 4
                row = memory[start : start + words.shape[1]]
                for rank in ranks if ranks is not None else range(config.tp):
                    row[owner == rank] = words[token][owner == rank]
            memory[box.control // 4 : box.error // 4] = self.calls + 1

    def wrong(self) -> str:
        """One line that says what differs from `expected`, "" where nothing does."""
        for rank, results in enumerate(self.results):
            for name, wanted in self.expected().items():
                got = results[name].reshape(-1)[: wanted.numel()].reshape(wanted.shape)
                if not same(got, wanted):
                    place = (got != wanted).nonzero()[0].tolist()
                    at = tuple(place)
                    return f"rank {rank}: {name}{place} is {got[at]}, expected {wanted[at]}"
        return ""

    def disarmed(self) -> str:
        """One line that says which words of which rank are not armed, "" where all are."""
        for rank, box in enumerate(self.boxes):
            layout = self.config.box
            left = (box[: layout.data // 4] != ARMED).nonzero()
            if len(left):
                return f"rank {rank}: {len(left)} words not armed, the first at {int(left[0])}"
            if int(box[layout.error // 4]):
                return f"rank {rank}: error word {int(box[layout.error // 4]):#x}"
            if int(box[arrivals_offset(layout) // 4]):
                return f"rank {rank}: arrivals are not 0"
        return ""

    def unequal(self) -> str:
        """One line that says which output of which rank differs from rank 0's, "" for none."""
        for rank, results in enumerate(self.results[1:], 1):
            for name, out in results.items():
                if not same(out, self.results[0][name]):
                    return f"{name} of rank {rank} differs from rank 0's"
        return ""


def make(variant: Variant, m: int, seed: int, ranks: int = 1) -> Problem:
    """Random logits of spread 3 and a correction bias, a latent row about 1; delivered."""
    config = config_of(variant)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(m, config.experts, generator=generator)
    bias = 0.05 * torch.randn(config.experts, generator=generator) if config.bias else None
    latent = None
    if config.latent:
        latent = torch.randn(m, config.latent, generator=generator).to(BF16)
    problem = Problem(config, logits, latent, bias, ranks)
    problem.deliver()
    return problem


def mailboxes(config: Config, ranks: int) -> list[Tensor]:
    """Armed mailboxes, int32 words, no call counted yet."""
    boxes = []
    for _ in range(ranks):
        box = torch.zeros(config.box.total // 4, dtype=torch.int32)
        box[: config.box.data // 4] = ARMED
        boxes.append(box)
    return boxes


def published(rows: Tensor) -> Tensor:
    """Rows as a front kernel publishes them: no -0.0."""
    return torch.where(rows == 0, torch.zeros_like(rows), rows)


def row_words(config: Config, logits: Tensor, latent: Tensor | None) -> Tensor:
    """Rows of the mailbox, int32 [m, words]."""
    parts = [published(logits).contiguous().view(torch.int32)]
    if latent is not None:
        parts.append(published(latent).contiguous().view(torch.int32))
    return torch.cat(parts, dim=1)


def owners(config: Config) -> Tensor:
    """The rank that publishes each word of a row."""
    logits = torch.arange(config.experts) // (config.experts // config.tp)
    pairs = config.latent // 2
    if not pairs:
        return logits
    return torch.cat([logits, torch.arange(pairs) // (pairs // config.tp)])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN for any NaN; E4M3's two in uint8, too."""
    if a.dtype == torch.uint8:
        nan = ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
        return bool(((a == b) | nan).all())
    if not a.dtype.is_floating_point:
        return bool(torch.equal(a, b))
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.contiguous().view(words) == b.contiguous().view(words)
    return bool((equal | (a.isnan() & b.isnan())).all())


def variant_of(arch: str, shape: dict[str, int], config: dict[str, int]) -> Variant:
    """A variant; short for `BUILDER.variant`."""
    return BUILDER.variant(arch, shape, config)

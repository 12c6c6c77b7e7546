"""What an output projection kernel is compiled for, and its parameters: the ABI. No DSL here."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.common.mailbox import PRODUCERS, Mailbox

FUSED, PRODUCER, CONSUMER = 0, 1, 2
STAGES = ("fused", "producer", "consumer")

# Kernel parameters in order. A stage takes those of its own; addresses are of BF16 rows.
PRODUCER_POINTERS = ("x", "weight", "mailbox")
STREAM_POINTERS = ("prefix", "score_norm", "score_proj", "out_norm", "out", "new_prefix")
PRODUCER_SIZES = ("m", "rank", "x_pitch")
STREAM_SIZES = ("prefix_pitch", "block_pitch", "eps", "out_eps")


@dataclass(frozen=True)
class Config:
    """One kernel of the family.

    stage: FUSED, PRODUCER or CONSUMER. m: the most tokens. tp: ranks. k: columns of x, this rank's
    heads. blocks: AttnRes blocks, -1 for add + RMSNorm. prefix: the row is added to a prefix (or
    residual). norm, round_mix, round_before: see `residual.Form`. multicast: publish through one
    multicast address, else through every rank's. two_shot: owners reduce, then gather. max_m: rows
    of a mailbox slot. timeout: rounds of a poll before it gives up, 0 for never. packed: f32x2
    arithmetic, which sm_90a lacks; the bits are the same.
    """

    stage: int
    m: int
    tp: int
    k: int
    blocks: int
    prefix: bool
    norm: bool
    round_mix: bool
    round_before: bool
    multicast: bool
    two_shot: bool
    max_m: int
    timeout: int
    packed: bool

    @property
    def box(self) -> Mailbox:
        """The mailbox's layout."""
        return Mailbox(self.tp, max_m=self.max_m)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the address parameters, before blocks and targets."""
        if self.stage == PRODUCER:
            return PRODUCER_POINTERS
        if self.stage == CONSUMER:
            return ("mailbox", *STREAM_POINTERS)
        return (*PRODUCER_POINTERS, *STREAM_POINTERS)

    @property
    def block_pointers(self) -> tuple[str, ...]:
        """Names of the blocks' addresses."""
        count = 0 if self.stage == PRODUCER else max(self.blocks, 0)
        return tuple(f"block{i}" for i in range(count))

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the addresses that are published to: mailboxes by rank, or the multicast one.

        The two-shot producer sends to one owner at a time, so it takes all of them.
        """
        if self.stage == CONSUMER and not self.two_shot:
            return ()
        if self.multicast and not (self.stage == PRODUCER and self.two_shot):
            return ("multicast",)
        return tuple(f"mailbox{rank}" for rank in range(self.tp))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return (*self.pointers, *self.block_pointers, *self.targets)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; eps and out_eps are the bits of a float."""
        if self.stage == PRODUCER:
            return PRODUCER_SIZES
        if self.stage == CONSUMER:
            return ("m", "rank", *STREAM_SIZES)
        return (*PRODUCER_SIZES, *STREAM_SIZES)

    @property
    def owner_ctas(self) -> int:
        """Producer CTAs whose columns one rank owns in a two-shot exchange."""
        return PRODUCERS // self.tp

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = [STAGES[self.stage], f"m{self.m}", f"tp{self.tp}"]
        if self.stage != CONSUMER:
            parts.append(f"k{self.k}")
        if self.stage != PRODUCER:
            parts.append(f"attn{self.blocks}" if self.blocks >= 0 else "add")
            flags = {
                "prefix": self.prefix, "norm": self.norm, "roundmix": self.round_mix,
                "roundbefore": self.round_before,
            }  # fmt: skip
            parts += [name for name, on in flags.items() if on]
        parts.append("multicast" if self.multicast else "peer")
        parts += ["packed"] if self.packed else []
        parts += ["twoshot"] if self.two_shot else []
        parts += [f"rows{self.max_m}"] if self.max_m != 64 else []
        parts += [f"timeout{self.timeout}"] if self.timeout else []
        return "_".join(parts)

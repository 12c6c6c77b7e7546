"""What a route kernel is compiled for, its parameters and shared memory. No DSL here.

One CTA a token chooses the experts, or copies the logits; a second one moves the latent row where
there is something to do with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.build.variant import Parameter, Plan
from k3fuse.kernels.common.mailbox import WORD
from k3fuse.kernels.router.layout import FrontMailbox

MAX_EXPERTS = 1024  # four a thread, 256 threads
MAX_TOP_K = 32  # a lane each
EACH = 4  # logits of a thread
GROUPS = 32  # a lane's experts in every warp are a group
BLOCK = 32  # columns of one E8M0 scale
PIECE = 8  # columns of the latent row that a thread moves at a time


@dataclass(frozen=True)
class Config:
    """One kernel. m: the most tokens. experts, latent: columns (latent 0 for none). tp: ranks.

    top_k: experts a token; 0 copies the logits out instead (gather). local_logits, local_latent:
    plain rows instead of the mailbox. softmax: scores, else sigmoid. bias: a correction bias is
    added for the choice. renormalize: weights are divided by their sum. wide: weights in FP32, else
    BF16. quantize: the latent row in MXFP8, too. plan: the expert plan. max_m: rows of a parity of
    the mailbox. timeout: rounds of a poll before it gives up, 0 for never.
    """

    m: int
    experts: int
    latent: int
    tp: int
    top_k: int
    local_logits: bool
    local_latent: bool
    softmax: bool
    bias: bool
    renormalize: bool
    wide: bool
    quantize: bool
    plan: bool
    max_m: int
    timeout: int

    @property
    def box(self) -> FrontMailbox:
        """The mailbox's layout."""
        return FrontMailbox(self.tp, self.experts, self.latent, self.max_m)

    @property
    def moves_logits(self) -> bool:
        """Whether a CTA handles the logits: to choose, or to copy them out of the mailbox."""
        return self.top_k > 0 or not self.local_logits

    @property
    def moves_latent(self) -> bool:
        """Whether a CTA handles the latent row: out of the mailbox, or to quantise it."""
        return self.latent > 0 and (self.quantize or not self.local_latent)

    @property
    def roles(self) -> int:
        """CTAs a token."""
        return int(self.moves_logits) + int(self.moves_latent)

    @property
    def warps(self) -> int:
        """Warps of a CTA: four logits a thread."""
        return max(1, -(-self.experts // (32 * EACH)))

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def mailbox(self) -> bool:
        """Whether anything is polled."""
        latent = self.moves_latent and not self.local_latent
        return latent or (self.moves_logits and not self.local_logits)

    @property
    def candidates(self) -> int:
        """Experts that the quick way ranks, a multiple of 32: more take the slow way."""
        return 64 if self.top_k <= 16 else 128

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the address parameters."""
        names = {
            "mailbox": self.mailbox,
            "logits": self.local_logits and self.top_k > 0,
            "latent_in": self.local_latent and self.moves_latent,
            "bias": self.bias and self.top_k > 0,
            "weights": self.top_k > 0,
            "ids": self.top_k > 0,
            "logits_out": self.moves_logits and self.top_k == 0,
            "latent": self.moves_latent and not self.local_latent,
            "latent_q": self.quantize,
            "latent_scale": self.quantize,
            "plan": self.plan,
            "arrivals": self.plan,
        }
        return tuple(name for name, there in names.items() if there)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; scale and eps are the bits of floats."""
        return ("m", "scale", "eps") if self.top_k else ("m",)

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = ["route" if self.top_k else "gather", f"m{self.m}", f"e{self.experts}"]
        parts += [f"k{self.top_k}"] if self.top_k else []
        parts += [f"l{self.latent}"] if self.latent else []
        parts += [f"tp{self.tp}"]
        flags = {
            "locallogits": self.local_logits, "locallatent": self.local_latent,
            "softmax": self.softmax, "bias": self.bias, "renorm": self.renormalize,
            "fp32": self.wide, "mxfp8": self.quantize, "plan": self.plan,
        }  # fmt: skip
        parts += [name for name, on in flags.items() if on]
        parts += [f"rows{self.max_m}"] if self.max_m != 64 else []
        parts += [f"timeout{self.timeout}"] if self.timeout else []
        return "_".join(parts)


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA that chooses: byte offsets, 16-byte aligned."""

    config: Config

    @property
    def maxima(self) -> int:
        """The greatest key of each group: [warps][32] words, 16 more for sums of warps."""
        return 0

    @property
    def sums(self) -> int:
        """A word a warp, twice: softmax, and the plan's units."""
        return self.maxima + 4 * self.config.threads

    @property
    def limit(self) -> int:
        """The least key of a candidate; beside it where the next candidate goes; arrivals."""
        return self.sums + 64

    @property
    def found(self) -> int:
        """Candidates: expert (complemented) and key, eight bytes."""
        return self.limit + 16

    @property
    def chosen(self) -> int:
        """The ids of the choice, in order."""
        return self.found + 8 * self.config.candidates

    @property
    def scores(self) -> int:
        """Unbiased scores of all experts, FP32."""
        return self.chosen + 4 * MAX_TOP_K

    @property
    def keys(self) -> int:
        """Keys of all experts, for the slow way; masks of tokens and first units for the plan."""
        return self.scores + 4 * EACH * self.config.threads

    @property
    def first(self) -> int:
        """The plan's first unit of each expert, behind two words of tokens each."""
        return self.keys + 8 * EACH * self.config.threads

    @property
    def total(self) -> int:
        """Bytes."""
        if not self.config.top_k:
            return 16
        words = 3 if self.config.plan else 1
        return self.keys + 4 * words * EACH * self.config.threads


def plan_of(config: Config) -> Plan:
    """The launch: one or two CTAs a token."""
    return Plan(
        grid=(config.roles * config.m, 1, 1),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        dynamic_smem=Shared(config).total,
        parameters=(
            *(Parameter(name, "pointer") for name in config.pointers),
            *(Parameter(name, "i32") for name in config.sizes),
        ),
        pdl=True,
    )


def arrivals_offset(box: FrontMailbox) -> int:
    """Offset of the word that counts a call's tokens: behind the error word, zero between calls."""
    return box.error + WORD

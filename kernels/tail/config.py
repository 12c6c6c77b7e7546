"""What a tail kernel is compiled for, its shared memory, and its parameters: the ABI. No DSL here.

A cluster of CTAs splits the latent's columns: a CTA has 448 of them, of 64 or 128 rows of the
up-projection. Its 14 warps are two halves of 64 rows times seven parts of the columns, so a thread
holds 32 or 64 registers of weights. The 448 threads are also as many as a latent row has pieces of
16 bytes, and eight tokens' pieces of a CTA's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.common.geometry import (
    CONSUMER_WARPS,
    PAD,
    ROWS,
    SUM_PITCH,
    residual_bytes,
)
from k3fuse.kernels.common.mailbox import ELEMENT
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox

CLUSTER = 8  # parts of the latent's columns
COLUMNS = LATENT // CLUSTER
PARTS = 7  # of a CTA's columns
WARPS = 2 * PARTS
THREADS = 32 * WARPS
PIECE = 8  # BF16 of 16 bytes
PIECES = COLUMNS // PIECE
GROUP = 16  # tokens multiplied at a time, or 8 where there are no more
# Rows of x lie 64 bytes apart modulo 128, as `geometry.PAD` says.
PITCH = COLUMNS * ELEMENT + PAD
OWNED = ROWS // CLUSTER  # of 64 rows, those that one CTA adds up and publishes: one piece

POINTERS = ("routed", "shared", "norm", "weight", "out", "mailbox")
SIZES = ("m", "rank", "routed_pitch", "shared_pitch", "eps")
# Behind them, where AttnRes follows in the same launch.
MIX_POINTERS = ("prefix", "score_norm", "score_proj", "out_norm", "mixed", "new_prefix")
MIX_SIZES = ("prefix_pitch", "block_pitch", "mix_eps", "out_eps")

# Shared memory: an mbarrier for each unit of rows, the call's pair, the warps' sums of squares.
CALL = 16
SQUARES = 64
HEADER = SQUARES + 64


@dataclass(frozen=True)
class Config:
    """One kernel.

    m: the most tokens. tp: ranks. rows: of the up-projection, this rank's. units: times 64 rows a
    cluster. two_shot: a token's owner adds and normalises, then gathers. round_before: the
    normalised row is rounded before it is multiplied by the weight. multicast: publish through one
    multicast address, else through every rank's. max_m: rows of a mailbox slot. timeout: rounds of
    a poll before it gives up, 0 for never. packed: f32x2 arithmetic, which sm_90a lacks; the bits
    are the same. blocks: AttnRes of so many blocks follows, -1 for none. norm, round_mix: its
    output norm, and whether the mix is rounded before it.
    """

    m: int
    tp: int
    rows: int
    units: int
    two_shot: bool
    round_before: bool
    multicast: bool
    max_m: int
    timeout: int
    packed: bool
    blocks: int
    norm: bool
    round_mix: bool

    @property
    def hidden(self) -> int:
        """Columns of a finished row."""
        return self.rows * self.tp

    @property
    def box(self) -> TailMailbox:
        """The mailbox's layout."""
        return TailMailbox(self.tp, self.hidden, self.max_m)

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return self.rows // (ROWS * self.units)

    @property
    def grid(self) -> int:
        """CTAs."""
        return CLUSTER * self.clusters

    @property
    def tokens(self) -> int:
        """Tokens that are multiplied at a time."""
        return min(GROUP, -(-self.m // PIECE) * PIECE)

    @property
    def passes(self) -> int:
        """Times eight tokens that shared memory has room for."""
        return -(-self.m // self.tokens) * self.tokens // 8

    @property
    def rounds(self) -> int:
        """Products one after the other: of a unit of rows with a group of tokens."""
        return self.units * -(-self.m // self.tokens)

    @property
    def x(self) -> int:
        """Offset of the CTA's columns of the normalised rows."""
        return HEADER

    @property
    def sums(self) -> int:
        """Offset of the partial sums [1 or 2 buffers][PARTS][tokens][SUM_PITCH], FP32."""
        return self.x + 8 * self.passes * PITCH

    @property
    def sums_bytes(self) -> int:
        """Bytes of one buffer."""
        return PARTS * self.tokens * SUM_PITCH * 4

    @property
    def received(self) -> int:
        """Offset of what the cluster sends: [units][CLUSTER][8 passes tokens][OWNED], FP32."""
        return self.sums + min(2, self.rounds) * self.sums_bytes

    @property
    def total(self) -> int:
        """Bytes of shared memory."""
        return self.residual + self.mix_groups * residual_bytes(self.blocks)

    @property
    def mixes(self) -> bool:
        """Whether AttnRes follows in the same launch."""
        return self.blocks >= 0

    @property
    def mix_groups(self) -> int:
        """Tokens that a cluster mixes, each by four warps of seven of its CTAs."""
        return -(-self.m // self.clusters) if self.mixes else 0

    @property
    def mix_warp(self) -> int:
        """The first warp that mixes: the last ones do, the first one finishes columns."""
        return WARPS - CONSUMER_WARPS * self.mix_groups

    @property
    def residual(self) -> int:
        """Offset of what each token that is mixed exchanges in the cluster."""
        return self.received + self.units * CLUSTER * 8 * self.passes * OWNED * 4

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the addresses that are published to: the multicast one, then by rank."""
        peers = tuple(f"mailbox{rank}" for rank in range(self.tp))
        return ("multicast", *peers) if self.multicast else peers

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return (*POINTERS, *self.targets, *self.mix_addresses)

    @property
    def block_pointers(self) -> tuple[str, ...]:
        """Names of the blocks' addresses."""
        return tuple(f"block{i}" for i in range(self.blocks))

    @property
    def mix_addresses(self) -> tuple[str, ...]:
        """Names of the addresses of AttnRes."""
        return (*MIX_POINTERS, *self.block_pointers) if self.mixes else ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; an eps is the bits of a float."""
        return (*SIZES, *MIX_SIZES) if self.mixes else SIZES

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = [f"m{self.m}", f"tp{self.tp}", f"n{self.rows}", f"units{self.units}"]
        flags = {
            "twoshot": self.two_shot, "roundbefore": self.round_before, "packed": self.packed,
        }  # fmt: skip
        parts += [name for name, on in flags.items() if on]
        if self.mixes:
            parts.append(f"attn{self.blocks}")
            parts += ["norm"] if self.norm else []
            parts += ["roundmix"] if self.round_mix else []
        parts.append("multicast" if self.multicast else "peer")
        parts += [f"rows{self.max_m}"] if self.max_m != 64 else []
        parts += [f"timeout{self.timeout}"] if self.timeout else []
        return "_".join(parts)

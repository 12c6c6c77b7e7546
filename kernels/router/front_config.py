"""What a front kernel is compiled for, and its parameters: the ABI. No DSL here.

One grid for all that reads the row behind attention: this rank's rows of the gate and of the latent
down-projection, and gate and up of its shared expert. The work is divided as `common/gemm.py` says;
a cluster of 16 CTAs splits K, so that few clusters read x.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from k3fuse.kernels.common.gemm import TILE, Geometry
from k3fuse.kernels.common.mailbox import MAX_M
from k3fuse.kernels.router.layout import PRODUCERS, FrontMailbox

CLUSTER = 16  # parts of K
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds one cluster of 16 CTAs.
CLUSTERS = PRODUCERS // CLUSTER
# With fewer tiles in a cluster there are more clusters, and each of them reads x.
TILES = 3

LOGITS, LATENT, SHARED = 0, 1, 2


@dataclass(frozen=True)
class Config:
    """One kernel. m: the most tokens. tp: ranks. k: columns of x.

    experts, latent: rows of the whole gate and latent weights; latent 0 for none. shared: columns
    of this rank's shared hidden row, 0 for none. multicast: publish through one multicast address,
    else through every rank's. replicated: every rank computes all logits and sends none. max_m:
    tokens that the mailbox has room for.
    """

    m: int
    tp: int
    k: int
    experts: int
    latent: int
    shared: int
    multicast: bool
    replicated: bool
    max_m: int = MAX_M

    @property
    def box(self) -> FrontMailbox:
        """The mailbox's layout."""
        return FrontMailbox(self.tp, self.experts, self.latent, self.max_m)

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of W that this rank multiplies: for logits, latent, and gate and up."""
        logits = self.experts if self.replicated else self.experts // self.tp
        return logits, self.latent // self.tp, 2 * self.shared

    @property
    def firsts(self) -> tuple[int, int, int, int]:
        """The first tile of each of `rows`, then the number of tiles."""
        logits, latent, end = accumulate(-(-rows // TILE) for rows in self.rows)
        return 0, logits, latent, end

    @property
    def geometry(self) -> Geometry:
        """How the grid divides the work: the fewest clusters for the tiles a cluster has."""
        tiles = self.firsts[-1]
        most = max(TILES, -(-tiles // CLUSTERS))
        return Geometry(self.m, self.k, tiles, -(-tiles // most), CLUSTER, lean=True)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the address parameters, before the targets."""
        latent = ("latent_weight",) if self.latent else ()
        shared = ("shared_gate", "shared_up", "hidden") if self.shared else ()
        return ("x", "mailbox", "gate_weight", *latent, *shared)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the addresses that are published to."""
        if self.replicated and not self.latent:
            return ()
        if self.multicast:
            return ("multicast",)
        return tuple(f"mailbox{rank}" for rank in range(self.tp))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return (*self.pointers, *self.targets)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; the betas are the bits of a float."""
        betas = ("beta", "linear_beta") if self.shared else ()
        return ("m", "rank", "x_pitch", *betas)

    @property
    def name(self) -> str:
        """Readable and unique."""
        parts = [f"m{self.m}", f"tp{self.tp}", f"k{self.k}", f"e{self.experts}"]
        parts += [f"l{self.latent}"] if self.latent else []
        parts += [f"s{self.shared}"] if self.shared else []
        parts += ["multicast" if self.multicast else "peer"]
        parts += ["replicated"] if self.replicated else []
        parts += [f"rows{self.max_m}"] if self.max_m != MAX_M else []
        return "_".join(parts)

"""What an attention projection kernel is compiled for, and its parameters: the ABI. No DSL here.

The work is divided as `common/gemm.py` says: K over the 8 CTAs of a cluster, the rows of W, in
tiles, over clusters and warps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from k3fuse.kernels.common.gemm import TILE, Geometry

CLUSTER = 8  # parts of K
# A GPC of 16 to 20 SMs, as H200, B200 and GB300 have eight, holds two clusters of 8 CTAs.
CLUSTERS = 16
MAX_WEIGHTS = 8


@dataclass(frozen=True)
class Config:
    """One kernel. m: the most tokens. k: columns. rows: of each weight, one to eight."""

    m: int
    k: int
    rows: tuple[int, ...]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first tile of each weight, then the number of tiles."""
        return (0, *accumulate(-(-rows // TILE) for rows in self.rows))

    @property
    def tiles(self) -> int:
        """Tiles of all weights; a tile lies in one weight."""
        return self.firsts[-1]

    @property
    def geometry(self) -> Geometry:
        """How the grid divides the work."""
        return Geometry(self.m, self.k, self.tiles, min(CLUSTERS, self.tiles), CLUSTER)

    @property
    def weight_pointers(self) -> tuple[str, ...]:
        """Names of the weights' addresses."""
        return tuple(f"weight{i}" for i in range(len(self.rows)))

    @property
    def out_pointers(self) -> tuple[str, ...]:
        """Names of the outputs' addresses."""
        return tuple(f"out{i}" for i in range(len(self.rows)))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return ("x", *self.weight_pointers, *self.out_pointers)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters."""
        return ("m", "x_pitch")

    @property
    def name(self) -> str:
        """Readable and unique."""
        return f"m{self.m}_k{self.k}_n{'_'.join(map(str, self.rows))}"

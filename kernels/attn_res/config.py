"""What an AttnRes kernel is compiled for, and its parameters: the ABI. No DSL here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One kernel. m: the most tokens. blocks: sources beside the prefix. delta: added to it first.

    norm: an output norm follows the mix. round_mix: the mix is rounded before the norm.
    packed: f32x2 arithmetic, which sm_90a lacks; the bits are the same.
    """

    m: int
    blocks: int
    delta: bool
    norm: bool
    round_mix: bool
    packed: bool

    @property
    def tokens(self) -> int:
        """Tokens of a cluster: two share the weight vectors wherever two can be there."""
        return min(self.m, 2)

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return -(-self.m // self.tokens)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the weight vectors that are read."""
        score = ("score_norm", "score_proj") if self.blocks else ()
        return (*score, *(("out_norm",) if self.norm else ()))

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of the address parameters, before the blocks."""
        return (
            "prefix", "delta", "score_norm", "score_proj", "out_norm", "out", "new_prefix",
        )  # fmt: skip

    @property
    def block_pointers(self) -> tuple[str, ...]:
        """Names of the blocks' addresses."""
        return tuple(f"block{i}" for i in range(self.blocks))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Names of all address parameters in order."""
        return (*self.pointers, *self.block_pointers)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the 32-bit parameters; eps and out_eps are the bits of a float."""
        return ("m", "prefix_pitch", "delta_pitch", "block_pitch", "eps", "out_eps")

    @property
    def name(self) -> str:
        """Readable and unique."""
        flags = {
            "delta": self.delta,
            "norm": self.norm,
            "roundmix": self.round_mix,
            "packed": self.packed,
        }
        parts = [f"m{self.m}", f"blocks{self.blocks}", *(name for name, on in flags.items() if on)]
        return "_".join(parts)

"""The four Kimi K3 pattern families, AttnRes, and the experts behind vLLM's op."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3fuse.rewriter.pattern import Pattern

    PATTERNS: tuple[type[Pattern], ...]


def __getattr__(name: str) -> object:
    # The entry point names PATTERNS; importing the package alone must not register any op.
    if name != "PATTERNS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from k3fuse.patterns.attention_projection import AttentionProjection
    from k3fuse.patterns.attn_res import AttnResAlone
    from k3fuse.patterns.experts import Experts
    from k3fuse.patterns.experts_partials import ExpertsPartials
    from k3fuse.patterns.output_projection import OutputProjection
    from k3fuse.patterns.router import Router

    return (
        AttentionProjection, OutputProjection, Router, Experts, ExpertsPartials, AttnResAlone,
    )  # fmt: skip

"""The AttnRes behind the experts, which reads their delta: its arguments and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from k3fuse.kernels.attn_res import reference
from k3fuse.kernels.attn_res.check import residual_sources, score_and_norm
from k3fuse.kernels.tail.mix import Mix

# Behind everything else that is positional in the op's schema; meaning and order as in attn_res.
SCHEMA = (
    "Tensor? prefix=None, Tensor[]? blocks=None, int num_blocks=0, Tensor? score_norm_weight=None, "
    "Tensor? score_proj_weight=None, Tensor? out_norm_weight=None, float mix_eps=0.0, "
    "float out_eps=0.0, bool round_mix=False"
)
_DEFAULTS = (None, None, 0, None, None, None, 0.0, 0.0, False)


def mix_of(arguments: Sequence[Any]) -> Mix | None:
    """From the arguments of SCHEMA, the last of which may be missing; None without a prefix.

    Raises ValueError where a part is missing, or given without a prefix.
    """
    given = (*arguments, *_DEFAULTS[len(arguments) :])
    prefix, blocks, count, score_norm, score_proj, out_norm, *numbers = given
    parts = {
        "prefix": prefix, "score_norm_weight": score_norm, "score_proj_weight": score_proj,
    }  # fmt: skip
    missing = ", ".join(name for name, part in parts.items() if part is None)
    more = [
        name for name, part in {**parts, "out_norm_weight": out_norm}.items() if part is not None
    ]
    more += ["blocks"] if blocks else []
    if not more:
        return None
    if missing:
        raise ValueError(
            f"{missing} not given, but {', '.join(more)}; an AttnRes takes prefix, "
            "score_norm_weight and score_proj_weight, so pass all of them or nothing"
        )
    return Mix(prefix, blocks or [], count, score_norm, score_proj, out_norm, *numbers)


def check(mix: Mix, hidden: Tensor, h: int) -> None:
    """Shapes and dtypes; H and the rows are those of the delta. Raises as `attn_res` does."""
    residual_sources(hidden, h, mix.prefix, None, mix.blocks, mix.num_blocks)
    score_and_norm(h, mix.score_norm_weight, mix.score_proj_weight, mix.out_norm_weight)


def meaning(mix: Mix, delta: Tensor) -> list[Tensor]:
    """[mix, new prefix] of a delta [M, H]."""
    return reference.attn_res(
        mix.prefix, delta, mix.blocks, mix.num_blocks, mix.score_norm_weight,
        mix.score_proj_weight, mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
    )  # fmt: skip

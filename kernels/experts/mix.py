"""The AttnRes behind the experts, which reads their delta: arguments, meaning, a launch apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from k3fuse.kernels.attn_res import launch as attn_res
from k3fuse.kernels.attn_res import reference
from k3fuse.kernels.attn_res.check import residual_sources, score_and_norm
from k3fuse.kernels.attn_res.policy import TABLE
from k3fuse.kernels.build.errors import LaunchError, VariantError
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.runtime import Runtime
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
    return reference.attn_res(mix.prefix, delta, *_behind_delta(mix))


def misfit(mix: Mix, target: str) -> str:
    """Why the kernel of AttnRes cannot serve these operands, "" where it can."""
    for name in ("score_norm_weight", "score_proj_weight", "out_norm_weight"):
        weight = getattr(mix, name)
        if weight is not None and weight.dtype != mix.prefix.dtype:
            return f"{name} is {weight.dtype}, the kernel takes {mix.prefix.dtype}"
    try:
        norm = mix.out_norm_weight is not None
        attn_res.variant(_row(mix, target), target, mix.num_blocks, True, norm, mix.round_mix)
    except VariantError as error:
        return str(error)
    return ""


def launch(mix: Mix, target: str, delta: Tensor, *, runtime: Runtime) -> list[Tensor]:
    """[mix, new prefix] by the launch of AttnRes where it stands alone. Raises LaunchError."""
    rest = _behind_delta(mix)
    return attn_res.launch(_row(mix, target), target, mix.prefix, delta, *rest, runtime=runtime)


def _row(mix: Mix, target: str) -> Row:
    m = mix.prefix.shape[0]
    row = TABLE.lookup(target, m)
    if row is None:
        raise LaunchError(f"M={m} is outside the policy of AttnRes on {target!r}")
    return row


def _behind_delta(mix: Mix) -> tuple[Any, ...]:
    return (
        mix.blocks, mix.num_blocks, mix.score_norm_weight, mix.score_proj_weight,
        mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
    )  # fmt: skip

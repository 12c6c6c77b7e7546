"""From the op's tensors to kernel launches: variants, mailboxes, parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import address, block_rows, float_bits, pitch, readable
from k3fuse.kernels.common.placement import placed
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.output_projection.builder import BUILDER, config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from k3fuse.kernels.output_projection.policy import FUSED as FUSED_KERNEL
from k3fuse.kernels.output_projection.policy import TWO_SHOT
from k3fuse.kernels.prefetch.launch import NOTHING, Ahead
from k3fuse.kernels.prefetch.launch import launch as prefetch


@dataclass(frozen=True)
class Form:
    """What follows the projection. blocks: AttnRes blocks, -1 for add + RMSNorm."""

    blocks: int
    prefix: bool
    norm: bool
    round_mix: bool
    round_before: bool


@dataclass(frozen=True)
class Residual:
    """The operands of a form. Rows are [M, H], weights [H]; None where the form has none.

    blocks: one bank [M, slots, H], or rows.
    """

    form: Form
    prefix: Tensor | None
    blocks: Sequence[Tensor]
    score_norm: Tensor | None
    score_proj: Tensor | None
    out_norm: Tensor | None
    eps: float
    out_eps: float

    NAMES: ClassVar[tuple[str, ...]] = ("score_norm", "score_proj", "out_norm")

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of the residual's weights that the form has, by name."""
        found = {name: getattr(self, name) for name in self.NAMES}
        return {name: weight for name, weight in found.items() if weight is not None}


@lru_cache(maxsize=256)
def variants(row: Row, target: str, form: Form, multicast: bool) -> tuple[Variant, ...]:
    """The kernels that a policy row launches for one form, in stream order.

    multicast: publish through the multicast address, else through every rank's.
    """
    arch, tp = chip_of(target)
    stages = (FUSED,) if row.kernel == FUSED_KERNEL else (PRODUCER, CONSUMER)
    config = {
        "blocks": form.blocks,
        "prefix": int(form.prefix),
        "norm": int(form.norm),
        "round_mix": int(form.round_mix),
        "round_before": int(form.round_before),
        "multicast": int(multicast),
        "two_shot": int(row.kernel == TWO_SHOT),
    }
    shape = {"m": row.m_max, "tp": tp}
    return tuple(BUILDER.variant(arch, shape, {**config, "stage": stage}) for stage in stages)


def misfit(row: Row, target: str, x: Tensor, weight: Tensor, residual: Residual) -> str:
    """Why the kernels cannot serve these operands, "" where they can; alike on all ranks.

    Rows may have any stride, weights lie anywhere.
    """
    rows = {"prefix": residual.prefix, **{f"blocks[{i}]": b for i, b in enumerate(residual.blocks)}}
    for name, tensor in {"x": x, "weight": weight, **residual.weights, **rows}.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    try:
        first, *_ = variants(row, target, residual.form, True)
    except VariantError as error:
        return str(error)
    taken = (HIDDEN, config_of(first).k)
    if tuple(weight.shape) != taken:
        return f"weight is {tuple(weight.shape)}, the kernel takes {taken}"
    return ""


def launch(
    row: Row,
    target: str,
    group: str,
    x: Tensor,
    weight: Tensor,
    residual: Residual,
    ahead: Ahead = NOTHING,
    *,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = workspace,
) -> list[Tensor]:
    """Run a policy row's kernels; returns [out, new_prefix], [M, H] each, BF16.

    x [M, K] and the residual rows may have any stride: rows that the kernels cannot read in place
    are copied first, and so are weights. weight [H, K]. ahead: weights of later ops, prefetched
    beside the exchange. Raises ExchangeError, LaunchError.
    """
    _, tp = chip_of(target)
    mailboxes = space(group, tp)
    weights = placed("output_projection", {"weight": weight, **residual.weights})
    x_rows = readable(x)
    prefix = None if residual.prefix is None else readable(residual.prefix)
    blocks = block_rows(residual.blocks, max(residual.form.blocks, 0))
    out, new_prefix = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    values = {
        "x": address(x_rows),
        "weight": address(weights["weight"]),
        "mailbox": mailboxes.own,
        "prefix": address(prefix),
        **{name: address(weights.get(name)) for name in Residual.NAMES},
        "out": address(out),
        "new_prefix": address(new_prefix),
        **{f"block{i}": address(block) for i, block in enumerate(blocks)},
        "multicast": mailboxes.mapped.multicast,
        **{f"mailbox{rank}": there for rank, there in enumerate(mailboxes.mapped.addresses)},
        "m": x.shape[0],
        "rank": mailboxes.rank,
        "x_pitch": pitch(x_rows),
        "prefix_pitch": 0 if prefix is None else pitch(prefix),
        "block_pitch": pitch(blocks[0]) if blocks else 0,
        "eps": float_bits(residual.eps),
        "out_eps": float_bits(residual.out_eps),
    }
    # Before the first kernel: the second of a pair may start on the word of the first alone.
    prefetch(target, x.shape[0], ahead, mailboxes.rank, runtime=runtime)
    for variant in variants(row, target, residual.form, mailboxes.multicast):
        runtime.kernel(variant)(*(values[name] for name in parameter_names(variant)))
    return [out, new_prefix]

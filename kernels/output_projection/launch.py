"""From the op's tensors to kernel launches: variants, mailboxes, parameters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.output_projection.builder import BUILDER, config_of
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER, Config
from k3fuse.kernels.output_projection.policy import FUSED as FUSED_KERNEL
from k3fuse.kernels.output_projection.policy import TWO_SHOT

_ALIGNMENT = 16  # bytes; the kernels move 16 at a time
_PITCH = 8  # elements of BF16 in 16 bytes


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


def variants(row: Row, target: str, form: Form, multicast: bool) -> list[Variant]:
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
    return [BUILDER.variant(arch, shape, {**config, "stage": stage}) for stage in stages]


def launch(
    row: Row,
    target: str,
    group: str,
    x: Tensor,
    weight: Tensor,
    residual: Residual,
    *,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = workspace,
) -> list[Tensor]:
    """Run a policy row's kernels; returns [out, new_prefix], [M, H] each, BF16.

    x [M, K] and the residual rows may have any stride: rows that the kernels cannot read in place
    are copied first. weight [H, K] must be contiguous and 16-byte aligned, as all weights.
    Raises ExchangeError, LaunchError.
    """
    _, tp = chip_of(target)
    mailboxes = space(group, tp)
    rows = _Rows(x, residual)
    out, new_prefix = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    tensors = {
        "x": rows.x,
        "weight": weight,
        "prefix": rows.prefix,
        "score_norm": residual.score_norm,
        "score_proj": residual.score_proj,
        "out_norm": residual.out_norm,
        "out": out,
        "new_prefix": new_prefix,
        **{f"block{i}": block for i, block in enumerate(rows.blocks)},
    }
    values = {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}
    values["mailbox"] = mailboxes.own
    values["multicast"] = mailboxes.mapped.multicast
    for rank, address in enumerate(mailboxes.mapped.addresses):
        values[f"mailbox{rank}"] = address
    values.update(
        m=x.shape[0],
        rank=mailboxes.rank,
        x_pitch=_pitch(rows.x),
        prefix_pitch=0 if rows.prefix is None else _pitch(rows.prefix),
        block_pitch=_pitch(rows.blocks[0]) if rows.blocks else 0,
        eps=_bits(residual.eps),
        out_eps=_bits(residual.out_eps),
    )
    for variant in variants(row, target, residual.form, mailboxes.multicast):
        runtime.kernel(variant)(*(values[name] for name in _names(config_of(variant))))
    return [out, new_prefix]


class _Rows:
    """The rows of one call as the kernels read them: 16-byte pieces, one pitch for all blocks."""

    def __init__(self, x: Tensor, residual: Residual) -> None:
        self.x = _readable(x)
        self.prefix = None if residual.prefix is None else _readable(residual.prefix)
        count, blocks = max(residual.form.blocks, 0), list(residual.blocks)
        if len(blocks) == 1 and blocks[0].dim() == 3:
            bank = blocks[0]
            blocks = [bank[:, i] for i in range(count)]
        self.blocks = [_readable(block) for block in blocks[:count]]
        if len({_pitch(block) for block in self.blocks}) > 1:
            self.blocks = [block.contiguous() for block in self.blocks]


def _readable(rows: Tensor) -> Tensor:
    """The rows, copied where a row is not a run of aligned 16-byte pieces."""
    aligned = rows.data_ptr() % _ALIGNMENT == 0 and _pitch(rows) % _PITCH == 0
    if rows.stride(1) == 1 and aligned:
        return rows
    # `contiguous` would return a row at an odd address as it is.
    return rows.clone(memory_format=torch.contiguous_format)


def _pitch(rows: Tensor) -> int:
    """Elements from one row to the next; that of a lone row means nothing."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _names(config: Config) -> tuple[str, ...]:
    return (*config.pointers, *config.block_pointers, *config.targets, *config.sizes)


def _bits(value: float) -> int:
    """The bits of an FP32 number as a signed integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])

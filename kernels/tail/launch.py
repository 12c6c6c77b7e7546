"""From the tail's tensors to one kernel launch; the experts op ends with the same one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import ALIGNMENT, address, float_bits, pitch, readable
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.tail.builder import BUILDER, config_of
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.policy import TWO_SHOT


def mailboxes(group: str, tp: int) -> Workspace:
    """The tail's mailboxes of a group; see `workspace`."""
    return workspace(group, tp, layout=TailMailbox(tp))


@lru_cache(maxsize=256)
def variant(row: Row, target: str, round_before: bool, multicast: bool) -> Variant:
    """The kernel that a policy row launches.

    round_before: the normalised row is rounded before it is multiplied by the weight. multicast:
    publish through the multicast address, else through every rank's.
    """
    arch, tp = chip_of(target)
    config = {
        "two_shot": int(row.kernel == TWO_SHOT),
        "round_before": int(round_before),
        "multicast": int(multicast),
    }
    return BUILDER.variant(arch, {"m": row.m_max, "tp": tp}, config)


def misfit(routed: Tensor, shared: Tensor, norm_weight: Tensor, up_weight: Tensor) -> str:
    """Why the kernel cannot serve these operands, "" where it can.

    Rows may have any stride.
    """
    named = {
        "routed": routed, "shared": shared, "norm_weight": norm_weight, "up_weight": up_weight,
    }  # fmt: skip
    for name, tensor in named.items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    if tuple(up_weight.shape) != (HIDDEN, LATENT):
        return f"up_weight is {tuple(up_weight.shape)}, the kernel takes {(HIDDEN, LATENT)}"
    for name in ("norm_weight", "up_weight"):
        if not named[name].is_contiguous():
            return f"{name} has strides {named[name].stride()}, the kernel reads contiguous rows"
        if named[name].data_ptr() % ALIGNMENT:
            return f"{name} starts at no multiple of {ALIGNMENT} bytes"
    return ""


def launch(
    row: Row,
    target: str,
    group: str,
    routed: Tensor,
    shared: Tensor,
    norm_weight: Tensor,
    up_weight: Tensor,
    eps: float,
    round_before: bool,
    *,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = mailboxes,
) -> Tensor:
    """Run a row of this op's policy on operands without a `misfit`; returns delta [M, H], BF16.

    routed [M, 3584], shared [M, H]: this rank's partials, of any stride: rows that cannot be read
    in place are copied. norm_weight [3584]. up_weight [H, 3584], whole on every rank: each reads
    its H / tp rows of it in place. Raises ExchangeError, LaunchError.
    """
    _, tp = chip_of(target)
    boxes = space(group, tp)
    latent_rows, shared_rows = readable(routed), readable(shared)
    out = routed.new_empty(routed.shape[0], up_weight.shape[0])
    values = {
        "routed": address(latent_rows),
        "shared": address(shared_rows),
        "norm": address(norm_weight),
        "weight": address(up_weight),
        "out": address(out),
        "mailbox": boxes.own,
        "multicast": boxes.mapped.multicast,
        **{f"mailbox{rank}": there for rank, there in enumerate(boxes.mapped.addresses)},
        "m": routed.shape[0],
        "rank": boxes.rank,
        "routed_pitch": pitch(latent_rows),
        "shared_pitch": pitch(shared_rows),
        "eps": float_bits(eps),
    }
    chosen = variant(row, target, round_before, boxes.multicast)
    config = config_of(chosen)
    runtime.kernel(chosen)(*(values[name] for name in (*config.addresses, *config.sizes)))
    return out

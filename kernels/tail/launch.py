"""From the tail's tensors to one kernel launch; the experts op ends with the same one.

The launch may take the next layer's AttnRes along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from k3fuse.kernels.attn_res import launch as attn_res
from k3fuse.kernels.attn_res.policy import TABLE as ATTN_RES
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import address, block_rows, float_bits, pitch, readable
from k3fuse.kernels.common.placement import placed
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.prefetch.launch import NOTHING, Ahead
from k3fuse.kernels.prefetch.launch import launch as prefetch
from k3fuse.kernels.tail.builder import BUILDER, MAX_BLOCKS, config_of
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.policy import MIXED, TWO_SHOT


def mailboxes(group: str, tp: int) -> Workspace:
    """The tail's mailboxes of a group; see `workspace`."""
    return workspace(group, tp, layout=TailMailbox(tp))


@lru_cache(maxsize=256)
def variant(
    row: Row,
    target: str,
    round_before: bool,
    multicast: bool,
    blocks: int = -1,
    norm: bool = True,
    round_mix: bool = False,
) -> Variant:
    """The kernel that a policy row launches.

    round_before: the normalised row is rounded before it is multiplied by the weight. multicast:
    publish through the multicast address, else through every rank's. blocks: of the AttnRes in the
    same launch, -1 for none; norm, round_mix: its output norm, and a mix rounded before it.
    """
    arch, tp = chip_of(target)
    config = {
        "two_shot": int(row.kernel == TWO_SHOT),
        "round_before": int(round_before),
        "multicast": int(multicast),
        "blocks": blocks,
        "norm": int(norm),
        "round_mix": int(round_mix),
    }
    return BUILDER.variant(arch, {"m": row.m_max, "tp": tp}, config)


def misfit(routed: Tensor, shared: Tensor, norm_weight: Tensor, up_weight: Tensor) -> str:
    """Why the kernel cannot serve these operands, "" where it can; alike on all ranks.

    Rows may have any stride, weights lie anywhere.
    """
    named = {
        "routed": routed, "shared": shared, "norm_weight": norm_weight, "up_weight": up_weight,
    }  # fmt: skip
    for name, tensor in named.items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
    if tuple(up_weight.shape) != (HIDDEN, LATENT):
        return f"up_weight is {tuple(up_weight.shape)}, the kernel takes {(HIDDEN, LATENT)}"
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
    ahead: Ahead = NOTHING,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = mailboxes,
) -> Tensor:
    """Run a row of this op's policy on operands without a `misfit`; returns delta [M, H], BF16.

    routed [M, 3584], shared [M, H]: this rank's partials, of any stride: rows that cannot be read
    in place are copied, and so are weights. norm_weight [3584]. up_weight [H, 3584], whole on every
    rank: each reads its H / tp rows of it in place. ahead: weights of later ops, prefetched beside
    the exchange. Raises ExchangeError, LaunchError.
    """
    _, tp = chip_of(target)
    boxes = space(group, tp)
    chosen = variant(row, target, round_before, boxes.multicast)
    out = routed.new_empty(routed.shape[0], up_weight.shape[0])
    call = _Call(target, boxes, routed, shared, norm_weight, up_weight, eps, ahead)
    call.run(chosen, {"out": address(out)}, runtime)
    return out


def misfit_mixed(
    routed: Tensor, shared: Tensor, norm_weight: Tensor, up_weight: Tensor, mix: Mix
) -> str:
    """Why `launch_mixed` cannot serve these operands, "" where it can; alike on all ranks.

    Rows may have any stride, weights lie anywhere.
    """
    if against := misfit(routed, shared, norm_weight, up_weight):
        return against
    weights = {
        "score_norm_weight": mix.score_norm_weight, "score_proj_weight": mix.score_proj_weight,
    }  # fmt: skip
    if mix.out_norm_weight is not None:
        weights["out_norm_weight"] = mix.out_norm_weight
    rows = {"prefix": mix.prefix, **{f"blocks[{i}]": b for i, b in enumerate(mix.blocks)}}
    for name, tensor in {**rows, **weights}.items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
        if tensor.shape[-1] != HIDDEN:
            return f"{name} is {tuple(tensor.shape)}, the kernel takes {HIDDEN} columns"
    if not 0 <= mix.num_blocks <= MAX_BLOCKS:
        return f"num_blocks is {mix.num_blocks}, the kernel takes 0 to {MAX_BLOCKS}"
    return ""


def launch_mixed(
    row: Row,
    target: str,
    group: str,
    routed: Tensor,
    shared: Tensor,
    norm_weight: Tensor,
    up_weight: Tensor,
    eps: float,
    round_before: bool,
    mix: Mix,
    *,
    ahead: Ahead = NOTHING,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] = mailboxes,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a row of MIXED_TABLE on operands without a `misfit_mixed`.

    Returns (delta, mixed, new_prefix), [M, H] BF16 each: what `launch` returns, and what AttnRes
    makes of it as the delta. A row without AttnRes in its kernel is followed by the launch of
    AttnRes alone, which gives the same bits. Operands and errors as for `launch`.
    """
    if row.kernel != MIXED:
        delta = launch(
            row, target, group, routed, shared, norm_weight, up_weight, eps, round_before,
            ahead=ahead, runtime=runtime, space=space,
        )  # fmt: skip
        mixed, new_prefix = _attn_res(target, delta, mix, runtime)
        return delta, mixed, new_prefix
    _, tp = chip_of(target)
    boxes = space(group, tp)
    norm = mix.out_norm_weight
    chosen = variant(
        row, target, round_before, boxes.multicast, mix.num_blocks, norm is not None, mix.round_mix
    )
    given = {
        "score_norm": mix.score_norm_weight, "score_proj": mix.score_proj_weight, "out_norm": norm,
    }  # fmt: skip
    weights = placed("tail", {name: w for name, w in given.items() if w is not None})
    prefix, blocks = readable(mix.prefix), block_rows(mix.blocks, mix.num_blocks)
    out, mixed, new_prefix = (
        routed.new_empty(routed.shape[0], up_weight.shape[0]) for _ in range(3)
    )
    values = {
        "out": address(out),
        "prefix": address(prefix),
        **{name: address(weights.get(name)) for name in given},
        "mixed": address(mixed),
        "new_prefix": address(new_prefix),
        **{f"block{i}": address(block) for i, block in enumerate(blocks)},
        "prefix_pitch": pitch(prefix),
        "block_pitch": pitch(blocks[0]) if blocks else 0,
        "mix_eps": float_bits(mix.eps),
        "out_eps": float_bits(mix.out_eps),
    }
    call = _Call(target, boxes, routed, shared, norm_weight, up_weight, eps, ahead)
    call.run(chosen, values, runtime)
    return out, mixed, new_prefix


@dataclass
class _Call:
    """What both forms of the kernel are told."""

    target: str
    boxes: Workspace
    routed: Tensor
    shared: Tensor
    norm_weight: Tensor
    up_weight: Tensor
    eps: float
    ahead: Ahead

    def run(self, chosen: Variant, more: dict[str, int], runtime: Runtime) -> None:
        """Launch it. more: the parameters of the form, by name."""
        boxes = self.boxes
        weights = placed("tail", {"norm_weight": self.norm_weight, "up_weight": self.up_weight})
        latent_rows, shared_rows = readable(self.routed), readable(self.shared)
        values = {
            "routed": address(latent_rows),
            "shared": address(shared_rows),
            "norm": address(weights["norm_weight"]),
            "weight": address(weights["up_weight"]),
            "mailbox": boxes.own,
            "multicast": boxes.mapped.multicast,
            **{f"mailbox{rank}": there for rank, there in enumerate(boxes.mapped.addresses)},
            "m": self.routed.shape[0],
            "rank": boxes.rank,
            "routed_pitch": pitch(latent_rows),
            "shared_pitch": pitch(shared_rows),
            "eps": float_bits(self.eps),
            **more,
        }
        config = config_of(chosen)
        prefetch(self.target, self.routed.shape[0], self.ahead, boxes.rank, runtime=runtime)
        runtime.kernel(chosen)(*(values[name] for name in (*config.addresses, *config.sizes)))


def _attn_res(target: str, delta: Tensor, mix: Mix, runtime: Runtime) -> list[Tensor]:
    """AttnRes in a launch of its own."""
    row = ATTN_RES.lookup(target, delta.shape[0])
    if row is None:
        raise ValueError(f"M={delta.shape[0]} is outside the policy of {ATTN_RES.op} ({target})")
    return attn_res.launch(
        row, target, mix.prefix, delta, mix.blocks, mix.num_blocks, mix.score_norm_weight,
        mix.score_proj_weight, mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
        runtime=runtime,
    )  # fmt: skip

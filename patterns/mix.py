"""What the two families that hold an AttnRes share: arguments, buffers, the bank of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from k3fuse.patterns import symbols as s
from k3fuse.rewriter.guards import Value
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.recognise.functionalized import result_index
from k3fuse.rewriter.site import Output
from k3fuse.rewriter.subgraph import OutputSpec
from k3fuse.rewriter.view import op_of


def norm_dtype(mix: AttnRes) -> Value:
    """Return the dtype that the score and output norm weights share."""
    return s.common_dtype(mix.score_norm_weight, mix.score_proj_weight, mix.out_norm_weight)


def score_arguments(mix: AttnRes) -> tuple[Any, ...]:
    """Arguments from `blocks` to `round_mix`, in the order of both ops' schemas."""
    return (
        list(mix.blocks), mix.num_blocks, mix.score_norm_weight, mix.score_proj_weight,
        mix.out_norm_weight, mix.eps, mix.out_eps, mix.round_mix,
    )  # fmt: skip


def buffers(mix: AttnRes) -> list[fx.Node]:
    """Empty tensors that the custom op wrote its result into, used by nothing else."""
    if not mix.custom:
        return []
    call = mix.nodes[0]
    empty = [n for n in call.all_input_nodes if op_of(n) in ("aten.empty_like", "aten.empty")]
    return [n for n in empty if n not in mix.blocks and all(u is call for u in n.users)]


def prefix_result(mix: AttnRes) -> OutputSpec:
    """The node that holds the new prefix; the op's mutated `prefix` where nothing reads it."""
    if mix.new_prefix is not None:
        return mix.new_prefix
    return (mix.nodes[0], result_index(mix.nodes[0], "prefix"))


def bank_output(mix: AttnRes, row: int | fx.Node) -> list[Output]:
    """The bank after the custom op: unchanged, or with the new prefix written into its slot.

    row: index of the op's result that is the new prefix, or the prefix node where nothing is added.
    The write stays in the graph as select_scatter, which Inductor does in place.
    """
    if mix.blocks_out is None:
        return []
    bank, slot = mix.blocks[0], mix.block_write
    if slot < 0:
        return [Output(mix.blocks_out, bank)]

    def write(
        graph: fx.Graph, results: list[fx.Node], current: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        written = results[row] if isinstance(row, int) else current(row)
        scatter = torch.ops.aten.select_scatter.default
        return graph.call_function(scatter, (current(bank), written, 1, slot))

    return [Output(mix.blocks_out, write)]

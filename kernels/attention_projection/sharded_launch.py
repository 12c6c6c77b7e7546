"""From the op's tensors to one launch of the row-sharded kernel, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from torch import Tensor

from k3fuse.kernels.attention_projection.builder import rows_shape
from k3fuse.kernels.attention_projection.config import MAX_WEIGHTS
from k3fuse.kernels.attention_projection.launch import inputs, misplaced, narrow
from k3fuse.kernels.attention_projection.policy import SHARDED_STREAM
from k3fuse.kernels.attention_projection.sharded_builder import BUILDER, sharded_of, split_shape
from k3fuse.kernels.attention_projection.share import RowMailbox
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.exchange import Workspace, workspace
from k3fuse.kernels.common.operands import address, readable
from k3fuse.kernels.common.placement import placed
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime


@lru_cache(maxsize=256)
def variant(
    row: Row, target: str, k: int, rows: tuple[int, ...], split: tuple[int, ...], multicast: bool
) -> Variant:
    """The kernel that a policy row launches for weights [rows_i, k], the first split_i rows shared.

    Raises VariantError for sizes outside the kernel.
    """
    arch, tp = chip_of(target)
    shape = {"m": row.m_max, "k": k, "tp": tp, **rows_shape(rows), **split_shape(split)}
    stream = int(row.kernel == SHARDED_STREAM)
    return BUILDER.variant(arch, shape, {"stream": stream, "multicast": int(multicast)})


def misfit(
    row: Row, target: str, x: Tensor, weights: Sequence[Tensor], split: Sequence[int], group: str
) -> str:
    """Why the kernel cannot serve these operands, "" where it can; alike on all ranks.

    x of any stride, weights wherever they lie.
    """
    if not group:
        return "no group is named, the kernel exchanges rows over one"
    if unfit := narrow(x, weights):
        return unfit
    if len(weights) > MAX_WEIGHTS:
        return f"there are {len(weights)} weights, the kernel takes {MAX_WEIGHTS}"
    heights = tuple(weight.shape[0] for weight in weights)
    try:
        variant(row, target, x.shape[1], heights, tuple(split), True)
    except VariantError as error:
        return str(error)
    return ""


def launch(
    row: Row,
    target: str,
    group: str,
    x: Tensor,
    weights: Sequence[Tensor],
    split: Sequence[int],
    *,
    runtime: Runtime = RUNTIME,
    space: Callable[[str, int], Workspace] | None = None,
) -> list[Tensor]:
    """Run a policy row's kernel on operands without a `misfit`; returns [M, N_i] each, BF16.

    The weights are the whole ones; each rank reads its share of the first split_i rows of them. x
    and those rows are equal on all ranks, which call this with the same M. Raises ExchangeError,
    LaunchError. What cannot be read in place is copied.
    """
    _, tp = chip_of(target)
    layout = RowMailbox(tp, sum(split))
    mailboxes = (space or partial(workspace, layout=layout))(group, tp)
    stream = row.kernel == SHARDED_STREAM
    named = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    weights = list(placed("attention_projection", named, partial(misplaced, stream)).values())
    rows = readable(x)
    heights = tuple(weight.shape[0] for weight in weights)
    multicast = mailboxes.multicast
    chosen = variant(row, target, x.shape[1], heights, tuple(split), multicast)
    parts = sharded_of(chosen).share.parts
    read = [part.of(weights[part.weight], mailboxes.rank) for part in parts]
    outs = [x.new_empty(x.shape[0], height) for height in heights]
    values = {
        **inputs(stream, rows, read),
        **{f"out{i}": address(out) for i, out in enumerate(outs)},
        "mailbox": mailboxes.own,
        "multicast": mailboxes.mapped.multicast,
        **{f"mailbox{rank}": there for rank, there in enumerate(mailboxes.mapped.addresses)},
        "m": x.shape[0],
        "rank": mailboxes.rank,
    }
    runtime.kernel(chosen)(*(values[name] for name in parameter_names(chosen)))
    return outs

"""Turns a policy row into the engine's Kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from k3fuse.kernels.common.policy import MAX_M, Row, Table
from k3fuse.kernels.prefetch import policy as prefetch
from k3fuse.kernels.prefetch.builder import MAX_RANGES
from k3fuse.patterns.symbols import M
from k3fuse.patterns.workbench import facts
from k3fuse.rewriter.site import Ahead, Kernel, Read, Site
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import shape_of


def pick(
    table: Table,
    site: Site,
    target: Target,
    sizes: Mapping[str, int] | None = None,
    *,
    op: str = "",
    unread: int = 0,
) -> Kernel | None:
    """Return the kernel of the row for the site's M; of all rows where M is symbolic.

    sizes: of the kernel's variant, which is made for the row's largest M, where the site's symbols
    do not hold them. op: its builder, where that is not the table's op. unread: see Kernel.

    A symbolic M is decided at run time, so the kernel reads "a<=8, b<=64" and counts the launches
    of the first row. None for a target without rows.
    """
    rows = table.rows.get(target.name)
    if not rows:
        return None
    value = site.values[M]
    if value.is_Integer:
        row = next((r for r in rows if r.m_min <= int(value) <= r.m_max), None)
        if row is None:
            return None
        known = None if sizes is None else {"m": row.m_max, **sizes}
        built = facts(op or table.op, site, target, known)
        available = row.kernel is not None
        return Kernel(_name(row), available, row.launches, _span(row), row.hops, unread, built)
    name = ", ".join(f"{_name(r)}<={r.m_max}" for r in rows) if len(rows) > 1 else _name(rows[0])
    available = all(r.kernel is not None for r in rows)
    said = f"decided at run time, stock above M={MAX_M}"
    return Kernel(name, available, rows[0].launches, said, rows[0].hops, unread)


def others_share(
    rows: Iterable[object], columns: object, dtype: torch.dtype, target: Target
) -> int:
    """Bytes of weights that this rank leaves to the others, where the ranks split their rows.

    rows, columns: of the weights. 0 on the reference, which reads all of them.
    """
    if target.is_reference or not isinstance(columns, int):
        return 0
    ranks = max(target.tp, 1)
    left = sum(n - n // ranks for n in rows if isinstance(n, int))
    return left * columns * dtype.itemsize


def read(weight: fx.Node, target: Target, group: str = "", split: object = 0) -> Read:
    """A weight [N, K] that a site's op reads, for whoever asks for it early.

    split: leading rows of which each rank of the group reads a share; on the reference none.
    """
    shape = shape_of(weight)
    rows, size = shape[0], weight.meta["val"].element_size()
    if not all(isinstance(n, int) for n in shape):
        return Read(weight, 0)
    whole = math.prod(shape) * size
    if target.is_reference or not isinstance(split, int) or not split:
        return Read(weight, whole)
    own = split // max(target.tp, 1) + rows - split
    return Read(weight, whole // rows * own, split, group, 1 + (split < rows))


def ahead(site: Site, target: Target, group: str) -> Ahead | None:
    """What an op that exchanges rows over `group` may ask for; None for a target without rows."""
    rows = prefetch.ROWS.get(target.name)
    if not rows:
        return None
    value = site.values[M]
    # A symbolic count is decided at run time, and counted by the first row, as in `pick`.
    row = prefetch.row_of(target.name, int(value)) if value.is_Integer else rows[0]
    against = "" if row is not None else f"the policy has no row for M = {value}"
    launches = 0 if target.is_reference or row is None else row.launches
    return Ahead(prefetch.MOST_BYTES, MAX_RANGES, launches, group, against)


def _name(row: Row) -> str:
    return row.kernel or row.planned


def _span(row: Row) -> str:
    return f"M {row.m_min}..{row.m_max}: {row.reason}"

"""Which kernels serve the experts: shared gate and up, the experts, the tail.

`TAKING` is the same where a router has made the shared expert's hidden row: gate and up are in its
front kernel, and two launches are left.

`MIXING` and `TAKING_MIXING` are the same where the op also does the AttnRes that reads its delta:
in the tail's launch where the tail's policy says so, else in one of its own.

One kernel of each for all token counts, compiled for up to 8, 16, 32 and 64 tokens. The experts'
kernel has two engines for the same units: products with block scales (tcgen05), where the chip has
them, and their twin, mma.sync in BF16, on every chip. The counts of `docs/kernels/experts.md`
decide: the first needs fewer bytes and fewer instructions at every shape, in both orders of
weights. What it does not take runs the twin, and so does everything where `K3FUSE_EXPERTS_ENGINE`
says so; every K3FUSE_ variable is part of a rewrite's key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from k3fuse.kernels.common.policy import MAX_M, REFERENCE, Row, Table, table
from k3fuse.kernels.tail.policy import MIXED as TAIL_MIXED
from k3fuse.kernels.tail.policy import MIXED_TABLE

EXPERTS = "mx_experts_and_latent_tail"
MIXED = "mx_experts_and_latent_tail_mix"
# Tokens up to which the tail's launch does the AttnRes behind it, on every target with kernels.
MIX_MOST = min(
    max(row.m_max for row in rows if row.kernel == TAIL_MIXED)
    for target, rows in MIXED_TABLE.rows.items()
    if target != REFERENCE
)
BLOCK, TWIN = "block_scaled", "bf16"
# Architecture -> engine of the routed experts; others have the twin.
ENGINES: Mapping[str, str] = MappingProxyType({"sm_100a": BLOCK, "sm_103a": BLOCK})

ENVIRONMENT = "K3FUSE_EXPERTS_ENGINE"


def engine_of(arch: str) -> str:
    """The engine of the routed experts on a chip: the environment's, or that of `ENGINES`.

    Raises ValueError where the environment names none of the chip's engines.
    """
    own = ENGINES.get(arch, TWIN)
    chosen = os.environ.get(ENVIRONMENT) or own
    if chosen not in (own, TWIN):
        known = " or ".join(dict.fromkeys((own, TWIN)))
        raise ValueError(f"{ENVIRONMENT}={chosen!r} is no engine of {arch}; use {known}")
    return chosen


def _rows(launches: int, *, two_shot: bool = False) -> tuple[Row, ...]:
    """two_shot: the largest counts have the tail's exchange of two hops. Hops are the tail's."""
    reason = "each distinct expert's weights pass by once, with {} tokens at most"
    return tuple(
        Row(
            most // 2 + 1 if most > 8 else 1, most, EXPERTS, launches, reason.format(most),
            hops=2 if two_shot and most == MAX_M else 1,
        )
        for most in (8, 16, 32, MAX_M)
    )  # fmt: skip


TABLE = table("experts", *_rows(3), tp16=_rows(3, two_shot=True))
TAKING = table("experts", *_rows(2), tp16=_rows(2, two_shot=True))


def _with_mix(table: Table) -> Table:
    """The table of an op that does the AttnRes behind the experts, too."""

    def row_of(target: str, row: Row) -> Row:
        last = MIXED_TABLE.lookup(target, row.m_max)
        if last is None or row.kernel == REFERENCE:
            return row
        name = MIXED if last.kernel == TAIL_MIXED else row.kernel
        return replace(
            row, kernel=name, launches=row.launches + last.launches - 1,
            reason=f"{row.reason}; {last.reason}",
        )  # fmt: skip

    rows = {name: tuple(row_of(name, r) for r in of) for name, of in table.rows.items()}
    return Table(table.op, rows)


MIXING, TAKING_MIXING = _with_mix(TABLE), _with_mix(TAKING)


def mixes(target: str, m: int) -> bool:
    """Whether one launch does the tail and the AttnRes behind it for `m` tokens."""
    row = MIXING.lookup(target, m)
    return row is not None and row.kernel in (MIXED, REFERENCE)

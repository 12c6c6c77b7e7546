"""Which kernels serve the experts: shared gate and up, the experts, the tail.

`TAKING` is the same where a router has made the shared expert's hidden row: gate and up are in its
front kernel, and two launches are left.

`with_mix` of a table is the same where the op also does the AttnRes that reads its delta. Up to 8
tokens the tail's launch does it. Above, the AttnRes has a launch of its own inside the op; the
rewrite leaves it a site of its own there.

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

EXPERTS = "mx_experts_and_latent_tail"
MIXED = "mx_experts_and_latent_tail_mix"
# Tokens up to which the tail's launch does the AttnRes behind it.
MIX_MOST = 8
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


def with_mix(rows: Table) -> Table:
    """The table of an op that does the AttnRes behind the experts, too."""

    def row_of(row: Row) -> Row:
        if row.kernel == REFERENCE:
            return row
        if row.m_max <= MIX_MOST:
            return replace(row, kernel=MIXED, reason=f"{row.reason}; the tail does the AttnRes")
        return replace(row, launches=row.launches + 1, reason=f"{row.reason}; AttnRes apart")

    return Table(rows.op, {name: tuple(map(row_of, of)) for name, of in rows.rows.items()})


MIXING, TAKING_MIXING = with_mix(TABLE), with_mix(TAKING)


def mixes(target: str, m: int) -> bool:
    """Whether one launch does the tail and the AttnRes behind it for `m` tokens."""
    row = MIXING.lookup(target, m)
    return row is not None and row.kernel in (MIXED, REFERENCE)

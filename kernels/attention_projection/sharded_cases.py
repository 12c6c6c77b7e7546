"""What the row-sharded kernel must do, on all ranks.

Off by default, so not among the op's cases:
`k3fuse kernels check k3fuse.kernels.attention_projection.sharded_cases:cases`.
"""

from __future__ import annotations

from functools import partial

from k3fuse.kernels.attention_projection.builder import MLA, STREAM_ARCHS, rows_shape
from k3fuse.kernels.attention_projection.policy import SHARDED
from k3fuse.kernels.attention_projection.sharded_builder import (
    BUILDER,
    OP,
    SPLIT,
    sharded_of,
    split_shape,
)
from k3fuse.kernels.attention_projection.sharded_problem import BF16, make
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Case, CheckTarget, Output, Step
from k3fuse.kernels.common.tolerances import tolerance

# For random schedules and the race checker: two ranks, shares that end inside a tile.
SMALL = {"tp": 2, "k": 512, "n0": 88, "s0": 48, "n1": 16, "s1": 16, "n2": 12}
SMALL_M = 3


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Kimi K3's latent attention, its weights merged and apart."""
    row = SHARDED.lookup(target.name, m)
    if row is None:
        return ()
    stream = {"stream": int(target.arch in STREAM_ARCHS)}
    few = BUILDER.variant(target.arch, {"m": row.m_max, **SMALL}, stream)
    found = []
    for rows in MLA[target.tp]:
        shape = {"m": row.m_max, "tp": target.tp, **rows_shape(rows), **split_shape(SPLIT[rows])}
        full = BUILDER.variant(target.arch, shape, stream)
        steps = partial(step, full, m), partial(step, few, m), partial(step, few, min(m, SMALL_M))
        found.append(Case(OP, full.name, *steps, waits=True))
    return tuple(found)


def step(variant: Variant, m: int, seed: int) -> Step:
    """x of m tokens, the same on all ranks; what the reference says, on every rank."""
    problem = make(sharded_of(variant).share, variant.size("k"), m, seed)
    band = tolerance(BF16, problem.k)
    outputs = [
        Output(f"out{i}", place, out, wanted, band)
        for place, rank in enumerate(problem.ranks)
        for i, (out, wanted) in enumerate(
            zip(problem.outs[place], problem.expected(rank), strict=True)
        )
    ]
    held = {
        "mailboxes armed": problem.disarmed, "ranks equal": problem.unequal,
        "calls counted": problem.miscounted,
    }  # fmt: skip
    return Step((problem.launch(variant),), tuple(outputs), held)

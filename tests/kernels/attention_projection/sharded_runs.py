"""Runs of the row-sharded kernel for its tests: all ranks of a group, or one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.attention_projection.builder import MLA, rows_shape
from k3fuse.kernels.attention_projection.sharded_builder import (
    BUILDER,
    SPLIT,
    sharded_of,
    split_shape,
)
from k3fuse.kernels.attention_projection.sharded_cases import SMALL
from k3fuse.kernels.attention_projection.sharded_problem import BF16, Problem, make
from k3fuse.kernels.attention_projection.share import Share
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import SequenceReport, run_sequence
from k3fuse.kernels.common.tolerances import compare, tolerance
from stored import store


def kernel(m: int, shape: Mapping[str, int] = SMALL, **config: int) -> Variant:
    """The variant for up to m tokens: the stream kernel, unless config says stream=0."""
    return BUILDER.variant("sm_103a", {"m": m, **shape}, config)


def small(m: int, **config: int) -> Variant:
    """The small kernel for up to m tokens."""
    return kernel(m, **config)


def full(rows: tuple[int, ...], m: int, stream: int = 1) -> Variant:
    """The variant at the sizes of Kimi K3 for m tokens."""
    tp = next(tp for tp, forms in MLA.items() if rows in forms)
    shape = {"tp": tp, **rows_shape(rows), **split_shape(SPLIT[rows])}
    return kernel(next(most for most in (8, 16, 32, 64) if m <= most), shape, stream=stream)


def share_of(variant: Variant) -> Share:
    """How a variant shares rows out."""
    return sharded_of(variant).share


def problem(variant: Variant, m: int, seed: int = 0, **how: Any) -> Problem:
    """A problem for a variant."""
    return make(share_of(variant), variant.size("k"), m, seed, **how)


def run(made: Variant | Built, *problems: Problem, **how: Any) -> SequenceReport:
    """One launch a problem, in stream order, on the ranks of the problems."""
    return run_sequence([each.launch(made) for each in problems], cache=store(), **how)


def wrong(given: Problem, calls: int = 1) -> str:
    """One line that says what is not as it must be after a call, "" where all is."""
    said = given.unequal() or given.disarmed() or given.miscounted(calls)
    return said or wrong_values(given)


def wrong_values(given: Problem) -> str:
    """The same of the outputs."""
    band = tolerance(BF16, given.k)
    for rank, outs in zip(given.ranks, given.outs, strict=True):
        for i, (out, expected) in enumerate(zip(outs, given.expected(rank), strict=True)):
            found = compare(out, expected, band)
            if not found.ok:
                return f"out{i} of rank {rank}: {found}"
    return ""


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Equal bits of each pair."""
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)

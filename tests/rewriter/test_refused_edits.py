"""Sites that the op itself refuses, or that a value run cannot judge: left, with the reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from build import Hand, aten, identity, run
from k3fuse.patterns.output_projection import OutputProjection
from k3fuse.rewriter import values
from k3fuse.rewriter.site import Replacement


def projection() -> Any:
    """o-proj, sum, norm; a second norm weight is there for nothing."""
    h = Hand()
    x, w = h.input("x", 4, 32), h.input("w", 64, 32)
    residual, norm = h.input("r", 4, 64), h.input("n", 64)
    h.input("wide", 4, 32, dtype=torch.float32)
    h.input("short", 63)
    turned = h.call(aten.t.default, h.input("turned", 64, 4))
    y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
    total = h.call(aten.add.Tensor, y, residual)
    return h.done(h.call(aten.rms_norm.default, total, [64], norm, 1e-5), total, turned)


class _Other(OutputProjection):
    """Hands the op another operand than the graph has."""

    place, operand = 0, ""

    def replacement(self, *args: Any) -> Replacement:
        planned = super().replacement(*args)
        view = args[1]
        given = list(planned.args)
        if self.operand:
            given[self.place] = next(n for n in view.nodes if n.name == self.operand)
        return replace(planned, args=tuple(given))


def _other(place: int, operand: str) -> OutputProjection:
    pattern = _Other()
    pattern.place, pattern.operand = place, operand
    return pattern


@pytest.mark.parametrize(
    ("place", "operand", "code", "words"),
    [
        (0, "wide", "DTYPE_MISMATCH", "expected torch.float32"),
        (3, "short", "SHAPE_MISMATCH", "63"),
        (2, "t_default", "STRIDE_OR_ALIGN", "strides"),
    ],
)
def test_what_the_op_refuses_stays_as_it_was(
    place: int, operand: str, code: str, words: str
) -> None:
    module = projection()
    names = [n.name for n in module.graph.nodes]
    before = identity(module)
    assert operand in names, names
    report = run(module, patterns=(_other(place, operand),))
    (site,) = report.sites
    assert [r.code.value for r in site.reasons] == [code]
    assert "the fused op refuses" in site.reasons[0].sentence
    assert words in site.reasons[0].sentence
    assert identity(module) == before
    assert report.events == {}
    # The control: its own operands are taken.
    assert run(projection(), patterns=(_other(0, ""),)).sites[0].outcome == "found"


@pytest.mark.parametrize(
    ("have", "want", "least", "most"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0, 0.0),
        (torch.tensor([1, 2]), torch.tensor([2, 1]), math.inf, math.inf),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf, math.inf),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 0.0, 0.0),
        (torch.empty(0, 4), torch.empty(0, 4), 0.0, 0.0),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.0078]).bfloat16(), 0.0, 1.0),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.25]).bfloat16(), 1.1, 9.0),
    ],
)
def test_the_distance_of_two_values(
    have: torch.Tensor, want: torch.Tensor, least: float, most: float
) -> None:
    assert least <= values._worst(have, want) <= most


def test_drawn_operands_are_what_an_op_takes() -> None:
    """Scales near 1, indices of experts that exist, weights that keep a row's size."""
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, *size: int, weight: bool = False) -> torch.Tensor:
        return values._random(dtype, size, 5, generator, weight=weight)

    scales, ids = draw(torch.uint8, 64, 4), draw(torch.int64, 64, 4)
    assert (int(scales.min()), int(scales.max())) == (118, 130)
    assert (int(ids.min()), int(ids.max())) == (0, 4)
    row, weight = draw(torch.float32, 8, 1024), draw(torch.float32, 8, 1024, weight=True)
    assert 0.9 < float(row.std()) < 1.1
    assert 0.9 < float(weight.std()) * 32 < 1.1

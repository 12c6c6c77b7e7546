"""The catalogue of defects, by kind of place."""

from __future__ import annotations

from defect import Defect
from defects_around import AROUND
from defects_operands import OPERANDS
from defects_steps import STEPS
from defects_values import VALUES

CATALOGUE: tuple[Defect, ...] = (*OPERANDS, *STEPS, *VALUES, *AROUND)

__all__ = ["CATALOGUE", "Defect"]

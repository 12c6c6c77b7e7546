"""The expert plan: which tokens each expert serves, in units of at most eight.

The route kernel makes it where `plan` asks for it. No pattern asks: the experts' kernel sorts the
ids itself, in every CTA.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 8  # places of a unit
UNIT_WORDS = 2 + UNIT  # expert, count, places
MAX_UNITS = 1024
PLAN_WORDS = 1 + MAX_UNITS * UNIT_WORDS


def expert_plan(ids: Tensor) -> Tensor:
    """The plan of ids [M, k] (distinct in a row): int32 [PLAN_WORDS].

    Word 0 is the number of units. Unit u has ten words from 1 + 10 u on: the expert, a count of 1
    to 8, and as many places token * k + slot; what is not used is -1. Units are in order of
    experts, an expert's places in order of tokens. More than MAX_UNITS places have no plan: 0
    units.
    """
    plan = torch.full((PLAN_WORDS,), -1, dtype=torch.int32, device=ids.device)
    flat = ids.reshape(-1)
    if not 0 < flat.numel() <= MAX_UNITS:
        plan[0] = 0
        return plan
    experts, places = torch.sort(flat, stable=True)
    first = torch.searchsorted(experts, experts)
    rank = torch.arange(flat.numel(), device=ids.device) - first
    left = torch.searchsorted(experts, experts, right=True) - first - rank
    head = rank % UNIT == 0
    unit = torch.cumsum(head, 0) - 1
    start = 1 + unit * UNIT_WORDS
    plan[0] = unit[-1] + 1
    plan[start + 2 + rank % UNIT] = places.int()
    # What is no head writes the word it has written already.
    count = torch.where(head, left.clamp(max=UNIT), places)
    plan[torch.where(head, start + 1, start + 2 + rank % UNIT)] = count.int()
    plan[torch.where(head, start, start + 2 + rank % UNIT)] = torch.where(
        head, experts, places
    ).int()
    return plan

"""One defect: a knob of a family set wrong, and what may come of it.

`meaning="changed"`: no site of the family's pattern may be taken. `meaning="kept"`: the op can say
it (an epsilon, a factor), or the spelling alone differs; taking it is right if the values agree.
`codes`: the reasons that a refusal may give; "" where the place is no candidate at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Meaning = Literal["changed", "kept"]


@dataclass(frozen=True)
class Defect:
    """One knob set wrong, with the other knobs that make it count."""

    name: str
    kind: str
    families: tuple[str, ...]
    knobs: Mapping[str, Any]
    meaning: Meaning
    codes: frozenset[str] = field(default=frozenset())


def wrong(kind: str, families: str, meaning: Meaning, codes: str, /, **knobs: Any) -> Defect:
    names = tuple(families.split())
    text = ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in sorted(knobs.items()))
    allowed = frozenset("" if c == "-" else c for c in codes.split())
    return Defect(f"{kind} of {families}: {text}", kind, names, knobs, meaning, allowed)


# Families by what they share.
PROJECTED = "o_add_norm o_attn_res"
MIX = "o_attn_res attn_res"
NORMED = "o_add_norm o_attn_res attn_res experts attention"
W: dict[str, Any] = {"norm_how": "wide"}

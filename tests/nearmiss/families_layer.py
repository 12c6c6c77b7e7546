"""What follows a layer's experts: the AttnRes of the next attention, which reads delta."""

from __future__ import annotations

import torch
from torch import Tensor

from families import MIX, after_mix, mix, score_weights, stacked
from families_moe import experts
from parts import HARMLESS, LINEARS, Family, H, Inputs, Knobs, M, add


def experts_mix(knobs: Knobs, inp: Inputs) -> tuple[Tensor, ...]:
    """The MoE block, then the AttnRes of its delta."""
    prefix = inp.rows("prefix", M, H)
    delta, *too = experts(knobs, inp)
    if knobs.get("prefix_written"):
        prefix.mul_(1.5)
    prefix = {
        "given": lambda: prefix,
        "behind": lambda: prefix * 0.5,
        "delta": lambda: prefix + delta.mean(),
        "twice": lambda: delta,
    }[knobs.get("prefix_of", "given")]()
    read = {
        "delta": lambda: delta,
        "another": lambda: inp.rows("delta2", M, H),
        "rolled": lambda: delta.roll(1, 0),
        "scaled": lambda: delta * 1.5,
        "regrouped": lambda: delta.reshape(M // 2, 2, H).transpose(0, 1).reshape(M, H),
        "copy": lambda: delta.clone(),
    }[knobs["mix_of"]]()
    if knobs.get("delta_written"):
        delta.mul_(1.5)
    total = add(prefix, read, knobs).to(knobs["dtype"])
    norm, proj = score_weights(knobs, inp)
    rows = {"delta": lambda: delta, "made of delta": lambda: inp.rows("own", M, H) * delta.mean()}
    if row := rows.get(knobs.get("block_of", "")):
        sources = torch.stack([inp.rows("block0", M, H), row(), total], 1)
    else:
        sources = stacked(knobs, inp, total, knobs["blocks"])
    out = after_mix(mix(sources, norm, proj, knobs), knobs, inp)
    more = [delta] if knobs["delta too"] else []
    if knobs.get("second"):
        other = add(inp.rows("prefix2", M, H), read, knobs).to(knobs["dtype"])
        norm2, proj2 = score_weights(knobs, inp, "second")
        more += [mix(stacked(knobs, inp, other, 1, "second"), norm2, proj2, knobs), other]
    return (out, total, *more, *too)


LAYER = (
    Family(
        "experts_mix",
        "experts",
        experts_mix,
        {
            **MIX,
            "experts": ("mx", "batched", "einsum"),
            "shared": (True,),
            "merged": (False, True),
            "linear": LINEARS,
            "between": HARMLESS,
            "sum": ("a + b", "b + a"),
            "given_routing": (False, True),
            "round_mix": (False, False, True),
            "delta too": (False, False, True),
            "mix_of": ("delta", "delta", "copy"),
            "prefix_of": ("given", "given", "behind"),
        },
    ),
)

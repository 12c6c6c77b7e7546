"""Cases of AttnRes where it stands alone: with and without delta, output norm and blocks."""

from __future__ import annotations

from functools import partial

import torch

from k3fuse.kernels.attn_res.builder import BUILDER, config_of
from k3fuse.kernels.attn_res.reference import attn_res
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.simulator import Fresh

EPS = 1e-5  # rms_norm_eps of Kimi K3
# (blocks, delta, norm): inside a layer, at the first block, and without what is optional.
FORMS = ((8, 1, 1), (0, 1, 1), (4, 0, 0))
FEW = 2  # tokens of a cluster, and clusters share nothing


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """One case a form. Every rank does the same work, so one is run."""
    found = []
    for blocks, delta, norm in FORMS:
        full, few = (
            BUILDER.variant(
                target.arch, {"m": rows, "blocks": blocks}, {"delta": delta, "norm": norm}
            )
            for rows in (m, min(m, FEW))
        )
        steps = partial(step, full), partial(step, few), partial(step, few)
        found.append(Case(BUILDER.op, full.name, *steps))
    return tuple(found)


def step(variant: Variant, seed: int, tokens: int = 0) -> Step:
    """Sources about 1, blocks of growing size, what the reference says, and every byte once.

    tokens: as many as the kernel is for by default.
    """
    config = config_of(variant)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    m = tokens or config.m
    prefix, delta = normal(m, HIDDEN), normal(m, HIDDEN) if config.delta else None
    blocks = [normal(m, HIDDEN, scale=1 + 0.1 * i) for i in range(config.blocks)]
    score_norm, score_proj = normal(HIDDEN), normal(HIDDEN, scale=0.05)
    out_norm = normal(HIDDEN) if config.norm else None
    out, new_prefix = (torch.empty(m, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    expected = attn_res(
        prefix, delta, blocks, config.blocks, score_norm, score_proj, out_norm, EPS, EPS,
        config.round_mix,
    )  # fmt: skip
    bits = float_bits(EPS)
    values: dict[str, Value] = {
        "prefix": prefix, "delta": 0 if delta is None else delta, "score_norm": score_norm,
        "score_proj": score_proj, "out_norm": 0 if out_norm is None else out_norm,
        "out": Fresh(out), "new_prefix": 0 if delta is None else Fresh(new_prefix),
        **dict(zip(config.block_pointers, blocks, strict=True)),
        "m": m, "prefix_pitch": HIDDEN, "delta_pitch": HIDDEN, "block_pitch": HIDDEN,
        "eps": bits, "out_eps": bits,
    }  # fmt: skip
    inputs = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    if not config.blocks:  # one source: its weight is 1 whatever its score
        del inputs["score_norm"], inputs["score_proj"]
    needed = {name: tensor.nbytes for name, tensor in inputs.items()}
    needed |= {name: v.tensor.nbytes for name, v in values.items() if isinstance(v, Fresh)}
    band = tolerance(torch.bfloat16, HIDDEN)
    written = zip(("out", "new_prefix"), (out, new_prefix), expected, strict=False)
    outputs = (Output(name, 0, tensor, wanted, band) for name, tensor, wanted in written)
    return Step((Launch(variant, [values], needed),), tuple(outputs))

"""Narrow experts for the tests of the block-scaled engine, and its twin's result."""

from __future__ import annotations

from dataclasses import replace

import torch
from expert_runs import SMALL, launch
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.experts.block_config import BlockConfig
from k3fuse.kernels.experts.builder import config_of
from k3fuse.kernels.experts.cases import Problem, kernel

# As on 16 ranks: two rows of W2 in a line, and a block that both share.
LINES = {**SMALL, "inter": 192}
# Two blocks of columns in a tile of FC1, as on 16 ranks; two tiles of FC2, as on 8.
HALVES = {**SMALL, "latent": 1792, "inter": 128}


def block(shape: dict[str, int], m: int = 64, arch: str = "sm_103a", **config: int) -> Variant:
    """The block-scaled kernel of a shape for up to m tokens, by default in one cluster."""
    return kernel(arch, {**shape, "m": m}, **{"clusters": 1, **config}, block=1)


def settings(variant: Variant) -> BlockConfig:
    """The configuration of a block-scaled variant."""
    config = config_of(variant)
    assert isinstance(config, BlockConfig)
    return config


def twin_of(variant: Variant) -> Variant:
    """The mma.sync kernel of the same units."""
    config = {**dict(variant.config), "block": 0}
    return kernel(variant.arch, dict(variant.shape), **config)


def twin_rows(variant: Variant, made: Problem) -> tuple[Tensor, Tensor]:
    """What the twin makes of the same operands: rows of slots, and their sums."""
    twin = twin_of(variant)
    other = replace(
        made,
        config=config_of(twin),
        rows=torch.empty_like(made.rows),
        routed=torch.empty_like(made.routed),
        arrivals=torch.zeros_like(made.arrivals),
    )
    launch(twin, other)
    return other.rows, other.routed

"""The tail with AttnRes behind it, for its tests: runs, and what the separate kernels give."""

from __future__ import annotations

from typing import Any

import torch
from tail_runs import kernel, run, same, store
from torch import Tensor

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.simulator import Fresh
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.mix_problem import MixProblem, make_mixed
from k3fuse.kernels.tail.problem import BF16, EPS, Problem, make

HIDDEN = 7168


def mixing(tp: int, m: int = 8, blocks: int = 8, **tuning: int) -> Variant:
    """The kernel at Kimi K3's sizes for m tokens, with AttnRes of so many blocks."""
    tuning.setdefault("max_m", 8)
    return kernel(tp, m, HIDDEN // tp, blocks=blocks, **tuning)


def mix_problem(variant: Variant, m: int, seed: int = 0, **options: Any) -> MixProblem:
    """Inputs for it."""
    return make_mixed(config_of(variant), m, seed, **options)


def alone(problem: MixProblem, delta: Tensor, most: int = 8) -> tuple[Tensor, Tensor]:
    """(mixed, new_prefix) of the kernel of AttnRes alone, on these finished rows."""
    config, m = problem.config, problem.m
    tuning = {"norm": int(config.norm), "round_mix": int(config.round_mix)}
    variant = ATTN_RES.variant("sm_103a", {"m": most, "blocks": config.blocks}, tuning)
    mixed, new_prefix = (torch.empty(m, HIDDEN, dtype=BF16) for _ in range(2))
    bits = float_bits(EPS)
    values: dict[str, Any] = {
        **problem.sources.named(), "delta": delta, "out": Fresh(mixed),
        "new_prefix": Fresh(new_prefix), "m": m, "prefix_pitch": HIDDEN, "delta_pitch": HIDDEN,
        "block_pitch": HIDDEN, "eps": bits, "out_eps": bits,
    }  # fmt: skip
    launch = Launch(variant, [{name: values[name] for name in parameter_names(variant)}])
    run_sequence([launch], cache=store())
    return mixed, new_prefix


def check_mix(problem: MixProblem, rank: int = 0) -> None:
    """Mixed rows and prefix have the bits that AttnRes alone gives the finished rows."""
    mixed, new_prefix = alone(problem, problem.out[rank])
    assert same(problem.mixed[rank], mixed), "mixed"
    assert same(problem.new_prefix[rank], new_prefix), "new_prefix"


def plain_of(problem: MixProblem, **tuning: int) -> Problem:
    """The same call of the tail alone, on mailboxes of its own; run."""
    config = problem.config
    variant = kernel(config.tp, config.m, config.rows, max_m=config.max_m, **tuning)
    other = make(config_of(variant), problem.m)
    for name in ("routed", "shared", "norm", "norms", "weight", "weights"):
        setattr(other, name, getattr(problem, name))
    run(variant, other)
    return other

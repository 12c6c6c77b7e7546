"""What the router's kernels must do together: cases for `k3fuse kernels check router`.

Front and route kernel in stream order, on all ranks: once with the choice of experts, once with the
rows copied out, as the op does where the choice is hidden.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import torch

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Mutation, Output, Step, scaled
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.router import front_problem, route_problem
from k3fuse.kernels.router.front_builder import config_of as front_config
from k3fuse.kernels.router.launch import front_variant
from k3fuse.kernels.router.layout import EXPERTS, LATENT
from k3fuse.kernels.router.policy import TABLE
from k3fuse.kernels.router.route_builder import config_of as route_config
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.router.route_launch import variant as route_variant

TOP_K = 16
# For random schedules and the race checker: a tile or two of each part, two blocks of K a CTA.
FEW_EXPERTS, FEW_LATENT, FEW_K, SMALL_M = 64, 128, 1024, 2


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Kimi K3's router with and without the choice, with the latent row."""
    row = TABLE.lookup(target.name, m)
    if row is None:
        return ()
    found = []
    for name, top_k in (("route", TOP_K), ("gather", 0)):
        whole = kernels(row, target, m, EXPERTS, LATENT, HIDDEN, top_k)
        few = kernels(row, target, m, FEW_EXPERTS, FEW_LATENT, FEW_K, min(top_k, 4))
        steps = (
            partial(step, *whole, m),
            partial(step, *few, m),
            partial(step, *few, min(m, SMALL_M)),
        )
        found.append(
            Case("router", f"{name}_{target.name.partition(':')[2]}_m{m}", *steps, waits=True,
                 garbage=garbage(logits=not top_k))
        )  # fmt: skip
    return tuple(found)


def kernels(
    row: Row, target: CheckTarget, m: int, experts: int, latent: int, k: int, top_k: int
) -> tuple[Variant, Variant]:
    """The kernels of one call, in stream order."""
    form = Form(experts, latent)
    if top_k:
        form = Form(experts, latent, top_k, renormalize=True, bias=True)
    return (
        front_variant(row, target.name, k, experts, latent, multicast=True),
        route_variant(target.name, m, form, logits=False, latent=False),
    )


def step(front: Variant, route: Variant, m: int, seed: int) -> Step:
    """x of m tokens, the same on all ranks; what the reference says, on every rank."""
    problem = front_problem.make(front_config(front), m, seed, arch=front.arch)
    logits, latent = problem.expected()
    config = route_config(route)
    made = torch.Generator().manual_seed(seed)
    bias = 0.05 * torch.randn(config.experts, generator=made) if config.top_k else None
    behind = route_problem.Problem(
        config, logits, latent, bias, ranks=config.tp, boxes=problem.boxes
    )
    outputs = []
    for name, expected in behind.expected().items():
        k = problem.config.k if name in ("logits_out", "latent") else 1
        band = tolerance(expected.dtype, k)
        for rank, results in enumerate(behind.results):
            outputs.append(Output(name, rank, results[name], expected, band))
    return Step(
        (problem.launch(front), behind.launch(route)),
        tuple(outputs),
        {"mailboxes armed": behind.disarmed, "ranks equal": behind.unequal},
    )


def through_bf16(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """FP32 that was rounded to BF16 on its way; what is BF16 anyway is off by a hundredth."""
    if result.dtype == torch.float32:
        return result.bfloat16().float()
    return scaled(result, other)


def garbage(logits: bool) -> MappingProxyType[str, Mutation]:
    """What the kernels must be refused for. logits: whether they come out."""
    more = {"through BF16": through_bf16} if logits else {}
    return MappingProxyType({**GARBAGE, **more})

"""What the router's kernels must do together: cases for `k3fuse kernels check router`.

Front and route kernel in stream order, on all ranks: with the choice of experts, with the rows
copied out, as the op does where the choice is hidden, and with what it makes for the experts: the
latent row in MXFP8 and the plan, or with the shared expert's hidden row and without the plan.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Mutation, Output, Step, scaled
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.router import front_problem, route_bits, route_problem
from k3fuse.kernels.router.front_builder import config_of as front_config
from k3fuse.kernels.router.launch import front_variant
from k3fuse.kernels.router.layout import EXPERTS, LATENT
from k3fuse.kernels.router.policy import TABLE
from k3fuse.kernels.router.route_builder import config_of as route_config
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.router.route_launch import variant as route_variant

TOP_K = 16
MXFP8 = "latent_q", "latent_scale"
# For random schedules and the race checker: a tile or two of each part, two blocks of K a CTA.
FEW_EXPERTS, FEW_LATENT, FEW_SHARED, FEW_K, SMALL_M = 64, 128, 32, 1024, 2
SHARED = 6144  # columns of Kimi K3's shared hidden row, over all ranks
# Name -> the form, with the columns of the shared hidden row over all ranks.
CHOICE = Form(EXPERTS, LATENT, TOP_K, renormalize=True, bias=True)
FORMS = {
    "route": (CHOICE, 0),
    "gather": (Form(EXPERTS, LATENT), 0),
    "mxfp8": (replace(CHOICE, quantize=True, plan=True), 0),
    "shared": (replace(CHOICE, quantize=True), SHARED),
}


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Kimi K3's router with and without the choice, with the latent row."""
    row = TABLE.lookup(target.name, m)
    if row is None:
        return ()
    found = []
    for name, (form, shared) in FORMS.items():
        whole = kernels(row, target, m, form, HIDDEN, shared // target.tp)
        less = replace(form, experts=FEW_EXPERTS, latent=FEW_LATENT, top_k=min(form.top_k, 4))
        few = kernels(row, target, m, less, FEW_K, FEW_SHARED if shared else 0)
        steps = (
            partial(step, *whole, m),
            partial(step, *few, m),
            partial(step, *few, min(m, SMALL_M)),
        )
        found.append(
            Case("router", f"{name}_{target.name.partition(':')[2]}_m{m}", *steps, waits=True,
                 garbage=garbage(logits=not form.top_k))
        )  # fmt: skip
    return tuple(found)


def kernels(
    row: Row, target: CheckTarget, m: int, form: Form, k: int, shared: int
) -> tuple[Variant, Variant]:
    """The kernels of one call, in stream order. shared: columns of a rank's hidden row."""
    sizes = form.experts, form.latent
    return (
        front_variant(row, target.name, k, *sizes, multicast=True, shared=shared),
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
        if name in (*MXFP8, "plan"):
            continue  # of the latent row and the ids that the kernel has made, see `unequal`
        k = problem.config.k if name in ("logits_out", "latent") else 1
        band = tolerance(expected.dtype, k)
        for rank, results in enumerate(behind.results):
            outputs.append(Output(name, rank, results[name], expected, band))
    for rank, hidden in enumerate(problem.hidden):
        band = tolerance(hidden.dtype, problem.config.k, 2)
        outputs.append(Output("hidden", rank, hidden, problem.expected_hidden(rank), band))
    return Step(
        (problem.launch(front), behind.launch(route)),
        tuple(outputs),
        {
            "mailboxes armed": behind.disarmed,
            "ranks equal": behind.unequal,
            "MXFP8 of the latent row, plan of the ids": partial(unequal, behind),
        },
    )


def unequal(problem: route_problem.Problem) -> str:
    """One line where what a rank has made of its latent row and ids differs in a bit, else ""."""
    for rank, results in enumerate(problem.results):
        wanted = {}
        if problem.config.quantize:
            wanted = dict(zip(MXFP8, route_bits.quantized(results["latent"]), strict=True))
        if problem.config.plan:
            wanted["plan"] = route_bits.expert_plan(results["ids"])
        for name, bits in wanted.items():
            if not route_problem.same(results[name][: len(bits)], bits):
                return f"{name} of rank {rank} is not of its rows"
    return ""


def through_bf16(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """FP32 that was rounded to BF16 on its way; what is BF16 anyway is off by a hundredth."""
    if result.dtype == torch.float32:
        return result.bfloat16().float()
    return scaled(result, other)


def garbage(logits: bool) -> MappingProxyType[str, Mutation]:
    """What the kernels must be refused for. logits: whether they come out."""
    more = {"through BF16": through_bf16} if logits else {}
    return MappingProxyType({**GARBAGE, **more})

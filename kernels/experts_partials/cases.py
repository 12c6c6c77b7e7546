"""What the kernels of the partials must do together: cases for `k3fuse kernels check`.

The route kernel on plain logits, then the experts on what it chose and rounded, with weights as
vLLM keeps them for its TRTLLM kernels. Shared gate and up are the experts' own case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common.tolerances import tolerance
from k3fuse.kernels.experts.block_config import BlockConfig
from k3fuse.kernels.experts.builder import config_of, k3
from k3fuse.kernels.experts.cases import (
    BF16,
    EXPERTS,
    SMALL_EXPERTS,
    SMALL_M,
    SMALL_SHUFFLED,
    exact_linear,
    kernel,
    most,
    problem,
)
from k3fuse.kernels.experts.config import Config
from k3fuse.kernels.experts.policy import BLOCK, engine_of
from k3fuse.kernels.router import route_problem
from k3fuse.kernels.router.route_launch import Form
from k3fuse.kernels.router.route_launch import variant as route_variant
from k3fuse.kernels.simulator import TensorMap


def step(route: Variant, experts: Variant, m: int, seed: int) -> Step:
    """One layer on one rank: every rank chooses alike and has its share of each expert."""
    chosen = route_problem.make(route, m, seed)
    wanted, made = chosen.expected(), chosen.results[0]
    plain = problem(experts, m, seed, experts=chosen.config.experts)
    if chosen.latent is not None:
        plain = replace(plain, x=chosen.latent)
    right = replace(plain, ids=wanted["ids"], weights=wanted["weights"])
    behind = replace(plain, ids=made["ids"], weights=made["weights"])
    band = tolerance(BF16, plain.config.latent, 2)
    outputs = [
        *(Output(name, 0, made[name], value, tolerance(value.dtype, 1))
          for name, value in wanted.items()),
        Output("routed", 0, behind.routed, right.expected(), band),
    ]  # fmt: skip
    if behind.shared is not None:
        x, down, out = behind.shared
        band = tolerance(BF16, plain.config.shared)
        outputs.append(Output("shared_out", 0, out, exact_linear(x, down), band))
    values = {**behind.values(), **rows_of(behind.config, made)}
    launches = chosen.launch(route), Launch(experts, [values], right.needed())
    return Step(launches, tuple(outputs), {"counts are cleared": behind.idle})


def rows_of(config: Config, made: Mapping[str, Tensor]) -> dict[str, Value]:
    """The experts' parameters that hold the rows which the route kernel has rounded."""
    values, scales = made["latent_q"], made["latent_scale"]
    if isinstance(config, BlockConfig):
        tiles = config.tiles("x8_tiles", values.shape[0])
        return {"x8_tiles": TensorMap.of(values, tiles), "x8_scale": scales}
    return {"x": values, "x_scale": scales}


def kernels(
    target: CheckTarget, shape: dict[str, int], experts: int, m: int, **config: int
) -> tuple[Variant, Variant]:
    """The kernels of one call, in stream order: shared gate and up between them are left out."""
    block = int(engine_of(target.arch) == BLOCK)
    second = kernel(target.arch, shape, shuffled=1, mxfp8=1, block=block, **config)
    made = config_of(second)
    form = Form(experts, made.latent, made.top_k, renormalize=True, bias=True, quantize=True)
    return route_variant(target.name, m, form, logits=True, latent=True), second


def cases(target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Kimi K3's experts behind plain logits, in vLLM's order of weights."""
    few = min(m, SMALL_M)
    small = {**SMALL_SHUFFLED, "m": most(few)}
    full = kernels(target, k3(target.tp, most(m)), EXPERTS, m)
    less = partial(step, *kernels(target, small, SMALL_EXPERTS, few, clusters=1), few)
    name = f"{target.name.partition(':')[2]}_m{m}"
    return (Case("experts_partials", name, partial(step, *full, m), less, less),)

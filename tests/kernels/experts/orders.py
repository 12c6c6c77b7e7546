"""Few small CTAs behind a real predecessor, so that each line that orders something is at work.

Two clusters take the experts in turn; each stage of the ring is used several times. Some experts
have several units where there are many tokens. A few ids name no expert; the cluster that clears
their rows is done with them before the other one has the tokens' last expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from expert_runs import BF16, SMALL, judge
from torch import Tensor

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.check.run import Value
from k3fuse.kernels.common.geometry import HIDDEN
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.experts import gate_up
from k3fuse.kernels.experts.cases import SITU, Problem, exact_linear, kernel, problem
from k3fuse.kernels.simulator import Fresh, SimulationError, UnsupportedPtxError
from stored import store

K, SHARED = 1024, 192
SEEDS = (1, 2)
EXPERTS = 7


def first(m: int) -> Variant:
    """Gate and up of the small kernel's shared expert, for up to m tokens."""
    return gate_up.BUILDER.variant("sm_103a", {"m": m, "k": K, "width": SHARED}, {})


def second(m: int, **config: int) -> Variant:
    """The experts in two clusters, two tiles of FC1 a CTA, for up to m tokens."""
    shape = {**SMALL, "m": m, "inter": 128, "hidden": 896, "shared": SHARED}
    return kernel("sm_103a", shape, clusters=2, **config)


def ids_of(m: int, many: bool) -> Tensor:
    """Experts [m, 4] of 17 tokens or of 3: seven of them, and a few ids that name none.

    Rows of those are stored by eight lanes of a warp and counted by fewer.
    """
    token = torch.arange(m)
    if not many:
        return torch.tensor([[0, 2, 6, -1], [1, 3, 5, 4], [6, 0, 3, 2]])
    crowd = torch.zeros_like(token)
    columns = [crowd, 1 + token % 3, 4 + token % 2, torch.where(token % 8 == 0, -1, 6)]
    return torch.stack(columns, 1)


class Chain:
    """Gate and up, then the experts, on m tokens; before them, for the former, AttnRes makes x."""

    def __init__(self, m: int, tokens: int, **config: int) -> None:
        self.m = tokens
        self.many = tokens > 8
        self.gate_up, self.experts = store().get(first(m)), store().get(second(m, **config))

    def problem(self) -> Problem:
        """Operands of the experts."""
        made = problem(self.experts.variant, self.m, seed=1, experts=EXPERTS)
        ids = ids_of(self.m, self.many)
        return replace(made, ids=ids if made.config.wide_ids else ids.int())

    def found(self, mutated: Built, seeds: Sequence[int | None] = (None, *SEEDS)) -> str:
        """What a fair run (None) with the race checker, or a random one, has against the kernel.

        "" for nothing.
        """
        behind = mutated.variant.op == "experts"
        for seed in seeds:
            wrong = self.end(mutated, seed) if behind else self.start(mutated, seed)
            if wrong:
                return wrong
        return ""

    def start(self, made: Built, seed: int | None) -> str:
        """AttnRes, then gate and up."""
        before = step(ATTN_RES.variant("sm_103a", {"m": self.m, "blocks": 0}, {}), 1)
        given = dict(before.launches[0].ranks[0])
        x = given["out"]
        assert isinstance(x, Fresh)
        wanted = before.outputs[0].expected
        values, weights = self.halves(x, HIDDEN)
        launches = [Launch(before.launches[0].kernel, [given]), Launch(made, [values])]
        return run(launches, seed) or self.hidden(values, weights, wanted[:, :K])

    def end(self, made: Built, seed: int | None) -> str:
        """Gate and up, then the experts."""
        x = torch.randn(self.m, K, generator=torch.Generator().manual_seed(7)).to(BF16)
        values, weights = self.halves(x, K)
        problem = self.problem()
        hidden = values["hidden"]
        assert problem.shared is not None
        assert isinstance(hidden, Fresh)
        taken = {**problem.values(), "shared_x": hidden}
        launches = [Launch(self.gate_up, [values]), Launch(made, [taken])]
        if wrong := run(launches, seed) or self.hidden(values, weights, x):
            return wrong
        ids, factors = problem.ids.clone(), problem.weights.clone()
        factors[ids < 0], ids[ids < 0] = 0, 0
        if not judge(problem, replace(problem, ids=ids, weights=factors).expected()).ok:
            return "wrong routed"
        _, down, out = problem.shared
        band = tolerance(BF16, problem.config.shared)
        if not compare(out, exact_linear(hidden.tensor, down), band).ok:
            return "wrong shared"
        return problem.idle()

    def halves(self, x: Value, pitch: int) -> tuple[dict[str, Value], list[Tensor]]:
        """Parameters of gate and up, and the two weights."""
        generator = torch.Generator().manual_seed(5)
        weights = [(torch.randn(SHARED, K, generator=generator) * K**-0.5).to(BF16) for _ in "gu"]
        values: dict[str, Value] = {
            "x": x, "gate": weights[0], "up": weights[1],
            "hidden": Fresh(torch.empty(self.m, SHARED, dtype=BF16)), "m": self.m,
            "x_pitch": pitch, "beta": float_bits(SITU.beta),
            "linear_beta": float_bits(SITU.linear_beta),
        }  # fmt: skip
        return values, weights

    def hidden(self, values: dict[str, Value], weights: list[Tensor], x: Tensor) -> str:
        """Whether gate and up are right."""
        got = values["hidden"]
        assert isinstance(got, Fresh)
        gate, up = (exact_linear(x, weight).float() for weight in weights)
        wanted = SITU(gate, up).to(BF16)
        return "" if compare(got.tensor, wanted, tolerance(BF16, K, 2)).ok else "wrong hidden"


def run(launches: Sequence[Launch], seed: int | None) -> str:
    """Run them; what went wrong. What the simulator does not know is no finding."""
    try:
        report: Any = run_sequence(launches, races=seed is None, seed=seed, cache=store())
    except UnsupportedPtxError:
        raise
    except SimulationError as error:
        return f"{type(error).__name__}: {error}"
    return report.races[0] if report.races else ""

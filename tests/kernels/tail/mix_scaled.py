"""The first cluster of one rank behind a real predecessor, with AttnRes of its own tokens.

What the other ranks and the other clusters send is delivered; the cluster multiplies its 64 columns
of all tokens, and mixes the first token and, with seven clusters, the last one of eight. The
predecessor is AttnRes, which writes the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from mix_runs import HIDDEN, mix_problem, mixing
from tail_runs import store

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import parameter_names
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.simulator import Multicast, SimulationError
from k3fuse.kernels.tail.builder import config_of
from k3fuse.kernels.tail.cases import MIX_ROUNDINGS
from k3fuse.kernels.tail.config import CLUSTER
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.mix_problem import MixProblem
from k3fuse.kernels.tail.problem import ARMED, BF16

RANK = 0
COLUMNS = 64  # that a cluster has of a row
SEEDS = (1, 2)


class Scaled:
    """A kernel with one block for eight tokens; the mix of the first one cancels."""

    def __init__(self, tp: int, **tuning: int) -> None:
        variant = mixing(tp, 8, blocks=1, **tuning)
        self.built, self.config, self.m = store().get(variant), config_of(variant), 8
        self.tokens = list(range(0, self.m, self.config.clusters))

    def found(self, mutated: Built | None = None, seeds: Sequence[int] = SEEDS) -> str:
        """What a fair run with the race checker, or a random one, has against it; "" for nothing.

        mutated: in the place of the kernel. seeds: of the random ones.
        """
        built = mutated or self.built
        one = replace(built, plan=replace(built.plan, grid=(CLUSTER, 1, 1)))
        return next((wrong for seed in (None, *seeds) if (wrong := self._run(one, seed))), "")

    def _run(self, built: Built, seed: int | None) -> str:
        problem = mix_problem(self.built.variant, self.m)
        before = step(ATTN_RES.variant("sm_103a", {"m": 2, "blocks": 0}, {}), 1)
        given = dict(before.launches[0].ranks[0])
        sources = problem.sources
        given["new_prefix"] = sources.prefix
        exact = replace(sources, prefix=sources.prefix.clone())
        exact.prefix[:2] = before.outputs[1].expected
        # Equal scores, and a block that is minus the row but for a last bit here and there.
        odd = torch.arange(HIDDEN) % 7 == 0
        row = (problem.expected()[0].float() + exact.prefix[0].float()).to(BF16)
        sources.score_proj.zero_()
        sources.blocks[0][0] = torch.where(odd, -row * (1 + 2**-7), -row).to(BF16)
        launch = problem.alone(built.variant, RANK)
        start = self._row(problem, 0)
        for token in range(self.m):
            start = self._row(problem, token)
            problem.boxes[RANK][start : start + COLUMNS // 2] = ARMED
        values: dict[str, Any] = {
            **launch.ranks[0], **sources.named(), "multicast": Multicast((problem.boxes[RANK],))
        }  # fmt: skip
        own = Launch(built, [{name: values[name] for name in parameter_names(built.variant)}])
        try:
            launches = [Launch(before.launches[0].kernel, [given]), own]
            report = run_sequence(launches, races=seed is None, seed=seed, cache=store())
        except SimulationError as error:
            return f"{type(error).__name__}: {error}"
        if report.races:
            return report.races[0]
        problem.sources = exact
        return self._wrong(problem)

    def _row(self, problem: MixProblem, token: int) -> int:
        """Word of the mailbox where a finished row starts."""
        return problem.config.box.row_at(0, token) // 4

    def _wrong(self, problem: MixProblem) -> str:
        band = tolerance(BF16, LATENT, MIX_ROUNDINGS)
        delta = problem.expected()
        wanted = {"out": delta, **dict(zip(("mixed", "new_prefix"), problem.mix(delta)))}  # noqa: B905
        for name, rows in wanted.items():
            got = getattr(problem, name)[RANK]
            if not compare(got[self.tokens], rows[self.tokens], band).ok:
                return f"wrong {name}"
        for token in self.tokens:
            start = self._row(problem, token)
            if (problem.boxes[RANK][start : start + HIDDEN // 2] != ARMED).any():
                return f"row {token} is not armed"
        return ""

"""One cluster of one rank behind a real predecessor: all barriers of a kernel, few CTAs.

Clusters of a producer share nothing, so the first one stands for all: its 448 columns are
projected, the others are delivered, as the peers' partials are. The predecessor is AttnRes; its
outputs are x and the prefix, so that an early read of either is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exchange import ROUNDINGS, reduced
from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.geometry import CLUSTER, ROWS
from k3fuse.kernels.common.mailbox import HIDDEN
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.output_projection.builder import config_of
from k3fuse.kernels.output_projection.config import PRODUCER
from k3fuse.kernels.output_projection.problem import ARMED, BF16, Problem, disarmed, make
from k3fuse.kernels.simulator import Multicast, SimulationError
from stored import store

RANK = 0  # whose columns in a two-shot exchange are those of the first cluster
COLUMNS = CLUSTER * ROWS
SEEDS = (1, 2)


def one_cluster(built: Built) -> Built:
    """The kernel with a grid of its first cluster."""
    return replace(built, plan=replace(built.plan, grid=(CLUSTER, 1, 1)))


class Scaled:
    """A kernel, or producer and consumer, for `tokens` tokens, behind AttnRes.

    kernels: in stream order. cancels: the mix cancels, so its squares are summed directly. ahead:
    launches between AttnRes and them.
    """

    def __init__(
        self,
        kernels: Sequence[Variant],
        tokens: int,
        *,
        cancels: bool = False,
        ahead: Sequence[Launch] = (),
    ) -> None:
        self.kernels, self.m, self.cancels = list(kernels), tokens, cancels
        self.ahead = list(ahead)
        self.config = config_of(kernels[-1])
        self.built = [store().get(variant) for variant in kernels]

    def found(self, mutated: Built | None = None) -> str:
        """What a fair run with the race checker, or a random one, has against it; "" for nothing.

        mutated: in the place of the last kernel.
        """
        chosen = [*self.built[:-1], mutated or self.built[-1]]
        for seed in (None, *SEEDS):
            if wrong := self._run([one_cluster(built) for built in chosen], seed):
                return wrong
        return ""

    def _run(self, chosen: Sequence[Built], seed: int | None) -> str:
        config, m = self.config, self.m
        problem = make(config, m, project=False)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(m, HIDDEN, generator=generator).to(BF16)
        weight = (torch.randn(COLUMNS, config.k, generator=generator) * config.k**-0.5).to(BF16)
        # The predecessor writes the first rows of x, and the prefix.
        before = step(ATTN_RES.variant("sm_103a", {"m": min(m, 2), "blocks": 0}, {}), 1)
        given = dict(before.launches[0].ranks[0])
        given |= {"out": x, "new_prefix": problem.prefix}
        rows, prefix = (output.expected for output in before.outputs)
        partials = problem.random_partials(0)
        whole = torch.cat([rows, x[len(rows) :]])[:, : config.k]
        partials[RANK][:, :COLUMNS] = (whole.float() @ weight.float().t()).to(BF16)
        self._deliver(problem, partials)
        exact = make(config, m, project=False)
        exact.prefix[: len(prefix)] = prefix
        if self.cancels:
            # Equal scores, and a block that is minus the row but for a last bit here and there.
            odd = torch.arange(HIDDEN) % 7 == 0
            row = -exact.expected(partials)[1]
            for either in (problem, exact):
                either.score_proj.zero_()
                either.blocks[0][:] = torch.where(odd, row * (1 + 2**-7), row).to(BF16)
        box = problem.boxes[RANK]
        values: dict[str, Any] = {
            **problem.values(RANK),
            **{f"block{i}": block for i, block in enumerate(problem.blocks)},
            **{f"mailbox{i}": there for i, there in enumerate(problem.boxes)},
            "mailbox": box, "multicast": Multicast((box,)), "x": x, "x_pitch": HIDDEN,
            "weight": weight, "prefix": problem.prefix, "score_proj": problem.score_proj,
        }  # fmt: skip
        launches = [Launch(before.launches[0].kernel, [given]), *self.ahead]
        for built in chosen:
            names = parameter_names(built.variant)
            launches.append(Launch(built, [{name: values[name] for name in names}]))
        try:
            report = run_sequence(launches, races=seed is None, seed=seed, cache=store())
        except SimulationError as error:
            return f"{type(error).__name__}: {error}"
        if report.races:
            return report.races[0]
        band = tolerance(BF16, config.k, ROUNDINGS)
        if config.stage == PRODUCER:
            got = self._published(problem)
            wanted = partials[RANK][:, : got.shape[1]]
            return "" if compare(got, wanted, band).ok else "wrong partial"
        for name, got, wanted in zip(
            ("out", "new_prefix"), (problem.out, problem.new_prefix), exact.expected(partials),
            strict=True,
        ):  # fmt: skip
            if not compare(got[RANK], wanted, band).ok:
                return f"wrong {name}"
        return disarmed(config.box, [box])

    def _deliver(self, problem: Problem, partials: list[Tensor]) -> None:
        """What the other ranks, and the other clusters of this one, would have published."""
        problem.deliver(dict(enumerate(partials)), count=False)
        self._published(problem).view(torch.int32).fill_(ARMED)
        if self.config.two_shot:
            layout, tp = self.config.box, self.config.tp
            words = reduced(partials).view(torch.int32)
            words[:, : HIDDEN // tp // 2] = ARMED
            start = layout.gather // 4
            problem.boxes[RANK][start : start + words.numel()] = words.flatten()

    def _published(self, problem: Problem) -> Tensor:
        """Where the cluster's partial rows go in this rank's mailbox, those columns it owns."""
        layout, m = self.config.box, self.m
        width = HIDDEN // self.config.tp if self.config.two_shot else HIDDEN
        # Rank 0 has the first slot, in either region.
        start = (layout.receive if self.config.two_shot else layout.slot(0, RANK)) // 4
        rows = problem.boxes[RANK][start : start + m * width // 2].view(BF16).view(m, width)
        return rows[:, :COLUMNS]

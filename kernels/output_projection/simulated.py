"""What rank 0's one-shot consumer gives in the simulator, to compare a device with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from k3fuse.kernels.build.variant import parameter_names
from k3fuse.kernels.check.run import Launch, run_sequence
from k3fuse.kernels.output_projection.builder import BUILDER, config_of
from k3fuse.kernels.output_projection.config import CONSUMER
from k3fuse.kernels.output_projection.problem import Problem, mailboxes


def consumed(arch: str, tp: int, partials: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Rows `out` [m, H] from all ranks' partials [rank, m, H]; delta form.

    inputs: prefix [>= m, H], blocks [blocks, >= m, H], score_norm, score_proj, out_norm [H].
    """
    m = partials.shape[1]
    shape, config = {"tp": tp, "m": m}, {"stage": CONSUMER, "multicast": 0, "max_m": m}
    variant = BUILDER.variant(arch, shape, {**config, "blocks": len(inputs["blocks"])})
    made = config_of(variant)
    problem = Problem(
        made, m, [], [], inputs["prefix"][:m], [block[:m] for block in inputs["blocks"]],
        inputs["score_norm"], inputs["score_proj"], inputs["out_norm"], mailboxes(made.box, tp),
        arch=arch,
    )  # fmt: skip
    problem.deliver(dict(enumerate(partials)))
    values = problem.values(0)
    run_sequence([Launch(variant, [{name: values[name] for name in parameter_names(variant)}])])
    return problem.out[0]

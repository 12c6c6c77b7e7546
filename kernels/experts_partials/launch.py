"""From the op's tensors to three launches: route, shared gate and up, the experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3fuse.kernels.common.operands import ALIGNMENT
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.experts.launch import Operands, partials, partials_misfit
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.experts_partials.reference import Choice
from k3fuse.kernels.router import route_launch
from k3fuse.kernels.router.route_launch import Form, Rows


@dataclass(frozen=True)
class Given:
    """One call. experts: its operands with stand-ins for ids and weights, which are yet to come."""

    logits: Tensor
    bias: Tensor | None
    experts: Operands
    choice: Choice
    activation: Activation

    @property
    def form(self) -> Form:
        """What the route kernel does: no latent row passes through it."""
        choice = self.choice
        return Form(
            self.logits.shape[1], 0, choice.top_k, choice.scoring, choice.renormalize,
            choice.weights_dtype, self.bias is not None,
        )  # fmt: skip


def stand_ins(m: int, choice: Choice) -> tuple[Tensor, Tensor]:
    """Weights and ids of a call by shape and dtype alone."""
    shape = m, choice.top_k
    return (
        torch.empty(shape, dtype=choice.weights_dtype, device="meta"),
        torch.empty(shape, dtype=torch.int64, device="meta"),
    )


def misfit(row: Row, target: str, given: Given) -> str:
    """Why the kernels cannot serve this call, "" where they can. Rows may have any stride."""
    if given.logits.dtype != torch.float32:
        return f"logits is {given.logits.dtype}, the kernel takes torch.float32"
    against = route_launch.misfit(target, given.logits.shape[0], given.form, logits=True)
    return against or partials_misfit(row, target, given.experts, given.activation)


def launch(
    row: Row, target: str, given: Given, floor: bool, *, runtime: Runtime = RUNTIME
) -> list[Tensor]:
    """Run a policy row's kernels on a call without a `misfit`; returns [shared, routed], BF16.

    Rows that cannot be read in place are copied; weights never are. floor: the hidden row's MXFP8
    scale follows the floor rule. Raises LaunchError.
    """
    choice, logits = given.choice, given.logits
    if not logits.is_contiguous() or logits.data_ptr() % ALIGNMENT:
        logits = logits.clone(memory_format=torch.contiguous_format)
    weights, ids = route_launch.launch(
        target, logits.shape[0], given.form, Rows(logits=logits), logits, bias=given.bias,
        scale=choice.scale, eps=choice.renorm_eps, runtime=runtime,
    )  # fmt: skip
    operands = replace(given.experts, topk_weights=weights, topk_ids=ids)
    routed, shared = partials(row, target, operands, given.activation, floor, runtime=runtime)
    return [shared, routed]

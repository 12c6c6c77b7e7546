"""From the op's tensors to three launches: route, shared gate and up, the experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3fuse.kernels.common.microscaling import BLOCK
from k3fuse.kernels.common.operands import dense
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.runtime import RUNTIME, Runtime
from k3fuse.kernels.experts.launch import Operands, partials, partials_misfit
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.experts_partials.reference import Choice
from k3fuse.kernels.router import route_launch
from k3fuse.kernels.router.route_launch import Form, Rows


@dataclass(frozen=True)
class Given:
    """One call. experts: its operands, with stand-ins for what the route kernel is yet to make."""

    logits: Tensor
    bias: Tensor | None
    experts: Operands
    choice: Choice
    activation: Activation

    @property
    def form(self) -> Form:
        """What the route kernel does: it chooses experts, and rounds the row to MXFP8 for them."""
        choice = self.choice
        return Form(
            self.logits.shape[1], self.experts.hidden.shape[1], choice.top_k, choice.scoring,
            choice.renormalize, choice.weights_dtype, self.bias is not None, quantize=True,
        )  # fmt: skip


def stand_ins(m: int, latent: int, choice: Choice) -> dict[str, Tensor]:
    """What the route kernel makes of a call, by shape and dtype alone."""
    shapes = {
        "topk_weights": (choice.top_k, choice.weights_dtype),
        "topk_ids": (choice.top_k, torch.int64),
        "latent_q": (latent, torch.uint8),
        "latent_scale": (latent // BLOCK, torch.uint8),
    }
    return {
        name: torch.empty(m, columns, dtype=dtype, device="meta")
        for name, (columns, dtype) in shapes.items()
    }


def misfit(row: Row, target: str, given: Given) -> str:
    """Why the kernels cannot serve this call, "" where they can. Rows may have any stride."""
    if given.logits.dtype != torch.float32:
        return f"logits is {given.logits.dtype}, the kernel takes torch.float32"
    m = given.logits.shape[0]
    against = route_launch.misfit(target, m, given.form, logits=True, latent=True)
    return against or partials_misfit(row, target, given.experts, given.activation)


def launch(
    row: Row, target: str, given: Given, floor: bool, *, runtime: Runtime = RUNTIME
) -> list[Tensor]:
    """Run a policy row's kernels on a call without a `misfit`; returns [shared, routed], BF16.

    Rows that cannot be read in place are copied; weights never are. floor: the hidden row's MXFP8
    scale follows the floor rule. Raises LaunchError.
    """
    choice, rows = given.choice, dense(given.experts.hidden)
    weights, ids, rows, values, scales = route_launch.launch(
        target, rows.shape[0], given.form, Rows(logits=dense(given.logits), latent=rows), rows,
        bias=given.bias, scale=choice.scale, eps=choice.renorm_eps, runtime=runtime,
    )  # fmt: skip
    operands = replace(
        given.experts, hidden=rows, topk_weights=weights, topk_ids=ids, latent_q=values,
        latent_scale=scales,
    )  # fmt: skip
    routed, shared = partials(row, target, operands, given.activation, floor, runtime=runtime)
    return [shared, routed]

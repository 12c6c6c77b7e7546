"""The operator that stands for vLLM's `moe_forward_shared`: our kernels, or vLLM's own call.

It takes what vLLM's operator takes, the layer by name, so that layers of one form keep sharing a
graph. When it runs it reads the layer in vLLM's registry. A layer that is not what the graph was
rewritten for, a token count outside of the policy and tensors that the kernels do not take run
vLLM's operator with the same arguments.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3fuse.kernels.common.policy import REFERENCE
from k3fuse.kernels.experts_partials.launch import misfit
from k3fuse.kernels.experts_partials.op import experts_partials, given
from k3fuse.kernels.experts_partials.policy import TABLE
from k3fuse.rewriter.reasons import Refusal
from k3fuse_vllm.cores import NAMESPACE
from k3fuse_vllm.expert_layout import TRTLLM
from k3fuse_vllm.experts import ExpertLayer, lookup

log = logging.getLogger("k3fuse")
NAME = "experts"
# What vLLM adds to the sum of the chosen scores.
RENORM_EPS = 1e-20


@lru_cache(maxsize=1)
def experts_op() -> torch._ops.OpOverload[..., Any]:
    """Return the operator; registered on first use, since the type of its layer is vLLM's.

    (hidden [M, L], logits [M, E], shared_x [M, H] or None, input_ids, layer, hidden_dim_unpadded,
    facts, target) -> (shared [M, H], routed [M, L]), as vLLM's operator gives them: this rank's
    partials, not reduced. facts: `ExpertLayer.facts` of the layer that the guards took. target:
    its name.
    """
    from vllm.utils.torch_utils import LayerName

    kinds: dict[str, Any] = {
        "hidden": Tensor, "logits": Tensor, "shared_x": Tensor | None, "input_ids": Tensor | None,
        "layer": LayerName, "hidden_dim_unpadded": int, "facts": str, "target": str,
        "return": tuple[Tensor, Tensor],
    }  # fmt: skip

    def experts(
        hidden: Any, logits: Any, shared_x: Any, input_ids: Any, layer: Any,
        hidden_dim_unpadded: Any, facts: Any, target: Any,
    ) -> Any:  # fmt: skip
        made = ours(hidden, logits, shared_x, input_ids, layer, facts, target)
        if made is not None:
            return made
        stock: Any = torch.ops.vllm.moe_forward_shared
        return stock(hidden, logits, shared_x, input_ids, layer, hidden_dim_unpadded)

    experts.__annotations__ = kinds
    op = torch.library.custom_op(
        f"{NAMESPACE}::{NAME}", experts, mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
    )
    op.register_fake(_fake)
    overload: torch._ops.OpOverload[..., Any] = torch.ops.k3fuse_vllm.experts.default
    return overload


def _fake(
    hidden: Tensor, logits: Tensor, shared_x: Tensor | None, input_ids: Tensor | None, layer: Any,
    hidden_dim_unpadded: int, facts: str, target: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    columns = hidden_dim_unpadded if hidden_dim_unpadded > 0 else hidden.shape[-1]
    like = hidden if shared_x is None else shared_x
    return like.new_empty(like.shape), hidden.new_empty((*hidden.shape[:-1], columns))


def ours(
    hidden: Tensor,
    logits: Tensor,
    shared_x: Tensor | None,
    input_ids: Tensor | None,
    layer: Any,
    facts: str,
    target: str,
) -> tuple[Tensor, Tensor] | None:
    """Return (shared, routed) from our kernels, or None where vLLM's operator has to run."""
    row = TABLE.lookup(target, hidden.shape[0])
    if row is None or input_ids is not None:
        return None
    try:
        found = lookup(layer)
    except Refusal as refusal:
        _say_once(str(refusal.reason))
        return None
    if found.facts() != facts:
        _say_once(f"{found.name} is not the layer that its graph was made for")
        return None
    arguments = call_arguments(found, hidden, logits, hidden if shared_x is None else shared_x)
    if row.kernel != REFERENCE:
        if not hidden.is_cuda:
            return None
        if against := misfit(row, target, given(*arguments)):
            _say_once(f"{found.name}: {against}")
            return None
    shared, routed = experts_partials(*arguments, target=target, composition="")
    return shared, routed


def call_arguments(
    layer: ExpertLayer, hidden: Tensor, logits: Tensor, shared_x: Tensor
) -> tuple[Any, ...]:
    """Positional arguments of k3fuse::experts_partials for a layer that the guards took.

    Routing weights are BF16 where vLLM's TRTLLM kernels would have made them, else FP32.
    """
    routing, shared = layer.routing, layer.shared
    shuffled = layer.layout.name == TRTLLM
    weights = [_bytes(tensor) for tensor in layer.weights.values()]
    return (
        hidden, logits, routing.bias, shared_x, *weights,
        list(shared.gate_up) if shared is not None else [],
        shared.down if shared is not None else None,
        routing.top_k, routing.scoring, routing.renormalise, routing.scale, RENORM_EPS,
        torch.bfloat16 if shuffled else torch.float32,
        layer.activation, layer.beta, layer.linear_beta, layer.layout.name, layer.width_used, "",
    )  # fmt: skip


def _bytes(tensor: Tensor | None) -> Tensor | None:
    """The same memory as bytes: vLLM types shuffled scales as FP8."""
    if tensor is None or tensor.dtype == torch.uint8:
        return tensor
    return tensor.detach().view(torch.uint8)


@lru_cache(maxsize=256)
def _say_once(line: str) -> None:
    log.warning("k3fuse: vLLM's experts run: %s", line)

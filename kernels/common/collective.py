"""All-reduce, twice: the group's own, which the references use, and the one the kernels keep to.

A reference stands for the graph it replaces, so it reduces as that graph does, with whatever order
and rounding the group's backend has. The kernels promise more: partials added in rank order in
FP32 and rounded once, the same bits on every rank and for every batch; `ordered_all_reduce` is
their oracle. Ring and tree all-reduces promise neither.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(partial: Tensor, group: str) -> Tensor:
    """Sum of `partial` by the group's own collective, in its dtype; "" is the identity.

    Every rank of the group has to call it with the same shape and dtype. Raises ValueError for a
    group that this process does not have.
    """
    if not group:
        return partial
    process_group = resolve_group(group)
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group)
    return total


def ordered_all_reduce(partial: Tensor, group: str) -> Tensor:
    """Sum of `partial` in rank order in FP32, rounded once to its dtype; "" is the identity.

    Every rank of the group has to call it with the same shape and dtype. Raises ValueError for a
    group that this process does not have.
    """
    if not group:
        return partial
    process_group = resolve_group(group)
    world = dist.get_world_size(process_group)
    if world == 1 or partial.numel() == 0:
        return partial
    mine = partial.contiguous()
    slots = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(slots, mine, group=process_group)
    return ordered_sum(slots).to(partial.dtype)


def ordered_sum(partials: list[Tensor]) -> Tensor:
    """FP32 sum of `partials`, first to last."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`: a c10d name ("0"), or vLLM's ("tp:0") where vLLM is loaded.

    Raises ValueError naming the fix if there is none.
    """
    found = _vllm_group(name)
    if found is not None:
        return found
    if dist.is_available() and dist.is_initialized():
        resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
        try:
            group: dist.ProcessGroup = resolve(name)
            return group
        except (RuntimeError, ValueError, KeyError):
            known = sorted(dist.distributed_c10d._world.pg_names.values())
            fix = f"this process has {known}; pass the group_name of one of them, or '' for TP=1"
    else:
        fix = "torch.distributed is not initialised; call init_process_group, or use '' for TP=1"
    raise ValueError(f"group={name!r} is no process group of this process: {fix}")


def _vllm_group(name: str) -> dist.ProcessGroup | None:
    # vLLM names its groups itself; it is asked only if the program has already imported it.
    state = sys.modules.get("vllm.distributed.parallel_state")
    reference = state._groups.get(name) if state is not None else None
    coordinator = reference() if reference is not None else None
    group = coordinator.device_group if coordinator is not None else None
    return group if isinstance(group, dist.ProcessGroup) else None

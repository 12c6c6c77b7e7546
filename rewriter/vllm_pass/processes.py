"""Which of the engine's processes this is."""

from __future__ import annotations

import os
import sys

import torch


def group_sizes() -> dict[str, int]:
    """Return ranks of each of vLLM's process groups in this process, by vLLM's name ("tp:0")."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    found = (reference() for reference in state._groups.values()) if state is not None else ()
    return {group.unique_name: group.world_size for group in found if group is not None}


def rank() -> int:
    """Return this worker's rank, 0 before there is a group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)

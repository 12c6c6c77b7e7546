"""The Kimi K3 decode step in plain PyTorch, the source of our own K3 graphs."""

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.models.kimi_k3 import KimiK3, greedy_decode
from k3fuse.patterns.models.parallel import init_weights
from k3fuse.patterns.models.state import (
    DecodeState,
    KdaState,
    MlaState,
    mark_dynamic_rows,
    new_state,
)

__all__ = [
    "DecodeState",
    "KdaState",
    "KimiK3",
    "KimiK3Config",
    "MlaState",
    "greedy_decode",
    "init_weights",
    "mark_dynamic_rows",
    "new_state",
]

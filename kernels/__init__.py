"""Fused ops of Kimi K3 decode: meaning, schema and policy, one folder an op."""

from __future__ import annotations

import importlib


def register_all() -> None:
    """Register every op of the torch.library namespace `k3fuse`; harmless to repeat."""
    from k3fuse.kernels.common.registry import OPS

    for name in OPS:
        importlib.import_module(f"k3fuse.kernels.{name}.op")

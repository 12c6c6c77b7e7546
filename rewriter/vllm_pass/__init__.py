"""k3fuse in vLLM: a pass, a backend and a compile of Kimi K3's layers, reached by configuration.

Top-level package `k3fuse_vllm`, since vLLM resolves a pass as an attribute of a top-level module:

    --compilation-config '{"inductor_passes":
        {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}}'

Importing the package needs no vLLM; reading `decode_pass` does.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3fuse_vllm.graph_pass import decode_pass

__all__ = ["decode_pass"]

# vLLM reads this module's __dict__, so the object has to be there, not behind __getattr__.
if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
    from k3fuse_vllm.graph_pass import decode_pass
else:

    def __getattr__(name: str) -> Any:
        if name == "decode_pass":
            raise ImportError(
                "k3fuse_vllm.decode_pass needs vLLM, which is not installed: pip install vllm"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

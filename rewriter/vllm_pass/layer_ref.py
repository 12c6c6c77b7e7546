"""A layer's name as an object that graphs take as an input, so that layers of one form share one.

vLLM's own LayerName is a value to Dynamo: a graph is fixed to the name it was traced with. A
reference is an input like a tensor. It is a subclass, so that vLLM's operators take it as theirs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def layer_ref() -> Any:
    """Return the class; made on first use, since its base is vLLM's."""
    from torch._library.opaque_object import register_opaque_type
    from vllm.utils.torch_utils import LayerName

    class LayerRef(LayerName):  # type: ignore[misc]
        """The name of one layer in vLLM's layer registry."""

    # Operator schemas spell the type by its qualified name, which may hold no "<locals>".
    LayerRef.__qualname__ = "LayerRef"
    globals()["LayerRef"] = LayerRef  # pickled into cache keys by reference
    register_opaque_type(LayerRef, typ="reference")
    return LayerRef


def name_of(layer: Any) -> str:
    """Return the name in a LayerRef, or a plain name as it is."""
    return layer if isinstance(layer, str) else str(layer.value)

"""The generator's modules are importable; its process group goes when its tests are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from build import DATA
from check import groups

# vLLM's op of the experts, with the schema that the stored graphs have: whoever defines it first in
# a process, they are then written as they are stored, and no stand-in for them is taken back.
_LIBRARY: Any = torch.library.Library("vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS = json.loads((DATA / "layer1_tp8_m4_opaque.json").read_text())["ops"]
if not hasattr(torch.ops.vllm, "moe_forward_shared"):
    _LIBRARY.define(_OPS["vllm.moe_forward_shared.default"]["schema"].removeprefix("vllm::"))
    torch.library.register_fake(
        "vllm::moe_forward_shared",
        lambda hidden, logits, shared, *_: (
            shared.new_empty(shared.shape),
            torch.empty_like(hidden),
        ),
        lib=_LIBRARY,
    )


@pytest.fixture(scope="module", autouse=True)
def _no_group_stays() -> Iterator[None]:
    """Other tests of the same process trace with groups of other sizes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.cache_clear()

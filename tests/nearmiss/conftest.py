"""The generator's modules are importable; its process group goes when its tests are done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from check import groups


@pytest.fixture(scope="module", autouse=True)
def _no_group_stays() -> Iterator[None]:
    """Other tests of the same process trace with groups of other sizes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.cache_clear()

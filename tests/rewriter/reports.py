"""Reports that several tests read: the full-size Kimi K3, kept as data, and a small fresh one."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from build import DATA
from k3fuse.kernels.common.policy import planned, table
from k3fuse.patterns import experts
from k3fuse.rewriter.inspecting import inspect_source

# 93 layers at TP8, planned: see tests/data/reports/README.md for how it is made.
FULL = DATA.parent / "reports" / "kimi_k3_tp8_m8.json.xz"
LAYER = str(DATA / "layer3_tp8_m8_opaque.json")


@lru_cache(maxsize=1)
def full_size_text() -> str:
    return lzma.decompress(FULL.read_bytes()).decode()


def full_size() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(full_size_text())
    return document


def dumped(folder: Path) -> Path:
    """A dump folder that holds the full-size report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(full_size_text())
    return folder


@contextmanager
def without_a_kernel() -> Iterator[None]:
    """As if the tail had no kernel yet, so that a captured layer has a refused site."""
    tail = table("tail", planned(1, 64, "latent_tail", 1))
    with mock.patch.object(experts, "TAIL_TABLE", tail):
        yield


@lru_cache(maxsize=4)
def _small(target: str, plan: bool) -> str:
    if plan:
        return json.dumps(inspect_source(LAYER, target=target, plan=True, record=True))
    with without_a_kernel():
        return json.dumps(inspect_source(LAYER, target=target, record=True))


def small(target: str = "gb300:tp8", *, plan: bool = True) -> dict[str, Any]:
    """One captured layer of vLLM's Kimi K3, recorded; without a plan, its tail refused."""
    document: dict[str, Any] = json.loads(_small(target, plan))
    return document

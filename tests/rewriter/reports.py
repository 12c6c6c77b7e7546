"""Reports that several tests read: the full-size Kimi K3, kept as data, and a small fresh one."""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

from build import DATA
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


@lru_cache(maxsize=4)
def _small(target: str, plan: bool) -> str:
    return json.dumps(inspect_source(LAYER, target=target, plan=plan, record=True))


def small(target: str = "gb300:tp8", *, plan: bool = True) -> dict[str, Any]:
    """One captured layer of vLLM's Kimi K3, recorded."""
    document: dict[str, Any] = json.loads(_small(target, plan))
    return document

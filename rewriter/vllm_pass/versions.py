"""Which vLLM this package knows, and one digest of everything a decision depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from k3fuse.rewriter.key import FOLDERS, source_digest

# Read and run against these; hooks, op names and compile ranges of other series are unknown.
SERIES = ("0.32", "0.33")


def vllm_version() -> str:
    """Return version of the vLLM in this process, "" where there is none."""
    try:
        from vllm import __version__
    except ImportError:
        return ""
    return str(__version__)


def unknown_version(found: str) -> str:
    """Return one line where this vLLM is not known, "" where it is."""
    if found.startswith(tuple(f"{series}." for series in SERIES)):
        return ""
    return (
        f"vLLM {found or '(unknown)'} is not known to k3fuse {own_version()}, which was tested "
        f"with {', '.join(SERIES)}; the run is stock"
    )


def own_version() -> str:
    """Return the version of the k3fuse distribution."""
    try:
        return version("k3fuse")
    except PackageNotFoundError:
        return "0"


def decision_digest(options: Mapping[str, Any], target: str) -> str:
    """Return a digest of every factor of a decision but the graph: versions, sources, options.

    options: plain values. target: its name, "" where it is to be detected.
    """
    factors = {
        "k3fuse": own_version(),
        "sources": [source_digest(folder) for folder in FOLDERS],
        "torch": torch.__version__,
        "vllm": vllm_version(),
        "options": dict(options),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("K3FUSE_")},
        "target": target,
    }
    text = json.dumps(factors, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]

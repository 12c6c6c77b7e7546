"""What a rewrite depends on: named factors and their digest, for caches and for people.

Two runs with one digest rewrite one graph alike. Where the digests differ, the factors say why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.target import Target, world_size

_VERSIONS = ("k3fuse", "torch", "sympy", "nvidia-cutlass-dsl", "vllm")
# Of the sources that decide; an edited checkout keeps its version number.
FOLDERS = ("rewriter", "patterns", "kernels")
# How a rewrite is told, not what it does.
_SILENT = frozenset({"log", "dump_dir", "target"})


def factors(
    options: Options, patterns: Iterable[Pattern], report: Report | None = None
) -> dict[str, str]:
    """Return every factor by name, values as text.

    report: adds the graph's own factors (its tokens and sites) where a rewrite has been made.
    """
    target = options.target or Target.detect()
    found = {
        "target.arch": target.arch, "target.tp": str(target.tp), "target.group": target.group,
        "python": platform.python_version(), "rank": _rank(), "world": str(world_size()),
        "gpu": _capability(),
    }  # fmt: skip
    found |= {f"version.{name}": _version(name) for name in _VERSIONS}
    found |= {f"source.{folder}": source_digest(folder) for folder in FOLDERS}
    for field in dataclasses.fields(options):
        if field.name not in _SILENT:
            found[f"option.{field.name}"] = _text(getattr(options, field.name))
    for name in sorted(n for n in os.environ if n.startswith("K3FUSE_")):
        found[f"environment.{name}"] = os.environ[name]
    for pattern in patterns:
        guards = [(g.text, g.code.value, g.scope, g.proof) for g in pattern.guards]
        found[f"guards.{pattern.name}"] = _digest(guards)
        found[f"priority.{pattern.name}"] = str(pattern.priority)
        found |= {f"{name}.{pattern.name}": text for name, text in pattern.factors().items()}
    if report is not None:
        found["graph.tokens"] = str(report.m)
        found["graph.nodes"] = str(report.nodes_before)
        found["graph.sites"] = report.site_hash()
        values = [sorted((s.name, str(v)) for s, v in site.values.items()) for site in report.sites]
        found["graph.values"] = _digest(values)
        found["graph.kernels"] = _digest(
            [
                s.kernel and (s.kernel.name, s.kernel.available, s.kernel.policy)
                for s in report.sites
            ]
        )
    return found


def decision(report: Report) -> str:
    """Digest of what all ranks have to share: the sites, what was read of them, and the code.

    The token count is left out; ranks of different data may have different ones.
    """
    values = [
        sorted((s.name, str(v)) for s, v in site.values.items() if s.name != "M")
        for site in report.sites
    ]
    sources = [source_digest(folder) for folder in FOLDERS]
    return _digest([report.site_hash(), values, _version("k3fuse"), sources])[:32]


def key(found: Mapping[str, str]) -> str:
    """Return the digest of factors, whatever their order."""
    return _digest(dict(found))[:32]


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the factors that differ, each (old, new), "" where one side has none."""
    names = sorted({*old, *new})
    return {n: (old.get(n, ""), new.get(n, "")) for n in names if old.get(n, "") != new.get(n, "")}


@cache
def source_digest(folder: str) -> str:
    """Digest of a package's Python files, by relative path and content."""
    root = _root(folder)
    files = sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
    return _digest(
        [
            (f.relative_to(root).as_posix(), hashlib.sha256(f.read_bytes()).hexdigest())
            for f in files
        ]
    )


def _root(folder: str) -> Path:
    import importlib

    file = importlib.import_module(f"k3fuse.{folder}").__file__
    if file is None:
        raise RuntimeError(f"package k3fuse.{folder} has no file; install k3fuse again")
    return Path(file).parent


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True)
    return str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _rank() -> str:
    import torch.distributed as dist

    return str(dist.get_rank()) if dist.is_available() and dist.is_initialized() else "0"


def _capability() -> str:
    import torch

    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"

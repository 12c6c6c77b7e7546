"""Reports read back from disk: filters, expectations, diffs."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

from k3fuse.rewriter.dump import site_stem
from k3fuse.rewriter.report import SCHEMA


class SavedError(ValueError):
    """A saved report or expectation that cannot be used; one line with the fix."""


class SavedReport:
    """A report as its JSON document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Sites and near misses."""
        sites: list[dict[str, Any]] = self.document["sites"]
        return sites

    @classmethod
    def load(cls, path: Path) -> SavedReport:
        """Read a dump folder's summary.json, or a report file.

        A folder with graph_001, graph_002, ... is one report of all its graphs.
        Raises SavedError for what is missing, truncated or of another schema version.
        """
        parts = sorted(path.glob("graph_*")) if not (path / "summary.json").exists() else []
        if parts:
            return cls(_together([cls.load(part).document for part in parts]))
        file = path / "summary.json" if path.is_dir() else path
        if not file.is_file():
            raise SavedError(
                f"dump {str(path)!r} has no summary.json; name a folder written by --dump"
            )
        try:
            document = json.loads(file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise SavedError(
                f"{file} is truncated or no JSON ({error}); write the dump again"
            ) from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise SavedError(
                f"{file} has schema {schema!r}, this version reads {SCHEMA!r}; write the dump again"
            )
        return cls(document)

    def filtered(self, pattern: str | None, layer: int | None) -> SavedReport:
        """Keep one pattern's or layer's sites; counts follow, a layer has no expectation."""
        if pattern is None and layer is None:
            return self
        document = copy.deepcopy(self.document)
        document["sites"] = [
            s for s in self.sites
            if (pattern is None or s["pattern"] == pattern)
            and (layer is None or s["layer"] == layer)
        ]  # fmt: skip
        counts = document["patterns"]
        for name in list(counts):
            if pattern is not None and name != pattern:
                del counts[name]
                continue
            mine = [s["outcome"] for s in document["sites"] if s["pattern"] == name]
            counts[name].update({o: mine.count(o) for o in ("found", "near", "refused")})
            if layer is not None:
                counts[name]["expected"] = None
        return SavedReport(document)

    def missing(self, expect: Path | None = None) -> dict[str, int]:
        """Sites short of the report's own expectation, or of a JSON file's.

        Raises SavedError where the file names an unknown pattern or no counts.
        """
        counts = self.document["patterns"]
        wanted = {name: c["expected"] for name, c in counts.items() if c["expected"] is not None}
        if expect is not None:
            wanted = _expectation(expect, list(counts))
        short = {name: n - counts[name]["found"] for name, n in wanted.items()}
        return {name: n for name, n in short.items() if n > 0}


def _together(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of several graphs: sites, counts, nodes and seconds added up."""
    merged = copy.deepcopy(documents[0])
    for other in documents[1:]:
        for name in ("sites", "layers"):
            merged[name] += other[name]
        merged["notes"] += [n for n in other["notes"] if n not in merged["notes"]]
        merged["graphs"].update(other["graphs"])
        merged["seconds"] = round(merged["seconds"] + other["seconds"], 4)
        for name in ("nodes", "events", "phases"):
            for key, value in other[name].items():
                merged[name][key] = round(merged[name].get(key, 0) + value, 4)
        for pattern, count in other["patterns"].items():
            mine = merged["patterns"].setdefault(pattern, dict.fromkeys(count, 0))
            for key in ("found", "near", "refused"):
                mine[key] += count[key]
            mine["expected"] = count["expected"] if mine["expected"] is None else mine["expected"]
    if len(documents) > 1:
        digests = "\n".join(d["site_hash"] for d in documents)
        merged["site_hash"] = hashlib.sha256(digests.encode()).hexdigest()[:16]
    return merged


def rank_dumps(path: Path) -> list[Path]:
    """The dumps of all ranks in a folder, rank 0 first; the path itself where it is one dump."""
    return sorted(path.glob("rank_*")) or [path]


def _expectation(path: Path, known: list[str]) -> dict[str, int]:
    try:
        wanted = json.loads(path.read_text())
    except OSError as error:
        raise SavedError(f"--expect {str(path)!r} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise SavedError(f"--expect {path} is no JSON ({error})") from None
    if not isinstance(wanted, dict) or not all(isinstance(n, int) for n in wanted.values()):
        raise SavedError(f'--expect {path} is no object of counts; write {{"router": 92}}')
    for name in wanted:
        if name not in known:
            raise SavedError(
                f"--expect {path}: pattern {name!r} does not exist; use {', '.join(known)}"
            )
    return wanted


def site_diffs(path: Path, saved: SavedReport) -> list[dict[str, Any]]:
    """Unified diff of each rewritten site of a dump folder. Raises SavedError for a bare report."""
    folder = path / "sites"
    if not folder.is_dir():
        raise SavedError(
            f"{str(path)!r} is no dump folder of one graph, so it has no graph texts; "
            "inspect with --dump, or name one of its graph_001 folders"
        )
    found = []
    for site in saved.sites:
        if site["outcome"] != "found":
            continue
        stem = site_stem(site["layer"], site["pattern"], site["anchor"])
        old, new = (
            (folder / f"{stem}.{part}.txt").read_text().splitlines() for part in ("before", "after")
        )
        lines = difflib.unified_diff(old, new, f"{stem} before", f"{stem} after", lineterm="", n=40)
        found.append(
            {"layer": site["layer"], "pattern": site["pattern"], "diff": "\n".join(lines) + "\n"}
        )
    return found

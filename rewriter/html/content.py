"""What the page shows, as plain data for its template: grid, distinct sites, layers, ranks."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from k3fuse.rewriter.console import prefetch_text, reasons
from k3fuse.rewriter.html.picture import svg
from k3fuse.rewriter.reasons import without_node

# Bytes a second of the byte floor: GB300's HBM3e, nominal (NVIDIA's data sheet: 8 TB/s a GPU).
BANDWIDTH = 8e12
LETTERS = {"found": "F", "near": "N", "refused": "R"}
BAND = 24  # layers of one block of the grid


def content(document: dict[str, Any], ranks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Everything the template reads. document: a report's; ranks: reports of the other ranks."""
    sites = _named(document["sites"])
    groups = _groups(sites, document.get("graphs", {}))
    number = {name: group["id"] for group in groups for name in group["names"]}
    return {
        "report": document,
        "counts": _counts(document),
        "reasons": reasons(document["sites"]),
        "prefetch": prefetch_text(document["sites"]),
        "grid": _grid(sites, list(document["patterns"]), number),
        "groups": groups,
        "whynot": [g for g in groups if g["outcome"] != "found"],
        "layers": [_layer(entry) for entry in document.get("layers", ())],
        "ranks": _ranks([document, *ranks]),
        "bandwidth": BANDWIDTH,
        "index": [_entry(site, number) for site in sites],
    }


def _named(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sites with a name of their own: L057-router, final-attn_res, L003-router-2."""
    used: Counter[str] = Counter()
    found = []
    for site in sites:
        layer = site["layer"]
        stem = f"{'final' if layer is None else f'L{layer:03d}'}-{site['pattern']}"
        used[stem] += 1
        name = stem if used[stem] == 1 else f"{stem}-{used[stem]}"
        found.append({**site, "name": name})
    return found


def _counts(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, count in document["patterns"].items():
        mine = [s for s in document["sites"] if s["pattern"] == name and s["outcome"] == "found"]
        kernels = Counter(s["kernel"] for s in mine)
        missing = max((count["expected"] or 0) - count["found"], 0)
        rows.append({"name": name, **count, "kernels": list(kernels), "missing": missing})
    return rows


# --- grid -----------------------------------------------------------------------------------------


def _grid(
    sites: list[dict[str, Any]], patterns: list[str], number: dict[str, str]
) -> list[dict[str, Any]]:
    """Blocks of layers: rows of layer and cells by pattern; what has no layer is last."""
    cells: dict[tuple[int | None, str], list[dict[str, Any]]] = {}
    for site in sites:
        code = f", {site['reason']}" if site["reason"] else ""
        where = "outside the layers" if site["layer"] is None else f"layer {site['layer']}"
        cells.setdefault((site["layer"], site["pattern"]), []).append(
            {
                "name": site["name"],
                "group": number[site["name"]],
                "outcome": site["outcome"],
                "letter": LETTERS[site["outcome"]],
                "title": f"{where}, {site['pattern']}: {site['outcome']}{code}",
            }
        )
    known = {layer for layer, _ in cells if layer is not None}
    layers: list[int | None] = list(range(max(known) + 1)) if known else []
    if min(known, default=0) > BAND:  # a piece of a model: no rows for what is not there
        layers = [*sorted(known)]
    if any(layer is None for layer, _ in cells):
        layers.append(None)
    # A last block of one or two rows joins the one before it.
    size = BAND if len(layers) % BAND > 2 or len(layers) <= BAND else BAND + 1
    rows = [
        {"layer": layer, "cells": [cells.get((layer, p), []) for p in patterns]} for layer in layers
    ]
    return [{"rows": rows[i : i + size]} for i in range(0, len(rows), size)]


# --- distinct sites -------------------------------------------------------------------------------


def _groups(sites: list[dict[str, Any]], graphs: dict[str, Any]) -> list[dict[str, Any]]:
    """Sites with equal content, once each, in order of first appearance."""
    found: dict[str, dict[str, Any]] = {}
    for site in sites:
        own = _own(site)
        key = json.dumps(own, sort_keys=True)
        group = found.setdefault(key, {**own, "names": [], "layers": [], "members": []})
        group["names"].append(site["name"])
        group["layers"].append(site["layer"])
        group["members"].append((site["name"], site["layer"]))
    # A picture that several groups share is drawn in the first, and named there.
    drawn: dict[tuple[str, str], str] = {}
    for position, group in enumerate(found.values(), start=1):
        group["id"] = f"g{position}"
        group["span"] = span(group["layers"])
        pieces = {part: graphs.get(key) for part, key in group["pieces"].items()}
        group["diff"] = _diff(pieces) if group["outcome"] == "found" else []
        group["nodes"] = {part: _inside(p) for part, p in pieces.items() if p}
        group["pictures"] = {}
        for part, piece in pieces.items():
            if not piece:
                continue
            label = f"{group['pattern']} {part} the rewrite, {_inside(piece)} nodes"
            same = drawn.setdefault((part, group["pieces"][part]), group["id"])
            picture = (
                Markup(svg(piece, before=part == "before", name=label))
                if same == group["id"]
                else ""
            )
            group["pictures"][part] = {"svg": picture, "same": same}
    return list(found.values())


def _own(site: dict[str, Any]) -> dict[str, Any]:
    """What a site shows, less what is its own: layer, names of nodes."""
    return {
        "pattern": site["pattern"],
        "form": site["form"],
        "outcome": site["outcome"],
        "kernel": site["kernel"],
        "policy": site.get("policy"),
        "launches": site.get("launches"),
        "prefetched_bytes": site.get("prefetched_bytes", 0),
        "built": site.get("built") or {},
        "values": site.get("values") or {},
        "guards": site.get("guards") or [],
        "notes": site.get("notes") or [],
        "frames": site.get("frames") or ([site["source"]] if site.get("source") else []),
        "lines": site.get("lines") or [],
        "pieces": site.get("pieces") or {},
        "reasons": [
            {
                **{k: r[k] for k in ("code", "expected", "actual", "hint")},
                "sentence": without_node(r["sentence"], r["nodes"]),
            }
            for r in site["reasons"]
        ],
    }


def _inside(piece: dict[str, Any]) -> int:
    return sum(1 for n in piece["nodes"] if n["op"] != "input")


def _text(piece: dict[str, Any] | None) -> list[str]:
    return [n["text"] for n in piece["nodes"] if n["op"] != "input"] if piece else []


def _diff(pieces: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of the unified diff, each with its kind: "add", "del", "hunk" or ""."""
    old, new = _text(pieces.get("before")), _text(pieces.get("after"))
    lines = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=40))[2:]
    kinds = {"+": "add", "-": "del", "@": "hunk"}
    return [(kinds.get(line[:1], ""), line) for line in lines]


def span(layers: Sequence[int | None]) -> str:
    """Layers as ranges: "1-3, 5, final"."""
    numbers = sorted({n for n in layers if n is not None})
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join([*texts, *(["final"] if None in layers else [])])


def _entry(site: dict[str, Any], number: dict[str, str]) -> dict[str, Any]:
    """One site for the search and for the head of the open site."""
    return {
        "n": site["name"],
        "g": number[site["name"]],
        "l": site["layer"],
        "p": site["pattern"],
        "o": site["outcome"],
        "c": [r["code"] for r in site["reasons"]],
        "f": site["form"] or "",
        "k": site["kernel"] or "",
        "a": site["anchor"],
        "w": site.get("new_node") or "",
    }


# --- one layer, ranks -----------------------------------------------------------------------------


def _layer(entry: dict[str, Any]) -> dict[str, Any]:
    """One kind of layer with totals; widest: where the bars end, so that "after" can be read."""
    rows = []
    for row in entry["rows"]:
        before, after = row["read"] + row["written"], row["read_after"] + row["written_after"]
        rows.append({"hops_after": row["hops"], **row, "before": before, "after": after})
    names = ("operations", "launches", "hops", "hops_after", "before", "after")
    fused = [r for r in rows if r["outcome"] == "found"]
    return {
        "layer": entry["layer"],
        "count": len(entry["layers"]),
        "span": span(entry["layers"]),
        "sites": entry["sites"],
        "rows": rows,
        "total": {name: sum(r[name] for r in rows) for name in names},
        "fused": sum(r["launches"] for r in fused),
        "left": sum(r["operations"] for r in rows if r["outcome"] != "found"),
        "widest": max((r["after"] for r in rows), default=0) * 5 // 4 or 1,
        "floor": entry["floor"],
        "microseconds": entry["floor"] / BANDWIDTH * 1e6,
    }


def _ranks(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        {
            "rank": d.get("rank", 0),
            "target": d["target"],
            "found": sum(c["found"] for c in d["patterns"].values()),
            "refused": sum(c["refused"] for c in d["patterns"].values()),
            "hash": d["site_hash"],
            "same": d["site_hash"] == documents[0]["site_hash"],
        }
        for d in documents
    ]
    rows.sort(key=lambda r: int(r["rank"]))
    world = max(int(d.get("world", 1)) for d in documents)
    return {"rows": rows, "world": world, "agree": all(r["same"] for r in rows)}

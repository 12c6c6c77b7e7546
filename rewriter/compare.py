"""Two reports side by side: what was asked, what came out, site by site."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Compared of a site; what only names it (nodes, texts) is not.
FIELDS = ("outcome", "reason", "form", "kernel", "launches", "policy")


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What differs between two reports' documents.

    asked: {name: [first, second]} of source, target, M, plan, versions and options. counts: by
    pattern, {count: [first, second]}. sites: one entry a site that is other, new or gone: layer,
    pattern, number (from 1, where a layer has several of a pattern), change, and the fields that
    differ as [first, second]. same: whether counts and sites are equal; what was asked may differ.
    """
    one, two = _sites(first), _sites(second)
    sites = []
    for key in sorted({*one, *two}, key=_order):
        layer, pattern, number = key
        entry: dict[str, Any] = {"layer": layer, "pattern": pattern, "number": number}
        a, b = one.get(key), two.get(key)
        if a is None or b is None:
            present = a or b or {}
            change = "new" if a is None else "gone"
            sites.append({**entry, "change": change, "outcome": present["outcome"]})
        elif fields := _fields(a, b, first, second):
            sites.append({**entry, "change": "other", "fields": fields})
    counts = _counts(first, second)
    return {
        "schema": first["schema"],
        "same": not (sites or counts),
        "asked": _asked(first, second),
        "counts": counts,
        "nodes": [first["nodes"], second["nodes"]],
        "sites": sites,
    }


def compare_text(document: dict[str, Any], most: int = 40) -> str:
    """Lines for people; equal changes of several layers share a line."""
    lines = [f"{name}: {_text(a)} -> {_text(b)}" for name, (a, b) in document["asked"].items()]
    for pattern, counts in document["counts"].items():
        parts = ", ".join(f"{k} {_text(a)} -> {_text(b)}" for k, (a, b) in counts.items())
        lines.append(f"{pattern}: {parts}")
    groups: dict[str, list[int | None]] = {}
    for site in document["sites"]:
        groups.setdefault(_change(site), []).append(site["layer"])
    changed = [f"  {change}  (layers {_span(layers)})" for change, layers in groups.items()]
    if changed:
        count = len(document["sites"])
        lines.append("1 site differs" if count == 1 else f"{count} sites differ")
    lines += changed[:most]
    lines += [f"  and {len(changed) - most} kinds of change more"] if len(changed) > most else []
    if document["same"]:
        lines.append("the same sites")
    return "\n".join(lines) + "\n"


def _change(site: dict[str, Any]) -> str:
    if site["change"] != "other":
        return f"{site['pattern']}: {site['change']} ({site['outcome']})"
    parts = [f"{k} {_text(a)} -> {_text(b)}" for k, (a, b) in site["fields"].items()]
    return f"{site['pattern']}: {', '.join(parts)}"


def _span(layers: list[int | None]) -> str:
    from k3fuse.rewriter.html.content import span

    return span(layers)


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _sites(document: dict[str, Any]) -> dict[tuple[int | None, str, int], dict[str, Any]]:
    used: Counter[tuple[int | None, str]] = Counter()
    found = {}
    for site in document["sites"]:
        place = (site["layer"], site["pattern"])
        used[place] += 1
        found[(*place, used[place])] = site
    return found


def _order(key: tuple[int | None, str, int]) -> tuple[bool, int, str, int]:
    layer, pattern, number = key
    return layer is None, layer or 0, pattern, number


def _fields(
    a: dict[str, Any], b: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> dict[str, list[Any]]:
    found = {k: [a.get(k), b.get(k)] for k in FIELDS if a.get(k) != b.get(k)}
    guards = [
        {
            g["guard"]: f"{g['actual']} {'ok' if g['passed'] else 'FAIL'}"
            for g in s.get("guards", ())
        }
        for s in (a, b)
    ]
    for guard in dict.fromkeys([*guards[0], *guards[1]]):
        values = [g.get(guard) for g in guards]
        if values[0] != values[1]:
            found[f"guard {guard}"] = values
    for part in ("before", "after"):
        keys = [s.get("pieces", {}).get(part) for s in (a, b)]
        if all(keys) and keys[0] != keys[1]:
            graphs = (first["graphs"], second["graphs"])
            sizes = [len(g[k]["nodes"]) for g, k in zip(graphs, keys, strict=True)]
            found[f"graph {part}"] = [f"{n} nodes" for n in sizes]
    return found


def _seen(guard: dict[str, Any]) -> str:
    return f"{guard['actual']} {'ok' if guard['passed'] else 'FAIL'}"


def _asked(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    names = ("source", "target", "m", "plan", "rank")
    one, two = ({n: d[n] for n in names} for d in (first, second))
    for found, document in ((one, first), (two, second)):
        found.update({f"version of {k}": v for k, v in document["versions"].items()})
        found.update({f"option {k}": v for k, v in document["options"].items()})
    return {
        n: [one.get(n), two.get(n)] for n in dict.fromkeys([*one, *two]) if one.get(n) != two.get(n)
    }


def _counts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    one, two = first["patterns"], second["patterns"]
    found = {}
    for pattern in dict.fromkeys([*one, *two]):
        a, b = one.get(pattern, {}), two.get(pattern, {})
        differing = {k: [a.get(k), b.get(k)] for k in {**a, **b} if a.get(k) != b.get(k)}
        if differing:
            found[pattern] = differing
    return found

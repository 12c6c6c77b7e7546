"""What a rewrite did: one record for the summary, JSON, text dumps and the command line."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from k3fuse.rewriter.reasons import Code, Reason, without_node
from k3fuse.rewriter.site import NearMiss, Site

SCHEMA = "k3fuse.report/2"


@dataclass
class PatternCount:
    """Sites of one pattern. expected is None where nobody said how many there should be."""

    expected: int | None = None
    found: int = 0
    near: int = 0
    refused: int = 0


@dataclass
class Report:
    """Everything one rewrite did and did not do, with reasons.

    m: tokens in the step, an int or the text of a symbol with its range. seconds: wall time of the
    rewrite (recognise, match, guard, edit, verify). nodes: before and after. graphs: pieces of the
    graph by key, for sites that were recorded; layers: computed bytes (costs.layer_costs). rank,
    world: of the process that made the report. optional: patterns that a layer can do without;
    `patterns` has them where a graph shows what they are about.
    """

    source: str
    target: str
    m: int | str | None
    tp: int
    patterns: tuple[str, ...]
    sites: list[Site] = field(default_factory=list)
    near: list[NearMiss] = field(default_factory=list)
    expected: Mapping[str, int] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    changed_options: Mapping[str, Any] = field(default_factory=dict)
    validated: str = "off"
    value_runs: dict[str, int] = field(default_factory=dict)
    factors: dict[str, str] = field(default_factory=dict)
    launches: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dump: str = ""
    plan: bool = False
    graphs: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    rank: int = 0
    world: int = 1
    optional: tuple[str, ...] = ()

    # --- counts -------------------------------------------------------------------------------

    def counts(self) -> dict[str, PatternCount]:
        """Counts by pattern name; an optional one is there where something was found of it."""
        awaited = (name for name in self.optional if name in self.expected)
        seen = [*self.patterns, *awaited, *(s.pattern for s in self.sites)]
        seen += [miss.pattern for miss in self.near]
        found = {name: PatternCount(self.expected.get(name)) for name in seen}
        for site in self.sites:
            count = found[site.pattern]
            if site.outcome == "found":
                count.found += 1
            else:
                count.refused += 1
        for miss in self.near:
            found[miss.pattern].near += 1
        return found

    def missing(self) -> dict[str, int]:
        """Expected sites that were not rewritten, by pattern, only where there are any."""
        return {
            name: count.expected - count.found
            for name, count in self.counts().items()
            if count.expected is not None and count.found < count.expected
        }

    @property
    def found(self) -> list[Site]:
        """Accepted sites."""
        return [s for s in self.sites if s.outcome == "found"]

    def site_hash(self) -> str:
        """Digest of the accepted sites; equal on every rank that decided alike."""
        lines = [
            f"{s.pattern}|{s.form}|{s.layer}|{s.kernel.name if s.kernel else ''}"
            for s in self.found
        ]
        return hashlib.sha256("\n".join([self.target, *lines]).encode()).hexdigest()[:16]

    # --- JSON ---------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """One document with the keys of the command contract."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "target": self.target,
            "tp": self.tp,
            "m": self.m,
            "plan": self.plan,
            "patterns": {
                name: {
                    "expected": c.expected,
                    "found": c.found,
                    "near": c.near,
                    "refused": c.refused,
                }
                for name, c in self.counts().items()
            },
            "sites": [*(site_json(s) for s in self.sites), *(near_json(n) for n in self.near)],
            "launches": self.launches,
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "events": dict(sorted(self.events.items())),
            "seconds": round(self.seconds, 4),
            "phases": {k: round(v, 4) for k, v in self.phases.items()},
            "validated": self.validated,
            "value_runs": self.value_runs,
            "factors": self.factors,
            "site_hash": self.site_hash(),
            "notes": self.notes,
            "options": {name: str(value) for name, value in self.changed_options.items()},
            "versions": versions(),
            "rank": self.rank,
            "world": self.world,
            "layers": self.layers,
            "graphs": self.graphs,
        }

    # --- summary ------------------------------------------------------------------------------

    def summary(self, *, explain: int = 3) -> str:
        """At most 12 lines: counts by pattern and the most frequent reasons."""
        m = f"M={self.m}" if self.m is not None else "M unknown"
        layers = len({s.layer for s in self.sites if s.layer is not None})
        head = f"k3fuse: {self.source}, {layers} layers, {m}, target {self.target}"
        head += " (plan)" if self.plan else ""
        lines = [head + (f"  (dump: {self.dump})" if self.dump else "")]
        lines.append(f"  {'pattern':<22}{'expect':>7}{'found':>7}{'near':>6}{'refused':>9}  kernel")
        for name, count in self.counts().items():
            kernels = Counter(s.kernel.name for s in self.found if s.pattern == name and s.kernel)
            kernel = ", ".join(k for k, _ in kernels.most_common(2)) or "-"
            expect = "-" if count.expected is None else str(count.expected)
            row = f"  {name:<22}{expect:>7}{count.found:>7}{count.near:>6}{count.refused:>9}"
            lines.append(f"{row}  {kernel}"[:110])
        lines += self.reason_lines()[: min(explain, 10 - len(lines))]
        options = ", ".join(f"{k}={v}" for k, v in self.changed_options.items())
        tail = (
            f"k3fuse: {self.nodes_before} -> {self.nodes_after} nodes in {self.seconds:.2f} s, "
            f"checked: {self.validated}"
        )
        lines.append(tail + (f", options: {options}" if options else ""))
        if self.prefetched_bytes:
            lines[-1] += f", prefetch: {self.prefetched_bytes} bytes"
        return "\n".join(lines)

    @property
    def prefetched_bytes(self) -> int:
        """Bytes that accepted sites ask for ahead of their readers, on one rank."""
        return sum(s.prefetched_bytes for s in self.found)

    def reason_lines(self) -> list[str]:
        """Why sites were not taken, most frequent first, one line each."""
        found = [(s.pattern, r) for s in self.sites for r in s.reasons[:1]]
        found += [(miss.pattern, miss.reason) for miss in self.near]
        rows = ((r.code.value, pattern, without_node(r.sentence, r.nodes)) for pattern, r in found)
        return [f"    {line}"[:158] for line in grouped_reasons(rows)]


def grouped_reasons(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Lines of (code, pattern, text) rows: equal ones counted, most frequent first."""
    counts = Counter(rows)
    return [f"{n} x {code}  {pattern}: {text}" for (code, pattern, text), n in counts.most_common()]


def versions() -> dict[str, str]:
    """Versions that decide what a graph looks like."""
    return {
        "k3fuse": version("k3fuse"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def site_json(site: Site) -> dict[str, Any]:
    """One site as plain JSON."""
    first = site.reasons[0] if site.reasons else None
    return {
        "layer": site.layer,
        "pattern": site.pattern,
        "form": site.form,
        "outcome": site.outcome,
        "reason": first.code.value if first else None,
        "reasons": [r.to_json() for r in site.reasons],
        "kernel": site.kernel.name if site.kernel else None,
        "launches": site.kernel.launches if site.kernel else None,
        "policy": site.kernel.policy if site.kernel else None,
        **({"prefetched_bytes": site.prefetched_bytes} if site.prefetched else {}),
        "built": dict(site.kernel.built) if site.kernel else {},
        "anchor": site.anchor.name,
        "nodes": len(site.own),
        "new_node": site.new_node,
        "values": {s.name: str(v).replace("'", "") for s, v in site.values.items()},
        "guards": [g.to_json() for g in site.guards],
        "notes": [*site.notes, *site.parted],
        "source": site.source,
        "frames": site.frames,
        "lines": site.lines,
        "pieces": site.pieces,
    }


def near_json(miss: NearMiss) -> dict[str, Any]:
    """One near miss as plain JSON, with a site's leading keys."""
    return {
        "layer": miss.layer,
        "pattern": miss.pattern,
        "form": None,
        "outcome": "near",
        "reason": miss.reason.code.value,
        "reasons": [miss.reason.to_json()],
        "kernel": None,
        "anchor": miss.anchor.name,
        "frames": miss.frames,
        "pieces": miss.pieces,
    }


def not_reached(target: str, expected: Mapping[str, int]) -> Report:
    """Return the report of a backend that was asked for and never called."""
    report = Report("(no graph)", target, None, 0, tuple(expected), expected=expected)
    report.notes.append(
        str(Reason(Code.COMPILE_NOT_REACHED, "no graph reached the k3fuse backend"))
    )
    return report


def dump_json(document: Any) -> str:
    """Stable text of a JSON document."""
    return json.dumps(document, indent=1, sort_keys=False, ensure_ascii=False) + "\n"

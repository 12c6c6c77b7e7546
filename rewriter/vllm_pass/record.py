"""What one start of an engine did, kept beside vLLM's caches: a warm start compiles nothing.

A warm start loads the compiled graphs, and no pass and no backend is called. The record of the
start that compiled them says what they hold; it is found again under every factor of the decision.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3fuse.rewriter.inspecting import merge
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.report import Report, grouped_reasons
from k3fuse_vllm import experts
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.processes import rank
from k3fuse_vllm.routes import Decision
from k3fuse_vllm.settings import Route, Settings
from k3fuse_vllm.versions import decision_digest

SCHEMA = "k3fuse.vllm/1"


@dataclass
class Outcome:
    """The end of a start. document: the report file's content; cached: read back from a record."""

    document: dict[str, Any]
    cached: bool = False

    @property
    def reached(self) -> bool:
        """Whether a graph was rewritten or judged, in this start or in the one that compiled."""
        return bool(self.document["graphs"])

    @property
    def site_hash(self) -> str | None:
        """Digest of the accepted sites of all graphs, None where no graph was reached."""
        return self.document["report"]["site_hash"] if self.reached else None

    def sites(self) -> dict[str, int]:
        """Accepted sites by pattern: of all compiled modules, or of all graphs."""
        counted: dict[str, int] | None = self.document.get("sites")
        if counted is not None:
            return counted
        patterns = self.document["report"]["patterns"] if self.reached else {}
        return {name: count["found"] for name, count in patterns.items()}

    def missing(self) -> dict[str, int]:
        """Expected sites that were not rewritten; empty where the model promises none."""
        found = self.sites()
        short = {p: n - found.get(p, 0) for p, n in self.document.get("expected", {}).items()}
        return {name: n for name, n in short.items() if n > 0}

    def headline(self) -> str:
        """One line: how far it came."""
        if self.document["reasons"]:
            first = self.document["reasons"][0]
            return f"k3fuse: not used: {first['code']}  {first['sentence']}"
        if not self.reached:
            return f"k3fuse: {_not_reached(self.document['route'])}"
        found = sum(self.sites().values())
        how = " (from a warm cache)" if self.cached else ""
        return (
            f"k3fuse: {found} sites in {self.document['graphs']} graphs{how}, "
            f"route {self.document['route']}, target {self.document['target']}"
        )

    def summary(self, path: str) -> str:
        """Few lines for the log: headline, counts by pattern, reasons, where the report is."""
        lines = [self.headline()]
        if self.reached:
            report = self.document["report"]
            sites = self.sites()
            for name, count in report["patterns"].items():
                lines.append(
                    f"  {name:<22}found {sites.get(name, 0):>4}  near {count['near']:>3}  "
                    f"refused {count['refused']:>4}"
                )
            rows = (
                (r["code"], s["pattern"], r["sentence"])
                for s in report["sites"]
                for r in s["reasons"][:1]
            )
            lines += [f"    {line}"[:158] for line in grouped_reasons(rows)[:3]]
        lines.append(f"k3fuse: report: {path}")
        return "\n".join(lines)


def _not_reached(route: str) -> str:
    fix = {
        Route.PASS.value: "vLLM compiled no piece of this model; check that its class is compiled",
        Route.BACKEND.value: "the runner compiled no model (vLLM's CPU runner ignores mode 1)",
        Route.REGIONAL.value: "no module of the region was called; check the region option",
    }.get(route, "no route leads to the rewrite")
    return str(Reason(Code.COMPILE_NOT_REACHED, f"no graph reached the rewrite: {fix}"))


class Record:
    """The report file of one rank, under a name that holds every factor of the decision."""

    def __init__(self, config: Any, settings: Settings, decision: Decision, facts: Facts) -> None:
        self.config, self.settings, self.decision, self.facts = config, settings, decision, facts

    @property
    def path(self) -> Path:
        """File of this rank."""
        from vllm import envs

        return Path(envs.VLLM_CACHE_ROOT) / "k3fuse" / self._key() / f"rank{rank()}.json"

    def _key(self) -> str:
        target = self.settings.options.target
        factors = [
            self.config.compute_hash(),
            decision_digest(self.settings.given, target.name if target else ""),
            self.decision.route.value,
        ]
        return hashlib.sha256("|".join(factors).encode()).hexdigest()[:20]

    def outcome(
        self, reports: Sequence[Report], regions: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Return this start's outcome; without a graph, the record of the start that compiled.

        regions: what Regions.for_report gives, on the regional route.
        """
        target = self.settings.options.target
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "route": self.decision.route.value,
            "target": target.name if target is not None else "none",
            "vllm": self.facts.vllm,
            "mode": self.facts.mode,
            "reasons": [r.to_json() for r in self.decision.reasons],
            "notes": list(self.decision.notes),
            "graphs": len(reports),
            "experts": experts.report(
                self.config, reference=target is not None and target.is_reference
            ),
            "report": None,
        }
        if regions is not None:
            document["reasons"] += regions["reasons"]
            document |= {"modules": regions["modules"], "sites": regions["sites"]}
            document["expected"] = regions["expected"]
        if reports:
            document["report"] = merged(reports).to_json()
        kept = self._kept() if self.decision.active else None
        # A cache may have held some of the graphs: the start that compiled all of them counts.
        if kept is not None and kept["graphs"] > len(reports):
            return Outcome(kept, cached=True)
        return Outcome(document)

    def _kept(self) -> dict[str, Any] | None:
        if self.settings.fresh or self.decision.route is Route.REGIONAL:
            return None
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        usable = isinstance(document, dict) and document.get("schema") == SCHEMA
        return document if usable and document.get("graphs") else None

    def write(self, outcome: Outcome) -> Path:
        """Write the record, and rank 0's to the user's file too; a reader never sees half of one.

        Returns the file to name in the log.
        """
        document = {**outcome.document, "from_cache": outcome.cached}
        text = json.dumps(document, indent=1) + "\n"
        paths = [self.path]
        if self.settings.report and rank() == 0:
            paths.append(Path(self.settings.report))
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        return paths[-1]


def merged(reports: Sequence[Report]) -> Report:
    """Return one report of all graphs; the inputs stay as they are."""
    first = reports[0]
    total = Report(
        "all graphs", first.target, first.m, first.tp, first.patterns, plan=first.plan,
        validated=first.validated, changed_options=first.changed_options, optional=first.optional,
    )  # fmt: skip
    for report in reports:
        merge(total, report)
    return total

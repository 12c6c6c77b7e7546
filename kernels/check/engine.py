"""The one place that calls the simulator: the launches of a step, in stream order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.simulator import SimReport, simulate


@dataclass(frozen=True)
class Call:
    """One launch: a built kernel and the values of each rank in kernel order."""

    built: Built
    params: Sequence[Sequence[Any]]


# A simulator without a race checker still runs everything else; reports then say "not checked".
HAS_RACES = "races" in inspect.signature(simulate).parameters

# Races of one launch: what the checker says of each, or None where it did not run.
Races = tuple[str, ...] | None


def execute(
    calls: Sequence[Call], *, seed: int | None, races: bool
) -> list[tuple[SimReport, Races]]:
    """Run launches one after the other; the report and the races of each."""
    found = []
    for call in calls:
        plan = call.built.plan
        options: dict[str, Any] = {"races": True} if races and HAS_RACES else {}
        report = simulate(
            call.built.ptx,
            call.built.entry,
            grid=plan.grid,
            block=plan.block,
            cluster=plan.cluster,
            dynamic_smem=plan.dynamic_smem,
            params=call.params,
            ranks=len(call.params),
            seed=seed,
            names=[p.name for p in plan.parameters],
            **options,
        )
        seen = tuple(str(r) for r in getattr(report, "races", ())) if options else None
        found.append((report, seen))
    return found

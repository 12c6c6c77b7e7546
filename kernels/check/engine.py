"""The one place that calls the simulator: the launches of a step, in stream order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.simulator import Launch, SequenceReport, simulate_sequence


@dataclass(frozen=True)
class Call:
    """One launch: a built kernel and the values of each rank in kernel order."""

    built: Built
    params: Sequence[Sequence[Any]]


# What the race checker found, or None where it was not asked.
Races = tuple[str, ...] | None


def buffer_names(call: Call, place: int, launches: int) -> tuple[str, ...]:
    """What the simulator calls the parameters: their names, and the launch where there are more."""
    tail = f" of launch {place}" if launches > 1 else ""
    return tuple(p.name + tail for p in call.built.plan.parameters)


def execute(
    calls: Sequence[Call],
    *,
    seed: int | None,
    races: bool,
    delay: Mapping[tuple[int, int], int],
    skip: Collection[tuple[int, int]],
) -> tuple[SequenceReport, Races]:
    """Run the launches of all ranks; those with PDL start at their predecessor's trigger."""
    launches = [
        Launch(
            call.built.ptx,
            call.built.plan.grid,
            call.built.plan.block,
            call.params,
            call.built.entry,
            call.built.plan.cluster,
            call.built.plan.dynamic_smem,
            buffer_names(call, place, len(calls)),
            call.built.plan.pdl,
            call.built.resources.registers,
            call.built.variant.label,
        )
        for place, call in enumerate(calls)
    ]
    report = simulate_sequence(
        launches, ranks=len(calls[0].params), seed=seed, races=races, delay=delay, skip=skip
    )
    return report, tuple(map(str, report.races)) if races else None

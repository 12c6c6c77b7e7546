"""The author's one call: a kernel, the tensors of each rank by name, and a report of what happened.

`run` builds the kernel where it is not in the cache, takes geometry and parameter order from its
plan, and simulates all ranks at once. `run_sequence` does so for the kernels of one step, in stream
order. Tensors are updated in place, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Parameter, Plan, Variant
from k3fuse.kernels.check.engine import Call, buffer_names, execute
from k3fuse.kernels.check.naming import Naming, Traffic, owned_tensor
from k3fuse.kernels.check.report import RunReport, SequenceReport
from k3fuse.kernels.simulator import Fresh, Inside, Multicast, Owned, TensorMap

# What a parameter may be, as `simulate` takes it.
Value = torch.Tensor | Fresh | Owned | Inside | Multicast | TensorMap | int
Rank = Mapping[str, Value]


@dataclass(frozen=True)
class Launch:
    """One kernel of a step. ranks: each rank's parameters by name.

    needed: bytes that each parameter has to move at least, summed over ranks, reads and writes;
    what is not named counts as not stated. polled: parameters whose memory is read until something
    is there; each byte read counts once, because how often is the schedule's affair.
    """

    kernel: Variant | Built
    ranks: Sequence[Rank]
    needed: Mapping[str, int] = field(default_factory=dict)
    polled: frozenset[str] = frozenset()


class ParameterError(ValueError):
    """Parameters that are not those of the kernel; the text names the parameter and the fix."""


def run(
    kernel: Variant | Built,
    ranks: Sequence[Rank],
    *,
    needed: Mapping[str, int] | None = None,
    seed: int | None = None,
    races: bool = False,
    cache: Cache | None = None,
) -> RunReport:
    """Run one kernel on the tensors of all ranks, and report.

    kernel: a variant, compiled where `cache` (the user's by default) does not hold it, or a built
    one with PTX. ranks: a mapping from parameter names to values for each rank. seed: draws a
    random schedule with late and torn copies; None is the fair schedule. races: also check for
    data races, on grids scaled down for it.

    Raises ParameterError for parameters that do not fit, BuildError where the kernel cannot be
    built or holds no PTX, and the simulator's errors for what the kernel does wrong.
    """
    launch = Launch(kernel, ranks, needed or {})
    return run_sequence([launch], seed=seed, races=races, cache=cache).reports[0]


def run_sequence(
    launches: Sequence[Launch],
    *,
    seed: int | None = None,
    races: bool = False,
    cache: Cache | None = None,
    delay: Mapping[tuple[int, int], int] | None = None,
    skip: Collection[tuple[int, int]] = (),
) -> SequenceReport:
    """Run the kernels of one step in stream order, all on the same ranks.

    A tensor that several launches name is one buffer. A kernel that was built with PDL starts at
    its predecessor's trigger; what it reads before its wait is checked. delay: (rank, launch) ->
    rounds to hold it back. skip: (rank, launch) that are not launched at all, as on a rank that
    died. Other arguments and errors as for `run`.
    """
    if not launches:
        raise ParameterError("launches is empty; give at least one")
    store = cache
    calls = []
    for launch in launches:
        built = launch.kernel
        if isinstance(built, Variant):
            store = store or Cache()
            built = store.get(built)
        if not built.ptx:
            raise BuildError(
                f"{built.variant.label} holds no PTX, which the simulator runs; pack it without "
                "--no-ptx, or give the variant"
            )
        if len(launch.ranks) != len(launches[0].ranks) or not launch.ranks:
            raise ParameterError(
                f"{built.variant.label} is launched on {len(launch.ranks)} ranks, the first kernel "
                f"on {len(launches[0].ranks)}; give the same number, at least one"
            )
        _known("needed", launch.needed, built.plan, built.variant.label)
        calls.append(Call(built, [_ordered(built, i, r) for i, r in enumerate(launch.ranks)]))
    sim, found = execute(calls, seed=seed, races=races, delay=delay or {}, skip=skip)
    naming, reports = Naming(), []
    for place, (launch, call) in enumerate(zip(launches, calls, strict=True)):
        part = sim.launches[place]
        if len(calls) == 1:
            part.seconds = sim.seconds
        names = [p.name for p in call.built.plan.parameters]
        said = buffer_names(call, place, len(calls))
        traffic = naming.by_owner(part.traffic, names, said, call.params)
        outputs = _outputs(launch.ranks, traffic)
        alone = found if len(calls) == 1 else None
        needed = dict(launch.needed)
        reports.append(RunReport(call.built, part, traffic, needed, outputs, alone, launch.polled))
    return SequenceReport(tuple(reports), sim, found)


def _ordered(built: Built, rank: int, values: Rank) -> list[Value]:
    """The values of one rank in kernel order, checked against the plan."""
    where = f"{built.variant.label}, rank {rank}"
    _known("ranks", values, built.plan, where)
    result = []
    for parameter in built.plan.parameters:
        if parameter.name not in values:
            raise ParameterError(
                f"{where}: parameter {parameter.name!r} ({parameter.kind}) is missing"
            )
        value = values[parameter.name]
        number = isinstance(value, int)
        if not isinstance(value, Value):
            raise ParameterError(
                f"{where}: parameter {parameter.name!r} is a {type(value).__name__}; use a CPU "
                "tensor, Fresh, Owned, Inside, Multicast, TensorMap or an int"
            )
        if parameter.tiles is not None:
            if not isinstance(value, TensorMap) or not _is_map(parameter, value):
                rows = ".with_rows(count, pitch)" if parameter.open_rows else ""
                raise ParameterError(
                    f"{where}: parameter {parameter.name!r} is a tensor map; give "
                    f"TensorMap.of(tensor, parameter.tiles{rows}) with the plan's parameter"
                )
        elif not number and parameter.kind != "pointer":
            raise ParameterError(
                f"{where}: parameter {parameter.name!r} is an {parameter.kind}; give an int"
            )
        result.append(value)
    return result


def _is_map(parameter: Parameter, value: TensorMap) -> bool:
    """Whether a map is the one that the plan states, with rows of its own where those are open."""
    stated, given = parameter.tiles, value.tiles()
    if stated is not None and parameter.open_rows and len(given.dims) == 2:
        try:
            stated = stated.with_rows(given.dims[1], given.strides[0])
        except ValueError:
            return False
    return given == stated


def _known(what: str, values: Mapping[str, object], plan: Plan, where: str) -> None:
    names = [p.name for p in plan.parameters]
    for name in values:
        if name not in names:
            raise ParameterError(
                f"{where}: {what} names {name!r}; the kernel's parameters are {', '.join(names)}"
            )


def _outputs(ranks: Sequence[Rank], traffic: Traffic) -> tuple[dict[str, torch.Tensor], ...]:
    """The tensors of each rank that anyone wrote to, by name."""
    written = {(name, owner) for _, name, owner, way in traffic if way == "write"}
    found: list[dict[str, torch.Tensor]] = []
    for rank, values in enumerate(ranks):
        tensors = {name: owned_tensor(v) for name, v in values.items() if (name, rank) in written}
        found.append({name: t for name, t in tensors.items() if t is not None})
    return tuple(found)

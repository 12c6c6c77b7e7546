"""Prove a case: numbers, protocol, races, resources, and that the check can fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import BuildError, MissingDslError, VariantError
from k3fuse.kernels.build.residency import Member, co_residency
from k3fuse.kernels.build.resources import Occupancy, occupancy
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check.case import Case, CheckTarget, Step
from k3fuse.kernels.check.report import SequenceReport
from k3fuse.kernels.check.run import run_sequence
from k3fuse.kernels.common.tolerances import Comparison, compare
from k3fuse.kernels.simulator import SimulationError

# (what runs now, steps done, steps in all)
Progress = Callable[[str, int, int], None]
RACE_SEEDS = (None, 1)  # schedules that the race checker looks at: the fair one and a random one


@dataclass(frozen=True)
class Gate:
    """One part of the proof: its verdict, and what it rests on or what is wrong."""

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class CaseResult:
    """The proof of one case.

    built: its kernels in stream order. fair: the run under the fair schedule, None where it failed.
    worst: the output nearest to (or furthest over) its tolerance, and that tolerance at its largest
    element. races: found by the checker, None where there was nothing to run.
    """

    case: Case = field(repr=False)
    target: CheckTarget
    seeds: int
    gates: tuple[Gate, ...]
    built: tuple[Built, ...] = field(repr=False)
    fair: SequenceReport | None = field(repr=False)
    worst: tuple[Comparison, float] | None
    races: tuple[str, ...] | None

    @property
    def passed(self) -> bool:
        """No gate failed; those that come after a failed build or run are not there."""
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> list[dict[str, Any]]:
        """One object a kernel, with the keys of the command contract; `gates` are of the case."""
        reports = self.fair.reports if self.fair else (None,) * len(self.built)
        shared = {
            "case": self.case.name,
            "max_error": self.worst[0].max_error if self.worst else None,
            "rms_error": self.worst[0].rms_error if self.worst else None,
            "tolerance": self.worst[1] if self.worst else None,
            "races": None if self.races is None else len(self.races),
            "seeds": self.seeds,
            "passed": self.passed,
            "gates": [vars(gate) | {"seconds": round(gate.seconds, 3)} for gate in self.gates],
        }
        rows = []
        for built, report in zip(self.built, reports, strict=True):
            fits = occupancy(built.plan, built.resources, self.target.sms)
            rows.append(
                {
                    "op": built.variant.op,
                    "variant": built.variant.name,
                    "arch": built.variant.arch,
                    "registers": built.resources.registers,
                    "spill_bytes": built.resources.spill_bytes,
                    "smem_bytes": built.smem_bytes,
                    "grid": list(built.plan.grid),
                    "block": list(built.plan.block),
                    "cluster": list(built.plan.cluster),
                    "ctas_per_sm": fits.ctas_per_sm,
                    "waves": round(fits.waves, 3),
                    "bytes_requested": report.bytes_requested if report else None,
                    "bytes_needed": report.bytes_needed if report else None,
                    "warp_instructions": report.sim.warp_instructions if report else None,
                    "ranks": report.sim.ranks if report else None,
                    **shared,
                }
            )
        return rows


def check_case(
    case: Case,
    target: CheckTarget,
    *,
    seeds: int = 5,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> CaseResult:
    """Run all gates of one case.

    seeds: random schedules with late and torn copies. A kernel that fails a gate is a result, not
    an error; raises MissingDslError where it would have to be compiled and cannot be, VariantError
    for sizes outside the kernel, and whatever the case's own code raises.
    """
    return _Proof(case, target, seeds, cache or Cache(), progress or _silent).result()


def _silent(text: str, done: int, total: int) -> None:
    return None


class _Failed(Exception):  # noqa: N818 - an outcome, not an error of the program
    """A gate's verdict: what is wrong."""


class _Proof:
    """The gates of one case, in order; later ones are left out where nothing can be run."""

    def __init__(
        self, case: Case, target: CheckTarget, seeds: int, cache: Cache, progress: Progress
    ) -> None:
        self.case, self.target, self.seeds, self.cache = case, target, seeds, cache
        self.say, self.done, self.total = progress, 0, 4 + seeds + len(RACE_SEEDS)
        self.gates: list[Gate] = []
        self.built: tuple[Built, ...] = ()
        self.fair: SequenceReport | None = None
        self.worst: tuple[Comparison, float] | None = None
        self.races: tuple[str, ...] | None = None

    def result(self) -> CaseResult:
        first = self.case.step(0)
        ran = self._gate("build", lambda: self._build(first))
        if ran:
            self._gate("resources", self._resources)
            ran = self._gate("numerics", lambda: self._numerics(first))
        if ran:
            self._gate("garbage", lambda: self._garbage(first))
            self._gate("protocol", self._protocol)
        if self.built:
            # Also where the numbers are wrong: a race may be why. What only breaks off once more,
            # as an earlier gate did, says nothing new.
            failed = not all(gate.passed for gate in self.gates)
            if not self._gate("races", self._race) and failed and not self.races:
                del self.gates[-1]
        return CaseResult(
            self.case, self.target, self.seeds, tuple(self.gates), self.built, self.fair,
            self.worst, self.races,
        )  # fmt: skip

    def _gate(self, name: str, run: Callable[[], str]) -> bool:
        started = time.perf_counter()
        try:
            detail, passed = run(), True
        except (MissingDslError, VariantError):
            raise
        except (_Failed, BuildError, SimulationError) as error:
            lines = (" ".join(line.split()) for line in str(error).splitlines())
            detail, passed = "; ".join(filter(None, lines)), False
        self.gates.append(Gate(name, passed, detail, time.perf_counter() - started))
        return passed

    def _step(self, text: str) -> None:
        self.say(f"{self.case.op}/{self.case.name}: {text}", self.done, self.total)
        self.done += 1

    def _build(self, step: Step) -> str:
        self._step("build")
        found = []
        for launch in step.launches:
            kernel = launch.kernel
            found.append(self.cache.get(kernel) if isinstance(kernel, Variant) else kernel)
        self.built = tuple(found)
        return f"{len(found)} kernel{'s' * (len(found) > 1)} as planned"

    def _resources(self) -> str:
        self._step("resources")
        said = []
        for built in self.built:
            registers, spills = built.resources.registers, built.resources.spill_bytes
            fits = occupancy(built.plan, built.resources, self.target.sms)
            if spills:
                raise _Failed(f"{built.variant.label} spills {spills} bytes")
            if registers > self.case.max_registers:
                raise _Failed(
                    f"{built.variant.label} takes {registers} registers a thread; at most "
                    f"{self.case.max_registers} are allowed"
                )
            said.append(_fitting(registers, fits))
        if self.case.waits:
            # All kernels of the step: with PDL they may be resident together.
            members = [Member.built(b.plan, b.resources, b.variant.label) for b in self.built]
            together = co_residency(members, self.target.sms)
            if not together.fits:
                raise _Failed(together.explain())
            said.append(together.explain())
        return "; ".join(said)

    def _numerics(self, step: Step) -> str:
        self._step("numerics")
        self.fair = run_sequence(step.launches, cache=self.cache)
        self.worst = self._compared(step)
        comparison, band = self.worst
        outputs = f"{len(step.outputs)} output{'s' * (len(step.outputs) > 1)}"
        return (
            f"{outputs}, largest error {comparison.max_error:.1e} (tolerance {band:.1e}), "
            f"RMS {comparison.rms_error:.1e}"
        )

    def _compared(self, step: Step) -> tuple[Comparison, float]:
        """The worst output of a step that ran; raises _Failed for a wrong one or an invariant."""
        worst: tuple[Comparison, float] | None = None
        wrong = ""
        for output in step.outputs:
            found = compare(output.tensor, output.expected, output.tolerance)
            band = output.tolerance.largest
            if worst is None or _share(found, band) > _share(*worst):
                worst = found, band
            if not found.ok and not wrong:
                wrong = (
                    f"{output.name} of rank {output.rank}: {found.outside} of "
                    f"{output.tensor.numel()} elements outside the tolerance, worst at "
                    f"{found.worst}; error {found.max_error:.1e} ({band:.1e}), RMS "
                    f"{found.rms_error:.1e} ({output.tolerance.rms:.1e})"
                )
        if worst is None:
            raise _Failed("the case states no output to compare")
        for name, invariant in step.invariants.items():
            if (broken := invariant()) and not wrong:
                wrong = f"{name}: {broken}"
        if wrong:
            self.worst = worst
            raise _Failed(wrong)
        return worst

    def _garbage(self, step: Step) -> str:
        """Every mutation of every output must be refused."""
        self._step("garbage")
        other, refused = self.case.step(1), 0
        for output, elsewhere in zip(step.outputs, other.outputs, strict=True):
            for name, mutation in self.case.garbage.items():
                wrong = mutation(output.tensor, elsewhere.expected)
                if compare(wrong, output.expected, output.tolerance).ok:
                    raise _Failed(f"{output.name} of rank {output.rank}: {name!r} would pass")
                refused += 1
        if not refused:
            raise _Failed("the case states no garbage to refuse")
        return f"{refused} wrong results refused: {', '.join(self.case.garbage)}"

    def _protocol(self) -> str:
        make, ctas = self.case.protocol or self.case.step, 0
        for seed in range(1, self.seeds + 1):
            step = make(seed)
            self._step(f"protocol, random schedule {seed} of {self.seeds}")
            try:
                ctas = _ctas(run_sequence(step.launches, seed=seed, cache=self.cache))
                self._compared(step)
            except (_Failed, SimulationError) as error:
                raise _Failed(f"schedule {seed}: {error}") from None
        return f"{self.seeds} random schedules of {ctas} CTAs a rank, late and torn copies"

    def _race(self) -> str:
        make, ctas = self.case.small or self.case.step, 0
        found: dict[str, None] = {}
        broken: SimulationError | None = None
        for seed in RACE_SEEDS:
            self._step(f"races, schedule {'fair' if seed is None else seed}")
            try:
                report = run_sequence(make(0).launches, seed=seed, races=True, cache=self.cache)
            except SimulationError as error:
                broken = broken or error  # it carries the races found before, which may be why
                found.update(dict.fromkeys(map(str, error.races)))
            else:
                ctas = _ctas(report)
                found.update(dict.fromkeys(report.races or ()))
        if broken is not None and not found:
            raise broken
        self.races = tuple(found)
        if found:
            count = f"{len(found)} race{'s' * (len(found) > 1)}"
            raise _Failed(f"{count}, the first: {self.races[0]}")
        return f"none in {len(RACE_SEEDS)} schedules of {ctas} CTAs a rank"


def _ctas(report: SequenceReport) -> int:
    """CTAs of all launches on one rank."""
    return sum(r.built.plan.ctas for r in report.reports)


def _fitting(registers: int, fits: Occupancy) -> str:
    return (
        f"no spills, {registers} registers, {fits.ctas_per_sm} CTAs an SM (bound by {fits.limit}), "
        f"{fits.waves:.2f} waves on {fits.sms} SMs"
    )


def _share(found: Comparison, band: float) -> float:
    """Error as a share of the band; exact outputs count any error as infinitely large."""
    return found.max_error / band if band else float("inf") if found.max_error else 0.0

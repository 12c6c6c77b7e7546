"""Kernels on a GPU: bits, replays of CUDA graphs, time against what they replace.

An op lists in `kernels/OP/bench.py`, in `GPU_CASES`, what runs on one device: a `GpuCase` each, by
name. One device stands in for all ranks of a group, so a case says in its `notes` what it does
where the real group does something else. `run_case` does the rest, on any `Device`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.variant import Variant

SCHEMA = "k3fuse.kernels-gpu/1"
ROUNDS = 20  # calls in a timed graph
REPEATS = 30  # of a timed graph; the median counts
METHOD = (
    "bits: every way of every token count against the reference, then against the rows of the "
    "largest count; outputs are set to NaN before each step",
    "replays: one CUDA graph a count and way, replayed in random order; after each the outputs are "
    "compared bit by bit with those of the first run",
    f"time: a graph of {ROUNDS} calls with what must be put back before each, less a graph of that "
    f"alone, over {ROUNDS}; medians of {REPEATS} replays by CUDA events; weights in turn from "
    "copies that together exceed the L2 cache twice",
)


class Device(Protocol):
    """Where a case runs."""

    name: str
    arch: str  # as kernels are built for: "sm_90a"
    sms: int
    l2_bytes: int

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor on the device."""

    def built(self, variant: Variant) -> Built:
        """The kernel, compiled."""

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        """Launch on the current stream, behind what is there."""

    def together(self, calls: Sequence[tuple[Variant, Sequence[int]]]) -> None:
        """Launch kernels that wait for each other, each on a stream of its own; then join."""

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` into a graph; the result replays it."""

    def wait(self) -> None:
        """Return when the device is idle."""

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for `work`."""


@dataclass(frozen=True)
class Timed:
    """One count to time. prepare: puts back what a call consumes. ways: what is compared, by name;
    each is told the number of the call, for copies of weights."""

    prepare: Callable[[], None]
    ways: Mapping[str, Callable[[int], None]]


class GpuCase(Protocol):
    """One op, at one size, on one device."""

    @property
    def op(self) -> str:
        """The op."""

    @property
    def name(self) -> str:
        """Which size."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token counts that are compared and replayed."""

    @property
    def timed(self) -> Sequence[int]:
        """Token counts that are timed."""

    @property
    def notes(self) -> Sequence[str]:
        """What the one device does in the place of a group."""

    def ways(self, m: int) -> Sequence[str]:
        """Names of the ways in which m tokens are served; all must give the same bits."""

    def step(self, m: int, way: str) -> None:
        """Enqueue everything of one step; may be captured."""

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        """What the step writes, [m, ...] each, on the device."""

    def wrong(self, m: int, way: str) -> str:
        """What the reference has against the outputs of the last step, "" for nothing."""

    def compared(self) -> Mapping[str, int]:
        """Counts to report once all steps have run: elements that differ from the simulator's."""

    def after(self) -> str:
        """What does not hold between two steps, "" where all does."""

    def time(self, m: int) -> Timed:
        """The kernels of m tokens and what they replace."""


@dataclass
class Outcome:
    """What one case did. faults: one line each. microseconds: count -> way -> time of a call."""

    case: GpuCase
    replays: int = 0
    faults: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    microseconds: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        case = self.case
        return {
            "op": case.op,
            "case": case.name,
            "tokens": {str(m): list(case.ways(m)) for m in case.tokens},
            "notes": list(case.notes),
            "replays": self.replays,
            "compared": self.compared,
            "microseconds": {str(m): ways for m, ways in self.microseconds.items()},
            "faults": self.faults,
            "passed": self.passed,
        }


def run_case(
    case: GpuCase,
    device: Device,
    *,
    replays: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Compare, replay, time. Faults are results; what a launch raises is not caught."""
    done = Outcome(case)
    first: dict[tuple[int, str], dict[str, Tensor]] = {}
    largest: dict[str, Tensor] = {}
    for m in sorted(case.tokens, reverse=True):
        for way in case.ways(m):
            say(f"{case.name}, M = {m}, {way}")
            case.step(m, way)
            device.wait()
            got = {name: rows.clone() for name, rows in case.outputs(m, way).items()}
            first[m, way], largest = got, largest or got
            wrong = case.wrong(m, way)
            wrong = wrong or _different(got, {name: rows[:m] for name, rows in largest.items()})
            if wrong:
                done.faults.append(f"M = {m}, {way}: {wrong}")
    done.compared = dict(case.compared())
    _replay(case, device, first, done, replays, seed, say)
    if wrong := case.after():
        done.faults.append(wrong)
    for m in case.timed if done.passed else ():
        say(f"{case.name}, M = {m}, time")
        timed = case.time(m)
        done.microseconds[m] = {
            way: _microseconds(device, timed.prepare, call) for way, call in timed.ways.items()
        }
    return done


def _replay(
    case: GpuCase,
    device: Device,
    first: Mapping[tuple[int, str], Mapping[str, Tensor]],
    done: Outcome,
    replays: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    graphs = {key: device.graph(lambda key=key: case.step(*key)) for key in first}  # type: ignore[misc]
    chosen, keys = random.Random(seed), list(first)
    for number in range(replays):
        if number % 100 == 0:
            say(f"{case.name}, replay {number} of {replays}")
        key = chosen.choice(keys)
        graphs[key]()
        device.wait()
        done.replays += 1
        if wrong := _different(case.outputs(*key), first[key]):
            done.faults.append(f"replay {number}, M = {key[0]}, {key[1]}: {wrong}")
            return


def _different(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    for name, rows in got.items():
        differ = int((_bits(rows) != _bits(wanted[name])).sum())
        if differ:
            return f"{differ} of {rows.numel()} elements of {name} have other bits"
    return ""


def _bits(rows: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows.contiguous().view(kinds[rows.element_size()])


def _microseconds(
    device: Device, prepare: Callable[[], None], call: Callable[[int], None]
) -> float:
    def whole() -> None:
        for number in range(ROUNDS):
            prepare()
            call(number)

    def rest() -> None:
        for _ in range(ROUNDS):
            prepare()

    spent = []
    for work in (whole, rest):
        replay = device.graph(work)
        replay()
        device.wait()
        spent.append(median(device.seconds(replay) for _ in range(REPEATS)))
    return (spent[0] - spent[1]) / ROUNDS * 1e6


def document(op: str, device: Device, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "schema": SCHEMA,
        "op": op,
        "device": {"name": device.name, "arch": device.arch, "sms": device.sms},
        "method": list(METHOD),
        "cases": [outcome.to_json() for outcome in outcomes],
        "passed": all(outcome.passed for outcome in outcomes),
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The document as Markdown, to keep beside an op's page."""
    device = found["device"]
    lines = [
        f"# {found['op']} on {device['name']}",
        "",
        f"{device['arch']}, {device['sms']} SMs; torch {torch.__version__}. "
        + ("All comparisons passed." if found["passed"] else "FAILED."),
        "",
        *(f"- {line}" for line in found["method"]),
    ]
    for case in found["cases"]:
        lines += ["", f"## {case['case']}", ""]
        lines += [f"- {note}" for note in case["notes"]]
        counts = ", ".join(f"{m} ({', '.join(ways)})" for m, ways in case["tokens"].items())
        lines += [f"- token counts: {counts}", f"- {case['replays']} replays"]
        lines += [f"- {name}: {count}" for name, count in case["compared"].items()]
        lines += [f"- FAULT: {fault}" for fault in case["faults"]]
        times: dict[str, dict[str, float]] = case["microseconds"]
        if times:
            names = list(next(iter(times.values())))
            lines += ["", f"| M | {' | '.join(f'{name}, us' for name in names)} |"]
            lines.append("| --- " * (len(names) + 1) + "|")
            for m, row in times.items():
                lines.append(f"| {m} | {' | '.join(f'{row[name]:.1f}' for name in names)} |")
    return "\n".join(lines) + "\n"

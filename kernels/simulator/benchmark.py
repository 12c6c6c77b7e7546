"""What the simulator itself costs: processor seconds and peak memory of a few runs at K3 sizes.

Every case runs in a process of its own, since the peak of a process never falls. Seconds are those
of the fastest of a few runs, translation excluded (but in cases that run once), as
processor time: it depends less than wall time on what else the machine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from k3fuse.kernels.build import builder
from k3fuse.kernels.build.cache import Cache
from k3fuse.kernels.build.compile import Built, compile_variant, dsl_installed
from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.simulator import exchange_kernel as exchange
from k3fuse.kernels.simulator.counters import SimReport
from k3fuse.kernels.simulator.launch import simulate
from k3fuse.kernels.simulator.placement import Fresh, Multicast, Owned

N, K = 7168, 768  # K3's output projection on one of 16 ranks


@dataclass(frozen=True)
class Case:
    """One run. Targets: processor seconds on one core, and GB (1e9 bytes) of peak memory."""

    name: str
    ranks: int
    m: int
    seconds: float
    gigabytes: float
    runs: int
    n: int = N
    k: int = K


CASES = (
    Case("gemv", 1, 1, 0.15, 1.0, 5),
    Case("gemv", 1, 8, 0.6, 1.0, 3),
    Case("exchange", 16, 8, 5.0, 3.0, 1),
    Case("output_projection", 16, 8, 5.0, 3.0, 1),
)


@dataclass(frozen=True)
class Result:
    """What a case took; `warp_instructions` of one run. ok: within both targets."""

    case: str
    ranks: int
    m: int
    warp_instructions: int
    seconds: float
    gigabytes: float
    target_seconds: float
    target_gigabytes: float
    ok: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure(case: Case, cache: Path | None = None) -> Result:
    """Run a case in a process of its own. Raises BuildError with the child's last line."""
    # Forks of a large process would start with its peak, so the child is started anew.
    command = [sys.executable, "-m", __name__, json.dumps(asdict(case)), str(cache or "")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise BuildError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found = json.loads(done.stdout)
    seconds, gigabytes = float(found["seconds"]), float(found["gigabytes"])
    return Result(
        case.name, case.ranks, case.m, int(found["warp_instructions"]), seconds, gigabytes,
        case.seconds, case.gigabytes, seconds < case.seconds and gigabytes < case.gigabytes,
    )  # fmt: skip


def _gemv(case: Case, cache: Path | None) -> Callable[[], SimReport]:
    sizes = {"m": case.m, "n": case.n, "k": case.k}
    built = _built(builder("workbench_gemv").variant("sm_103a", sizes, {}), cache)
    x, w = torch.randn(case.m, case.k).bfloat16(), torch.randn(case.n, case.k).bfloat16()
    y = torch.zeros(case.m, case.n).bfloat16()
    plan, text = built.plan, built.ptx
    return lambda: simulate(
        text, grid=plan.grid, block=plan.block, dynamic_smem=plan.dynamic_smem,
        params=[[x, w, Fresh(y)]], names=["x", "w", "y"],
    )  # fmt: skip


def _output_projection(case: Case, cache: Path | None) -> Callable[[], SimReport]:
    """The fused kernel, AttnRes over 8 blocks, all ranks, with multicast."""
    from k3fuse.kernels.output_projection import problem
    from k3fuse.kernels.output_projection.builder import config_of

    sizes = {"max_m": case.m}
    (variant,) = problem.variants(case.ranks, case.m, sizes, fused=True)
    built = _built(variant, cache)
    step = problem.make(config_of(variant), case.m).launch(variant)
    plan, text = built.plan, built.ptx
    names = [p.name for p in plan.parameters]
    return lambda: simulate(
        text, grid=plan.grid, block=plan.block, cluster=plan.cluster,
        dynamic_smem=plan.dynamic_smem, ranks=case.ranks, names=names,
        params=[[values[name] for name in names] for values in step.ranks],
    )  # fmt: skip


def _built(variant: Variant, cache: Path | None) -> Built:
    found = Cache(cache).peek(variant)
    if found is None and not dsl_installed():
        raise BuildError(
            f"{variant.label} is not in the cache of kernels and the DSL is missing; "
            "pip install 'k3fuse[kernels]'"
        )
    return found or compile_variant(variant)


def _exchange(case: Case) -> Callable[[], SimReport]:
    ranks = range(case.ranks)
    x = [torch.randn(exchange.TOKENS, case.k).bfloat16() for _ in ranks]
    w = [torch.randn(case.n, case.k).bfloat16() for _ in ranks]
    y = [torch.zeros(exchange.TOKENS, case.n).bfloat16() for _ in ranks]
    shape = (case.ranks, exchange.TOKENS, case.n)
    boxes = [torch.full(shape, exchange.EMPTY, dtype=torch.int32) for _ in ranks]
    every = Multicast(tuple(boxes))
    text = exchange.exchange_ptx(case.n, case.k, case.ranks)
    return lambda: simulate(
        text, grid=exchange.exchange_grid(case.n), block=(exchange.THREADS, 1, 1), ranks=case.ranks,
        params=[[x[r], w[r], every, Owned(boxes[r], r), Fresh(y[r]), r] for r in ranks],
        names=exchange.PARAMETERS,
    )  # fmt: skip


def _peak() -> float:
    """Peak memory of this process in GB.

    Linux hands the peak that getrusage gives on from the process that started this one, so it is
    read from what belongs to this program's memory alone.
    """
    import resource

    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 1e9


def _child(case: Case, cache: Path | None) -> dict[str, float]:
    makers = {"gemv": _gemv, "output_projection": _output_projection}
    run = makers[case.name](case, cache) if case.name in makers else _exchange(case)
    best, report = float("inf"), None
    for _ in range(case.runs + (case.runs > 1)):  # the first of several also translates
        started = time.process_time()
        report = run()
        best = min(best, time.process_time() - started)
    return {
        "seconds": round(best, 3),
        "gigabytes": round(_peak(), 2),
        "warp_instructions": report.warp_instructions if report else 0,
    }


if __name__ == "__main__":
    torch.manual_seed(1)
    chosen = Case(**json.loads(sys.argv[1]))
    print(json.dumps(_child(chosen, Path(sys.argv[2]) if sys.argv[2] else None)))

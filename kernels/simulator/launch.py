"""One call that runs a PTX kernel on torch CPU tensors: `simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from k3fuse.kernels.simulator.counters import SimReport
from k3fuse.kernels.simulator.grids import Observer
from k3fuse.kernels.simulator.machine import Dim3
from k3fuse.kernels.simulator.placement import Parameter
from k3fuse.kernels.simulator.sequence import Launch, simulate_sequence


def simulate(
    ptx_text: str,
    entry: str = "",
    *,
    grid: Dim3,
    block: Dim3,
    cluster: Dim3 = (1, 1, 1),
    dynamic_smem: int = 0,
    params: Sequence[Sequence[Parameter]],
    ranks: int = 1,
    seed: int | None = None,
    names: Sequence[str] = (),
    sms: int | None = None,
    registers: int = 0,
    observer: Observer | None = None,
    races: bool = False,
) -> SimReport:
    """Run one kernel on all ranks at once and write the results back into its tensors.

    `params` holds the parameters of each rank (`ranks` lists). A tensor becomes a pointer to a copy
    in the memory of that rank; it must be a dense CPU tensor, and is updated in place at the end.
    A tensor that several ranks pass lives in the memory of the first one, or of `Owned.rank`.
    `names` names the parameters in messages. `entry` may be empty: the first kernel of the text.
    With a `seed`, warps advance and asynchronous copies land in a random order drawn from it.
    With `sms`, only so many CTAs of a rank are resident at once as fit that many SMs, given
    `registers` a thread. `observer` is told when grids start, wait and end.

    `races`: also look for data races, and list them in the report.

    Raises ValueError for a wrong call, UnsupportedPtxError before anything runs, and
    MemoryAccessError, BarrierError or DeadlockError for what the kernel does wrong; tensors are
    then left as they were.
    """
    launch = Launch(
        ptx_text, grid, block, params, entry, cluster, dynamic_smem, names, registers=registers
    )
    done = simulate_sequence(
        [launch], ranks=ranks, seed=seed, sms=sms, observer=observer, races=races
    )
    report = done.launches[0]
    report.races, report.race_count = done.races, done.race_count
    report.seconds = done.seconds
    return report

"""A functional simulator of PTX on the CPU, in numpy.

`simulate` runs a compiled kernel, all CTAs of all ranks at once, on torch CPU tensors, checks every
memory access, and counts instructions and bytes. It says whether a kernel is right, not how long it
takes. See docs/simulator.md.

Modelled: integer, bit and float arithmetic, conversions to and from bf16, e4m3, e5m2, e2m1 and
ue8m0, all memory spaces, divergence, named and cluster barriers, mbarriers, warp shuffles, votes
and reductions, mma.sync and ldmatrix, atomics, cp.async, cp.async.bulk, st.async, distributed
shared memory, multimem, TMA tiles, and tcgen05 on one CTA. `races=True` checks for data races. Not
modelled: tcgen05 on CTA pairs and wgmma. Anything not modelled raises UnsupportedPtxError, which
names the instruction and its line.
"""

from k3fuse.kernels.simulator.counters import Bytes, SimReport
from k3fuse.kernels.simulator.errors import (
    BarrierError,
    DeadlockError,
    MemoryAccessError,
    OverlapError,
    PtxSyntaxError,
    SimulationError,
    TensorMemoryError,
    UnsupportedPtxError,
)
from k3fuse.kernels.simulator.grids import Observer
from k3fuse.kernels.simulator.launch import simulate
from k3fuse.kernels.simulator.placement import Fresh, Inside, Multicast, Owned, Parameter
from k3fuse.kernels.simulator.race_report import Access, Race
from k3fuse.kernels.simulator.sequence import Launch, SequenceReport, simulate_sequence
from k3fuse.kernels.simulator.tensor_map import TensorMap

__all__ = [
    "Access",
    "BarrierError",
    "Bytes",
    "DeadlockError",
    "Fresh",
    "Inside",
    "Launch",
    "MemoryAccessError",
    "Multicast",
    "Observer",
    "OverlapError",
    "Owned",
    "Parameter",
    "PtxSyntaxError",
    "Race",
    "SequenceReport",
    "SimReport",
    "SimulationError",
    "TensorMap",
    "TensorMemoryError",
    "UnsupportedPtxError",
    "simulate",
    "simulate_sequence",
]

"""Run kernels by name on the CPU, and prove them: numbers, protocol, races, resources.

`run` and `run_sequence` are an author's calls; a `Case` says what a kernel must compute, and
`check_case` proves that it does. Importing this package loads neither CUDA nor the DSL.
"""

from k3fuse.kernels.check.case import GARBAGE, Case, CheckTarget, Output, Step
from k3fuse.kernels.check.prove import CaseResult, Gate, check_case
from k3fuse.kernels.check.registry import NoKernelError, cases_of
from k3fuse.kernels.check.report import RunReport, SequenceReport
from k3fuse.kernels.check.run import Launch, ParameterError, run, run_sequence

__all__ = [
    "GARBAGE",
    "Case",
    "CaseResult",
    "CheckTarget",
    "Gate",
    "Launch",
    "NoKernelError",
    "Output",
    "ParameterError",
    "RunReport",
    "SequenceReport",
    "Step",
    "cases_of",
    "check_case",
    "run",
    "run_sequence",
]

"""Read the launch geometry out of the host code that the DSL compiles beside a kernel.

The DSL's host function fills a launch configuration, a struct of grid, block, dynamic shared memory
and more, with constants. k3fuse launches through cuda-python instead, from a plan that the builder
states; the host code is a second, independent source to check that plan against.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3fuse.kernels.build.variant import Dim3

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)")
# Field 0 of the configuration is the grid, 1 the block, 2 the dynamic shared memory.
_FIELD = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, (\d)(?:, (\d))?\].*"
    r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i(?:32|64)")


@dataclass(frozen=True)
class HostLaunch:
    """Grid in CTAs, block in threads, dynamic shared memory in bytes."""

    grid: Dim3
    block: Dim3
    dynamic_smem: int


def launch_of(text: str) -> HostLaunch | None:
    """Return the one launch in LLVM-dialect MLIR; None where it is not constant or not found."""
    for function in re.split(r"^\s*llvm\.func ", text, flags=re.M)[1:]:
        constants = {n: int(v) for n, v in _CONSTANT.findall(function)}
        fields = {n: (int(f), int(i or 0)) for n, f, i in _FIELD.findall(function)}
        stored = {
            fields[place]: constants[value]
            for value, place in _STORE.findall(function)
            if place in fields and value in constants
        }
        try:
            grid, block = ((stored[f, 0], stored[f, 1], stored[f, 2]) for f in (0, 1))
            return HostLaunch(grid, block, stored[2, 0])
        except KeyError:
            continue
    return None

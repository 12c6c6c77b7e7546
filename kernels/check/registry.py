"""Which cases an op has, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.check.case import Case, CheckTarget
from k3fuse.kernels.check.gpu import Device, GpuCase
from k3fuse.kernels.common.policy import MAX_M
from k3fuse.kernels.common.registry import OPS

# A function (target, m) -> cases.
Cases = Callable[[CheckTarget, int], tuple[Case, ...]]

# Cases of what is no fused op. A fused op has them in kernels/OP/cases.py, in `cases`.
WORKBENCH = {"workbench_gemv": "k3fuse.kernels.check.workbench_gemv:cases"}


class NoKernelError(ValueError):
    """The op has no kernel for the target yet, or no case; the text names what is planned."""


def known() -> tuple[str, ...]:
    """Ops that `cases_of` takes."""
    return (*OPS, *WORKBENCH)


def cases_of(op: str, target: CheckTarget, m: int) -> tuple[Case, ...]:
    """Cases of `op` for `m` tokens.

    op: one of `known()`, or "package.module:function" for cases of your own. Raises NoKernelError
    for an op whose kernel does not exist yet, VariantError for an unknown op or a count that no
    kernel covers.
    """
    if ":" in op or op in WORKBENCH:
        return _function(WORKBENCH.get(op, op))(target, m)
    if op not in OPS:
        raise VariantError(
            f"op {op!r} is unknown; use one of {', '.join(known())}, or package.module:function"
        )
    row = OPS[op].table.lookup(target.name, m)
    if row is None:
        raise VariantError(f"{op}: m={m} is outside the policy of {target.name}; use 1 to {MAX_M}")
    module = f"k3fuse.kernels.{op}.cases"
    found = _function(f"{module}:cases")(target, m) if find_spec(module) is not None else ()
    if not found and row.kernel is not None:
        raise NoKernelError(
            f"{op} has a kernel but no case for {target.name} at M = {m}; write it in "
            f"kernels/{op}/cases.py"
        )
    if not found:
        launches = "1 launch" if row.launches == 1 else f"{row.launches} launches"
        raise NoKernelError(
            f"{op} has no kernel for {target.name} yet; for M = {row.m_min} to {row.m_max} its "
            f"policy plans {row.planned} ({launches})"
        )
    return found


def gpu_cases_of(op: str, names: Sequence[str] = ()) -> dict[str, Callable[[Device], GpuCase]]:
    """What `op` can do on a GPU: name -> maker of the case; those of `names`, or all.

    Raises VariantError for an op or a name without one.
    """
    with_cases = [o for o in OPS if find_spec(f"k3fuse.kernels.{o}.bench") is not None]
    if op not in with_cases:
        raise VariantError(f"op {op!r} has no GPU case; use one of {', '.join(with_cases)}")
    module = importlib.import_module(f"k3fuse.kernels.{op}.bench")
    found: Mapping[str, Callable[[Device], GpuCase]] = module.GPU_CASES
    if wrong := [name for name in names if name not in found]:
        raise VariantError(f"{op} has no GPU case {wrong[0]!r}; use {', '.join(found)}")
    return {name: make for name, make in found.items() if not names or name in names}


def _function(place: str) -> Cases:
    module, _, name = place.partition(":")
    try:
        found: Cases = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise VariantError(
            f"{place!r} names no cases ({error}); use package.module:function"
        ) from None
    return found

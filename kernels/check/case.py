"""What a kernel must do, as its author writes it down: a `Case`.

A case makes steps from seeds. A step is launches with the tensors of all ranks, the outputs that
they must produce, and what must hold afterwards. `garbage` makes wrong results on purpose: the
check has to refuse each of them, or it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.check.run import Launch
from k3fuse.kernels.common.tolerances import Tolerance

# SMs of the chips that kernels are built for: H200, B200/GB200 as commonly enabled, GB300.
SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}


@dataclass(frozen=True)
class CheckTarget:
    """What is checked for. name: "gb300:tp16". arch: "sm_103a". tp: ranks of the group."""

    name: str
    arch: str
    tp: int

    @property
    def sms(self) -> int:
        """SMs of the chip."""
        if self.arch not in SMS:
            raise VariantError(f"arch {self.arch!r} has no SM count; use one of {', '.join(SMS)}")
        return SMS[self.arch]


@dataclass(frozen=True)
class Output:
    """A tensor that a step must produce, in the memory of one rank.

    tensor: the one the kernel was given. expected: what the reference says, of the same form.
    tolerance: from `kernels.common.tolerances`, by dtype and reduction length.
    """

    name: str
    rank: int
    tensor: torch.Tensor
    expected: torch.Tensor
    tolerance: Tolerance


# What must hold after a step: returns "" where it does, else one line that says what does not.
Invariant = Callable[[], str]


@dataclass(frozen=True)
class Step:
    """One call of the op: launches in stream order, what they must produce, what must hold after.

    invariants: for example that a mailbox is armed again, by name.
    """

    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]
    invariants: Mapping[str, Invariant] = field(default_factory=dict)


# From (what the step produced, what another step would produce) to a wrong result of that form.
Mutation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(result: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Every row one further, and so every element where there is one row."""
    several = result.dim() > 1 and result.shape[0] > 1
    return result.roll(1, 0 if several else -1)


def scaled(result: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Off by a hundredth; integers by one."""
    if not result.is_floating_point():
        return result + 1
    return (result.double() * 1.01).to(result.dtype)


def stale(_: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The result of another step, as where nothing was written."""
    return other.clone()


def row_missing(result: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The last row all zeros."""
    wrong = result.clone()
    wrong[-1] = 0
    return wrong


GARBAGE: Mapping[str, Mutation] = MappingProxyType(
    {"shifted rows": shifted, "times 1.01": scaled, "stale": stale, "row missing": row_missing}
)


@dataclass(frozen=True)
class Case:
    """One kernel, or the kernels of one op, at one size.

    op, name: for people.
    step: makes a step from a seed, with new tensors each time; equal seeds give equal steps.
    protocol: the same for the random schedules, where fewer CTAs may show as much; None: `step`.
    small: the same scaled down for the race checker, which keeps a clock for every warp; None:
    `step`, where it is small already.
    waits: CTAs wait for each other, so all grids of a step must fit the chip at once.
    max_registers: more a thread fail the check.
    garbage: wrong results that must be refused.
    """

    op: str
    name: str
    step: Callable[[int], Step]
    protocol: Callable[[int], Step] | None = None
    small: Callable[[int], Step] | None = None
    waits: bool = False
    max_registers: int = 255
    garbage: Mapping[str, Mutation] = field(default_factory=lambda: GARBAGE)

"""Kernels by hand with known faults, as built ones: no DSL is needed to test the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.resources import Resources
from k3fuse.kernels.build.variant import Parameter, Plan, Variant
from k3fuse.kernels.check import Case, CheckTarget, Launch, Output, Step
from k3fuse.kernels.common.tolerances import EXACT, tolerance
from k3fuse.kernels.simulator import Fresh, Owned

GB300 = CheckTarget("gb300:tp8", "sm_103a", 8)
HEAD = ".version 8.8\n.target sm_103a\n.address_size 64\n"


def built(
    name: str,
    body: str,
    parameters: str,
    *,
    ctas: int = 1,
    resources: tuple[int, int] = (32, 0),
    block: int = 32,
    **plan: Any,
) -> Built:
    """A kernel with pointer parameters: `%pN` holds the Nth, `%t` the thread, `%b4` 4 x thread.

    resources: registers and spilled bytes to claim.
    """
    names = parameters.split()
    declared = ", ".join(f".param .u64 {n}" for n in names)
    loads = "\n".join(f"ld.param.u64 %p{i}, [{n}];" for i, n in enumerate(names))
    text = f"""{HEAD}.visible .entry {name}({declared}) .reqntid {block}, 1, 1
{{
  .reg .pred %q<4>;
  .reg .b32 %t, %c, %r<16>;
  .reg .f32 %f<16>;
  .reg .b64 %b4, %p<16>, %d<16>;
  {loads}
  mov.u32 %t, %tid.x;
  mov.u32 %c, %ctaid.x;
  mad.lo.u32 %r15, %c, {block}, %t;
  mul.wide.u32 %b4, %r15, 4;
{body}
  ret;
}}
"""
    stated = Plan(
        (ctas, 1, 1), (block, 1, 1), (1, 1, 1), 0,
        tuple(Parameter(n, "pointer") for n in names), **plan,
    )  # fmt: skip
    registers, spills = resources
    variant = Variant("by_hand", name, "sm_103a", (), ())
    return Built(variant, stated, text, b"", name, Resources(registers, spills, 0, 0))


DOUBLE = """
  add.s64 %d0, %p0, %b4;
  add.s64 %d1, %p1, %b4;
  ld.global.f32 %f0, [%d0];
  add.f32 %f1, %f0, %f0;
  st.global.f32 [%d1], %f1;
"""


def double(change: tuple[str, str] = ("", ""), **options: Any) -> Built:
    """y = 2 x in FP32, one element a thread; `change` replaces text of the body."""
    assert change[0] in DOUBLE
    return built("double", DOUBLE.replace(*change) if change[0] else DOUBLE, "x y", **options)


def double_step(kernel: Built, seed: int, ctas: int = 1) -> Step:
    x = torch.randn(ctas, 32, generator=torch.Generator().manual_seed(seed))
    y = torch.empty(ctas, 32)
    launch = Launch(kernel, [{"x": x, "y": Fresh(y)}], {"x": x.nbytes, "y": y.nbytes})
    return Step((launch,), (Output("y", 0, y, 2 * x, tolerance(y.dtype, 1)),))


def double_case(kernel: Built | None = None, **options: Any) -> Case:
    chosen = kernel or double(ctas=4)
    return Case("by_hand", "double", lambda s: double_step(chosen, s, chosen.plan.ctas), **options)


# Two ranks: each stores its row in the other's inbox, raises a flag there, waits for its own flag,
# adds the rows, and lowers the flag again. Two warps, so that a missing barrier shows.
EXCHANGE = """
  add.s64 %d0, %p0, %b4;
  ld.global.f32 %f0, [%d0];
  add.s64 %d1, %p2, %b4;
  st.global.f32 [%d1], %f0;
  bar.sync 0;
  setp.ne.u32 %q0, %t, 0;
  @%q0 bra JOIN;
  mov.u32 %r0, 1;
  st.release.sys.global.u32 [%p4], %r0;
POLL:
  ld.acquire.sys.global.u32 %r1, [%p3];
  setp.ne.u32 %q1, %r1, 1;
  @%q1 bra POLL;
  mov.u32 %r2, 0;
  st.relaxed.sys.global.u32 [%p3], %r2;
JOIN:
  bar.sync 0;
  add.s64 %d2, %p1, %b4;
  ld.global.f32 %f1, [%d2];
  add.f32 %f2, %f0, %f1;
  add.s64 %d3, %p5, %b4;
  st.global.f32 [%d3], %f2;
"""
EXCHANGE_NAMES = "x inbox peer_inbox flag peer_flag y"
FIRST_BARRIER = "[%d1], %f0;\n  bar.sync 0;", "[%d1], %f0;"
SECOND_BARRIER = "JOIN:\n  bar.sync 0;", "JOIN:"
NO_RELEASE = "st.release.sys", "st.relaxed.sys"
NO_ACQUIRE = "ld.acquire.sys", "ld.relaxed.sys"
WRONG_SCOPE = "st.release.sys", "st.release.gpu"
NO_REARM = "st.relaxed.sys.global.u32 [%p3], %r2;", ""
NEVER_RAISED = "st.release.sys.global.u32 [%p4], %r0;", ""


def exchange(change: tuple[str, str] = ("", "")) -> Built:
    assert change[0] in EXCHANGE
    body = EXCHANGE.replace(*change) if change[0] else EXCHANGE
    return built("exchange", body, EXCHANGE_NAMES, block=64)


def exchange_step(kernel: Built, seed: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(64, generator=generator) for _ in range(2)]
    inbox = [torch.empty(64) for _ in range(2)]
    flag = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    y = [torch.empty(64) for _ in range(2)]
    ranks = [
        {
            "x": x[r], "inbox": Fresh(inbox[r]), "peer_inbox": Owned(inbox[1 - r], 1 - r),
            "flag": flag[r], "peer_flag": Owned(flag[1 - r], 1 - r), "y": Fresh(y[r]),
        }
        for r in range(2)
    ]  # fmt: skip
    outputs = tuple(Output("y", r, y[r], x[0] + x[1], EXACT) for r in range(2))

    def armed() -> str:
        left = [r for r in range(2) if flag[r].item()]
        return f"the flag of rank {left[0]} is still up" if left else ""

    return Step((Launch(kernel, ranks),), outputs, {"flags are down": armed})


def exchange_case(change: tuple[str, str] = ("", "")) -> Case:
    kernel = exchange(change)
    make: Callable[[int], Step] = lambda seed: exchange_step(kernel, seed)  # noqa: E731
    return Case("by_hand", "exchange", make, waits=True)

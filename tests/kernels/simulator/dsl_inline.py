"""Inline PTX that CuTe DSL compiles for sm_103a: what it has no spelling for, seen by ptxas."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from dsl_tensor import Compiled, compiled, matrix


@dsl_user_op
def assembly(code: str, pointers: Any, shared: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Inline PTX: `$0`, `$1` ... are the addresses of global tensors, the last is shared memory."""
    places = [Int64(pointer.toint(loc=loc, ip=ip)) for pointer in pointers]
    values = [place.ir_value(loc=loc, ip=ip) for place in places]
    values.append(Int32(shared.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip))
    constraints = ",".join(["l"] * len(pointers) + ["r", "~{memory}"])
    llvm.inline_asm(None, values, code, constraints, has_side_effects=True, loc=loc, ip=ip)


class Inline:
    """`count` pointers, `shared` bytes of shared memory (aligned to 1024), one body of PTX."""

    def __init__(self, code: str, shared: int, threads: int, grid: int, cluster: int) -> None:
        self.code, self.shared = code, shared
        self.threads, self.grid, self.cluster = threads, grid, cluster

    @cute.jit
    def one(self, a: cute.Tensor, stream: CUstream):
        self.kernel([a]).launch(
            grid=[self.grid, 1, 1], block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def two(self, a: cute.Tensor, b: cute.Tensor, stream: CUstream):
        self.kernel([a, b]).launch(
            grid=[self.grid, 1, 1], block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.jit
    def three(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: CUstream):
        self.kernel([a, b, c]).launch(
            grid=[self.grid, 1, 1], block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: list):
        held = utils.SmemAllocator().allocate_array(Uint8, self.shared, byte_alignment=1024)
        assembly(self.code, [tensor.iterator for tensor in tensors], held)


_REGISTERS = """
.reg .pred p, q, first;
.reg .b16 h<4>;
.reg .b32 r<160>, s, tid, cta, lane;
.reg .b64 d<16>, in, out, more;
"""
_HEAD = """
mov.u32 tid, %tid.x;
mov.u32 cta, %ctaid.x;
and.b32 lane, tid, 31;
setp.eq.u32 first, tid, 0;
"""


@lru_cache(maxsize=64)
def inline(
    body: str, pointers: int, shared: int = 1024, threads: int = 32, grid: int = 1,
    cluster: int = 1,
) -> Compiled:  # fmt: skip
    """Compile a body that may use `in`, `out`, `more` (pointers), `s` (shared memory), `tid`,
    `cta`, `lane`, `first` (thread 0), and the registers `p`, `q`, `h0..3`, `r0..159`, `d0..15`."""
    names = ["in", "out", "more"][:pointers]
    moves = [f"mov.u64 {name}, ${place};" for place, name in enumerate(names)]
    code = "\n".join(["{", _REGISTERS, *moves, f"mov.u32 s, ${pointers};", _HEAD, body, "}"])
    kernel = Inline(code, shared, threads, grid, cluster)
    call = (kernel.one, kernel.two, kernel.three)[pointers - 1]
    return compiled(call, *[matrix(Uint8, 16, 1024) for _ in names])


WAIT = """
{label}:
mbarrier.try_wait.parity.shared::cta.b64 q, [{place}], {phase};
@!q bra {label};
"""


def wait(place: str = "s", phase: int = 0, label: str = "WAIT") -> str:
    """Poll an mbarrier until a phase is complete."""
    return WAIT.format(place=place, phase=phase, label=label)


INIT = """
@first mbarrier.init.shared::cta.b64 [s], 1;
@first fence.mbarrier_init.release.cluster;
bar.sync 0;
"""

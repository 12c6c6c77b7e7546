"""CuTe DSL kernels with one switch each that plants a fault; the default is correct."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

CTAS = 4
THREADS = 64
EMPTY = -1


def _address(pointer: Any, **at: Any) -> Any:
    return pointer.toint(**at).ir_value(**at)


@dsl_user_op
def publish(pointer: Any, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Store four int32 at a multicast address."""
    operands = [_address(pointer, loc=loc, ip=ip)]
    operands += [Int32(word).ir_value(loc=loc, ip=ip) for word in words]
    code = "multimem.st.relaxed.sys.global.v4.f32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(
        None, operands, code, "l,r,r,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip
    )


@dsl_user_op
def look(pointer: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Load four int32 that others may be storing."""
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [_address(pointer, loc=loc, ip=ip)],
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(4)]


class Produce:
    """x[i] += 1; triggers its dependents at once. `waits`: as a dependent itself."""

    def __init__(self, waits: bool = False, trigger_first: bool = False) -> None:
        self.waits, self.trigger_first = waits, trigger_first

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: CUstream):
        self.produce(x).launch(
            grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def produce(self, x: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(not self.waits or self.trigger_first):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.waits):
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(not self.trigger_first):
                cute.arch.griddepcontrol_launch_dependents()
        place = bid * THREADS + tid
        x[place] = x[place] + Float32(1)


class Consume:
    """y[i] = 2 x[i] + w[i]; w, which no kernel writes, may be read before the wait, x may not."""

    def __init__(self, early: bool = False) -> None:
        self.early = early

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.consume(x, w, y).launch(
            grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def consume(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        place = bid * THREADS + tid
        weight = w[place]
        value = Float32(0)
        if cutlass.const_expr(self.early):
            value = x[place]
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not self.early):
            value = x[place]
        y[place] = value * 2 + weight


class GridBarrier:
    """y[cta] = the number of CTAs that arrived before any of them went on."""

    def __init__(self, ctas: int) -> None:
        self.ctas = ctas

    @cute.jit
    def __call__(self, count: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.grid_barrier(count, y).launch(
            grid=[self.ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def grid_barrier(self, count: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        if tid == 0:
            cute.arch.atomic_add(count.iterator, Int32(1), sem="release", scope="gpu")
            seen = Int32(0)
            while seen < self.ctas:
                seen = cute.arch.load(count.iterator, Int32, sem="acquire", scope="gpu")
            y[bid] = seen


class Mailbox:
    """sums[sender, i] = the words of fragment i of every rank, polled in the own mailbox.

    Every rank broadcasts `THREADS` fragments of four words; a word is there when it is not EMPTY.
    `tested`: how many of the four words the poll looks at.
    """

    def __init__(self, ranks: int, tested: int = 4) -> None:
        self.ranks, self.tested = ranks, tested

    @cute.jit
    def __call__(
        self, every: cute.Tensor, own: cute.Tensor, sums: cute.Tensor, rank: Int32, stream: CUstream
    ):
        self.mailbox(every, own, sums, rank).launch(
            grid=[self.ranks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def mailbox(self, every: cute.Tensor, own: cute.Tensor, sums: cute.Tensor, rank: Int32):
        tid, _, _ = cute.arch.thread_idx()
        sender, _, _ = cute.arch.block_idx()
        if sender == 0:
            first = rank * 1000 + tid * 4
            target = every.iterator + (rank * THREADS + tid) * 4
            publish(target, [first, first + 1, first + 2, first + 3])
        source = own.iterator + (sender * THREADS + tid) * 4
        words = look(source)
        missing = words[0] == EMPTY
        if cutlass.const_expr(self.tested == 4):
            missing = (
                (words[0] == EMPTY) | (words[1] == EMPTY)
                | (words[2] == EMPTY) | (words[3] == EMPTY)
            )  # fmt: skip
        while missing:
            words = look(source)
            missing = words[0] == EMPTY
            if cutlass.const_expr(self.tested == 4):
                missing = (
                    (words[0] == EMPTY) | (words[1] == EMPTY)
                    | (words[2] == EMPTY) | (words[3] == EMPTY)
                )  # fmt: skip
        sums[sender * THREADS + tid] = words[0] + words[1] + words[2] + words[3]


class RowSums:
    """y[row] = the sum of a row of x, one CTA a row; warps leave partial sums in shared memory.

    `writers`: how many of the warps leave theirs. `shift`: rows that the reads are off by.
    """

    WARPS = THREADS // 32

    def __init__(self, writers: int = WARPS, shift: int = 0) -> None:
        self.writers, self.shift = writers, shift

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.row_sums(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def row_sums(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        lane, warp = tid % 32, tid // 32
        partial = utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.WARPS), 16)
        value = x[row + self.shift, tid]
        for step in cutlass.range_constexpr(5):
            value += cute.arch.shuffle_sync_bfly(value, 16 >> step)
        if lane == 0:  # noqa: SIM102 (the second is decided at compile time)
            if warp < self.writers:
                partial[warp] = value
        cute.arch.sync_threads()
        if tid == 0:
            total = Float32(0)
            for i in cutlass.range_constexpr(self.WARPS):
                total += partial[i]
            y[row] = total

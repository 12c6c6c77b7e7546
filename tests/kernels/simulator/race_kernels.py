"""CuTe DSL kernels with one planted race each, and the controls without it."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def ptx(code: str, *operands: Any, loc: Any = None, ip: Any = None) -> None:
    """Inline PTX on pointers (shared ones as 32 bits, global ones as 64) and 32-bit integers."""
    values, kinds = [], []
    for operand in operands:
        if isinstance(operand, cute.Pointer):
            wide = operand.memspace == cute.AddressSpace.gmem
            address = operand.toint(loc=loc, ip=ip)
            operand = Int64(address) if wide else Int32(address)
            kinds.append("l" if wide else "r")
        else:
            kinds.append("r")
        values.append(operand.ir_value(loc=loc, ip=ip))
    constraints = ",".join([*kinds, "~{memory}"])
    llvm.inline_asm(None, values, code, constraints, has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def volatile_load(pointer: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A weak load that the compiler leaves in its loop."""
    address = Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    return Int32(
        llvm.inline_asm(
            T.i32(), [address], "ld.global.b32 $0, [$1];", "=r,l,~{memory}",
            has_side_effects=True, loc=loc, ip=ip,
        )
    )  # fmt: skip


class Message:
    """Rank 0 stores 9 and then a flag into the memory of rank 1, which polls it and copies the 9.

    `send` and `receive` are "relaxed", or "release" and "acquire"; `fences` puts fence.acq_rel
    around them; `count` uses an atomic addition for the flag.
    """

    def __init__(
        self,
        send: str = "release",
        receive: str = "acquire",
        scope: str = "sys",
        fences: str = "",
        count: bool = False,
    ) -> None:
        self.send, self.receive, self.scope, self.fences = send, receive, scope, fences
        self.count = count

    @cute.jit
    def __call__(
        self, data: cute.Tensor, flag: cute.Tensor, out: cute.Tensor, rank: Int32, stream: CUstream
    ):
        self.kernel(data, flag, out, rank).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Tensor, flag: cute.Tensor, out: cute.Tensor, rank: Int32):
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            if rank == 0:
                data[0] = Int32(9)
                if cutlass.const_expr("send" in self.fences):
                    cute.arch.fence_acq_rel_sys()
                if cutlass.const_expr(self.count):
                    cute.arch.atomic_add(flag.iterator, Int32(1), sem=self.send, scope=self.scope)
                else:
                    cute.arch.store(flag.iterator, Int32(1), sem=self.send, scope=self.scope)
            else:
                seen = Int32(0)
                while seen == 0:
                    seen = cute.arch.load(flag.iterator, Int32, sem=self.receive, scope=self.scope)
                if cutlass.const_expr("receive" in self.fences):
                    cute.arch.fence_acq_rel_sys()
                out[0] = data[0]


class Sentinel:
    """Rank 0 stores a value into the memory of rank 1, which polls that word: no flag at all."""

    def __init__(self, scope: str = "sys", weak: bool = False) -> None:
        self.scope, self.weak = scope, weak

    @cute.jit
    def __call__(self, box: cute.Tensor, out: cute.Tensor, rank: Int32, stream: CUstream):
        self.kernel(box, out, rank).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, box: cute.Tensor, out: cute.Tensor, rank: Int32):
        tid, _, _ = cute.arch.thread_idx()
        if rank == 0:
            cute.arch.store(box.iterator + tid, tid + 1, sem="relaxed", scope=self.scope)
        else:
            seen = Int32(0)
            while seen == 0:
                if cutlass.const_expr(self.weak):
                    seen = volatile_load(box.iterator + tid)
                else:
                    seen = cute.arch.load(
                        box.iterator + tid, Int32, sem="relaxed", scope=self.scope
                    )
            out[tid] = seen


class Neighbours:
    """Every thread leaves its number in shared memory and reads that of the thread `far` on."""

    def __init__(self, far: int, barrier: bool = True, only_leader_waits: bool = False) -> None:
        self.far, self.barrier, self.only_leader_waits = far, barrier, only_leader_waits

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: CUstream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        smem = utils.SmemAllocator()
        box = smem.allocate_tensor(Int32, cute.make_layout(64), 16)
        box[tid] = tid
        if cutlass.const_expr(self.barrier):
            if cutlass.const_expr(self.far < 32):
                cute.arch.sync_warp()
            else:
                cute.arch.sync_threads()
        out[tid] = box[tid ^ self.far]


class LeaderWaits:
    """Warp 0 fills shared memory and signals an mbarrier; only lane 0 of warp 1 waits for it."""

    def __init__(self, sync: bool = True) -> None:
        self.sync = sync

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: CUstream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        smem = utils.SmemAllocator()
        full = smem.allocate_array(Int64, 1)
        box = smem.allocate_tensor(Int32, cute.make_layout(64), 16)
        box[tid] = Int32(0)
        if tid == 0:
            cute.arch.mbarrier_init(full, 32)
        cute.arch.sync_threads()
        if tid < 32:
            box[tid] = tid
            cute.arch.mbarrier_arrive(full)
        else:
            if tid == 32:
                cute.arch.mbarrier_wait(full, 0)
            if cutlass.const_expr(self.sync):
                cute.arch.sync_warp()
            out[tid - 32] = box[tid - 32]


class PeerSignal:
    """CTA 1 of a cluster writes into CTA 0 and arrives at its mbarrier; CTA 0 waits and reads."""

    def __init__(self, start: str = "barrier", scope: str = "cluster") -> None:
        self.start, self.scope = start, scope

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: CUstream):
        self.kernel(out).launch(grid=[2, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = utils.SmemAllocator()
        ready = smem.allocate_array(Int64, 1)
        box = smem.allocate_tensor(Int32, cute.make_layout(32), 16)
        if tid == 0:
            cute.arch.mbarrier_init(ready, 32)
            if cutlass.const_expr(self.start != "unfenced"):
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.start == "barrier"):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif cutlass.const_expr(self.start in ("relaxed", "unfenced")):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if bid == 1:
            ptx(
                "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, 0;"
                " st.shared::cluster.u32 [there], $2;"
                " mapa.shared::cluster.u32 there, $1, 0;"
                " mbarrier.arrive.release." + self.scope + ".shared::cluster.b64 _, [there]; }",
                box.iterator + tid, ready, tid + 5,
            )  # fmt: skip
        else:
            ptx(
                "{ .reg .pred p; AGAIN%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
                " p, [$0], 0; @!p bra AGAIN%=; }".replace("%=", "${:uid}"),
                ready,
            )
            out[tid] = box[tid]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class BulkOnce:
    """One bulk copy of 512 bytes into shared memory, awaited as `expect` bytes, and out again."""

    def __init__(self, expect: int = 512, wait: bool = True, init_fence: bool = True) -> None:
        self.expect, self.wait, self.init_fence = expect, wait, init_fence

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(source, out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        smem = utils.SmemAllocator()
        full = smem.allocate_array(Int64, 1)
        box = smem.allocate_tensor(Float32, cute.make_layout(128), 128)
        if tid == 0:
            cute.arch.mbarrier_init(full, 1)
            if cutlass.const_expr(self.init_fence):
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.expect)
            atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), Float32)
            whole = cute.make_layout(128)
            cute.copy(
                atom, cute.make_tensor(source.iterator.align(16), whole),
                cute.make_tensor(box.iterator, whole), mbar_ptr=full,
            )  # fmt: skip
        if cutlass.const_expr(self.wait):
            cute.arch.mbarrier_wait(full, 0)
        out[tid] = box[tid]
        out[tid + 64] = box[tid + 64]


class BulkOut:
    """Threads fill shared memory; one of them stores it to global memory with a bulk copy."""

    def __init__(self, fence: str = "writers", wait: bool = True) -> None:
        self.fence, self.wait = fence, wait

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: CUstream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        smem = utils.SmemAllocator()
        box = smem.allocate_tensor(Int32, cute.make_layout(64), 128)
        box[tid] = tid
        if cutlass.const_expr(self.fence == "writers"):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if tid == 0:
            if cutlass.const_expr(self.fence == "reader"):
                cute.arch.fence_proxy("async.shared", space="cta")
            ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], 256;"
                " cp.async.bulk.commit_group;", out.iterator, box.iterator,
            )  # fmt: skip
            if cutlass.const_expr(self.wait):
                cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_threads()
        box[tid] = Int32(7)


class Produce:
    """x[i] += 1, after letting its dependents start."""

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: CUstream):
        self.kernel(x).launch(grid=[2, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        place = bid * 32 + tid
        x[place] = x[place] + 1


class Consume:
    """out[i] = x[i + 1], read before or after the wait for the launch before."""

    def __init__(self, early: bool = False) -> None:
        self.early = early

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(x, out).launch(grid=[2, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        place = bid * 32 + tid
        if cutlass.const_expr(self.early):
            value = x[place]
            cute.arch.griddepcontrol_wait()
        else:
            cute.arch.griddepcontrol_wait()
            value = x[place]
        out[place] = value


class ElementCopy:
    """cp.async into shared memory and out again, by the same thread."""

    def __init__(self, wait: bool = True) -> None:
        self.wait = wait

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(source, out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        smem = utils.SmemAllocator()
        box = smem.allocate_tensor(Int32, cute.make_layout(64), 16)
        box[tid] = Int32(0)
        ptx(
            "cp.async.ca.shared.global [$0], [$1], 4;",
            box.iterator + tid, source.iterator + tid,
        )  # fmt: skip
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.wait):
            cute.arch.cp_async_wait_group(0)
        out[tid] = box[tid]

"""Device code of `cluster_builder`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, memory
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op


def arguments(size: int) -> tuple[Any, ...]:
    def row() -> Any:
        return make_fake_tensor(Float32, (64 * size,), (1,), assumed_align=16)

    return row(), row(), Int32(1), make_fake_stream()


@dsl_user_op
def load_from_peer(pointer: Any, rank: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The float at the same shared address in CTA `rank` of the cluster."""
    code = (
        "{ .reg .b32 far; mapa.shared::cluster.u32 far, $1, $2; ld.shared::cluster.f32 $0, [far]; }"
    )
    address = Int32(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    operands = [address, rank.ir_value(loc=loc, ip=ip)]
    return Float32(
        llvm.inline_asm(
            T.f32(), operands, code, "=f,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip
        )
    )


class ClusterSum:
    def __init__(self, size: int) -> None:
        self.size = size

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: Int32, stream: CUstream) -> None:
        self.cluster_sum(x, y, factor).launch(
            grid=[2 * self.size, 1, 1], block=[32, 1, 1], cluster=[self.size, 1, 1], stream=stream
        )

    @cute.kernel
    def cluster_sum(self, x: cute.Tensor, y: cute.Tensor, factor: Int32) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        own = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(32), 16)
        own[tid] = x[cta * 32 + tid]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        value = Float32(0.0)
        for peer in cutlass.range_constexpr(self.size):
            value += load_from_peer(own.iterator + tid, Int32(peer))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        y[cta * 32 + tid] = value * factor.to(Float32)

"""Device code of AttnRes where it stands alone. Imports the DSL: only `trace` loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, memory

from k3fuse.kernels.attn_res.config import Config
from k3fuse.kernels.attn_res.plan import PART, Shared
from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.residual import Form, Residual
from k3fuse.kernels.common.device.stream import Stream, bytes_of
from k3fuse.kernels.common.geometry import (
    CLUSTER,
    COLUMNS,
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    residual_bytes,
)


class AttnRes:
    """One grid: a cluster of seven CTAs a token or two, four warps each, eight columns a thread."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self.config, self.shared = config, shared

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.attn_res(addresses, sizes).launch(
            grid=[CLUSTER * self.config.clusters, 1, 1],
            block=[CONSUMER_THREADS * self.config.tokens, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attn_res(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then sources, mix, norm."""
        config, shared = self.config, self.shared
        named = {
            **dict(zip(config.pointers, addresses, strict=False)),
            **dict(zip(config.sizes, sizes, strict=True)),
        }
        given = SimpleNamespace(blocks=list(addresses[len(config.pointers) :]), **named)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(shared.total)
        base = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
        base = base.iterator.toint()
        warp = cute.arch.make_warp_uniform(tid // 32)
        first, place = cta // CLUSTER * config.tokens, cta % CLUSTER
        if cutlass.const_expr(config.tokens > 1):
            which = warp // CONSUMER_WARPS
            token, thread, warp = first + which, tid % CONSUMER_THREADS, warp % CONSUMER_WARPS
            mine = base + which * Int32(residual_bytes(config.blocks))
        else:
            token, thread, mine = first, tid, base
        form = Form(config.blocks, config.norm, config.round_mix, packed=config.packed)
        row = Residual(form, mine, tid % 32, warp, place, given.eps, given.out_eps)
        if token < given.m:
            if thread == 0:
                Residual.arm(row)
            if tid == 0:
                self.fetch_vectors(given, base, place)
            if warp == 1:
                Residual.prepare(row)
        # The threads of a token that is not there arrive as well: there is one barrier a cluster.
        ptx.cluster_arrive()
        if token < given.m:
            column = (place * Int32(CONSUMER_THREADS) + thread) * Int32(COLUMNS)
            stream = Stream(form, config.delta, given, token, column, not shared.shares)
            ptx.wait_for_predecessor()
            ptx.allow_successor()
            Stream.load(stream)
            name = "delta" if config.delta else "prefix"
            pitch = getattr(given, f"{name}_pitch")
            address = getattr(given, name) + bytes_of(token * pitch) + bytes_of(column)
            words = list(ptx.load16(address))
            ptx.cluster_wait()
            if cutlass.const_expr(shared.shares):
                ptx.barrier_wait(base + Int32(shared.there), 0)
                part = base + Int32(shared.vectors) + thread * Int32(2 * COLUMNS)
                vectors = [ptx.shared_load16(part, i * PART) for i in range(len(config.vectors))]
                Stream.weigh(stream, vectors)
            Stream.mix(stream, row)
            Stream.finish(stream, row, words, config.delta)

    @cute.jit
    def fetch_vectors(self, given: cutlass.Constexpr, base: Int32, place: Int32) -> None:
        """Copy the CTA's columns of the weight vectors, where tokens share them; one thread."""
        shared = self.shared
        if cutlass.const_expr(shared.shares):
            barrier = base + Int32(shared.there)
            ptx.barrier_init(barrier, 1)
            ptx.barrier_init_fence()
            ptx.barrier_expect(barrier, shared.vector_bytes)
            for i in cutlass.range_constexpr(len(self.config.vectors)):
                ptx.bulk_load(
                    base + Int32(shared.vectors + i * PART),
                    getattr(given, self.config.vectors[i]) + place.to(Int64) * Int64(PART),
                    PART, barrier,
                )  # fmt: skip

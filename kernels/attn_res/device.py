"""Device code of AttnRes where it stands alone. Imports the DSL: only `trace` loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, memory
from cutlass.cute.runtime import make_fake_stream

from k3fuse.kernels.attn_res.config import Config
from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.device.residual import Form, Residual
from k3fuse.kernels.common.device.stream import Stream, bytes_of
from k3fuse.kernels.common.geometry import (
    CLUSTER,
    COLUMNS,
    CONSUMER_THREADS,
    residual_bytes,
)


def arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for the parameters and a stream."""
    return (
        tuple(Int64(0) for _ in config.addresses),
        tuple(Int32(0) for _ in config.sizes),
        make_fake_stream(),
    )


class AttnRes:
    """One grid: a cluster of seven CTAs a token, eight columns a thread."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.attn_res(addresses, sizes).launch(
            grid=[CLUSTER * self.config.m, 1, 1],
            block=[CONSUMER_THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attn_res(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then sources, mix, norm."""
        config = self.config
        named = {
            **dict(zip(config.pointers, addresses, strict=False)),
            **dict(zip(config.sizes, sizes, strict=True)),
        }
        given = SimpleNamespace(blocks=list(addresses[len(config.pointers) :]), **named)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(residual_bytes(config.blocks))
        base = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
        base = base.iterator.toint()
        warp = cute.arch.make_warp_uniform(tid // 32)
        token, place = cta // CLUSTER, cta % CLUSTER
        if token < given.m:
            form = Form(config.blocks, config.norm, config.round_mix, packed=config.packed)
            row = Residual(form, base, tid % 32, warp, place, given.eps, given.out_eps)
            if tid == 0:
                Residual.arm(row)
            if warp == 1:
                Residual.prepare(row)
            ptx.cluster_arrive()
            column = (place * Int32(CONSUMER_THREADS) + tid) * Int32(COLUMNS)
            stream = Stream(form, config.delta, given, token, column)
            ptx.wait_for_predecessor()
            ptx.allow_successor()
            Stream.load(stream)
            name = "delta" if config.delta else "prefix"
            pitch = getattr(given, f"{name}_pitch")
            address = getattr(given, name) + bytes_of(token * pitch) + bytes_of(column)
            words = list(ptx.load16(address))
            ptx.cluster_wait()
            Stream.mix(stream, row)
            Stream.finish(stream, row, words, config.delta)
        else:
            ptx.wait_for_predecessor()

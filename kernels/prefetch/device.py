"""Device code of the L2 prefetch. Imports the DSL: only the builder's `trace` loads it."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.prefetch.builder import CHUNK, THREADS


class Prefetch:
    """Each lane requests chunks; the lanes of the grid take neighbouring ones."""

    def __init__(self, ctas: int) -> None:
        self.ctas = ctas

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.l2_prefetch(addresses, sizes).launch(
            grid=[self.ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def l2_prefetch(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights are nobody's output, so nothing waits for the predecessor but the end.

        The end does: whoever waits for this grid must find what came before it done as well.
        """
        lane, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if lane == 0:
            ptx.allow_successor()
        for i in cutlass.range_constexpr(len(addresses)):
            start = (cta * Int32(THREADS) + lane) * Int32(CHUNK)
            while start < sizes[i]:
                size = ptx.least(sizes[i] - start, CHUNK)
                ptx.prefetch(addresses[i] + start.to(Int64), size)
                start += self.ctas * THREADS * CHUNK
        ptx.wait_for_predecessor()

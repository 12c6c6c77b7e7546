"""Device code of the shared expert's gate and up. Imports the DSL: only `trace` loads it.

The work and the order of summation are those of `common/device/gemm.py`. A CTA that owns four rows
of a tile has gate and up of two columns of the hidden row.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import gemm, ptx
from k3fuse.kernels.common.device.situ import situ
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.gemm import ELEMENT, OWNED, Geometry
from k3fuse.kernels.experts.gate_up import ADDRESSES, SIZES


class GateUp(gemm.Gemm):
    """One grid: rows of gate and up, and what becomes of their sums."""

    def __init__(self, geometry: Geometry, width: int) -> None:
        super().__init__(geometry)
        self.width = width

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        geometry = self.geometry
        self.shared_gate_up(addresses, sizes).launch(
            grid=[geometry.ctas, 1, 1],
            block=[32 * geometry.warps, 1, 1],
            cluster=[geometry.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def shared_gate_up(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, SiTU."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = gemm.shared_memory(self.geometry.shared)
        given = SimpleNamespace(
            **dict(zip(ADDRESSES, addresses, strict=True)),
            **dict(zip(SIZES, sizes, strict=True)),
        )
        self.run(given, base, cta, tid)

    def tile(self, given: Any, tile: Any, start: Any, lane: Any) -> Any:
        """Two rows of gate and the same two of up; `row` counts gate and up, in pairs of two."""
        pitch = self.geometry.k * ELEMENT
        row = gemm.first_row(tile, 0)
        place = (row + (lane >> Int32(2)) * Int32(OWNED)) >> Int32(1)
        offset = place.to(Int64) * Int64(pitch) + bytes_of(start)
        lines = [
            weight + offset + Int64(i * pitch)
            for weight in (given.gate, given.up)
            for i in range(OWNED // 2)
        ]
        return SimpleNamespace(lines=lines, row=row, rows=Int32(2 * self.width))

    def store(self, given: Any, tile: Any, token: Any, row: Any, total: list[Any]) -> None:
        """SiTU of gates and ups of two columns, each rounded to BF16 first."""
        rounded = ptx.unpack(ptx.pack(total))
        betas = ptx.as_f32(given.beta), ptx.as_f32(given.linear_beta)
        values = [situ(rounded[i], rounded[i + 2], *betas) for i in range(2)]
        place = token * Int32(self.width) + (row >> Int32(1))
        ptx.store4(given.hidden + bytes_of(place), ptx.pack(values)[0])

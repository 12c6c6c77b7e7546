"""Device code of the attention projection. Imports the DSL: only the builder's `trace` loads it.

The work and the order of summation are those of `common/device/gemm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from k3fuse.kernels.attention_projection.config import Config
from k3fuse.kernels.common.device import gemm, ptx
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.gemm import ELEMENT, OWNED


def of_tile(number: Any, firsts: Sequence[int], by_weight: Mapping[str, Sequence[Any]]) -> Any:
    """What a tile has of its weight: each list's value, and the weight's first tile.

    number: of the tile. firsts: each weight's first tile, then the number of tiles.
    """
    lists = {**by_weight, "first": [Int32(n) for n in firsts[:-1]]}
    found = {name: values[0] for name, values in lists.items()}
    for i in range(1, len(firsts) - 1):
        here = number >= Int32(firsts[i])
        # One list of two names is chosen from once.
        chosen = {id(values): ptx.select(here, values[i], found[n]) for n, values in lists.items()}
        found = {name: chosen[id(values)] for name, values in lists.items()}
    return SimpleNamespace(number=number, **found)


class Gemm(gemm.Gemm):
    """One grid for all weights of a row; a tile lies in one weight."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.geometry)
        self.config = config

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        geometry = self.geometry
        self.attention_projection(addresses, sizes).launch(
            grid=[geometry.ctas, 1, 1],
            block=[32 * geometry.warps, 1, 1],
            cluster=[geometry.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attention_projection(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, output."""
        config = self.config
        count = len(config.rows)
        given = SimpleNamespace(
            x=addresses[0],
            weights=list(addresses[1 : 1 + count]),
            outs=list(addresses[1 + count :]),
            **dict(zip(config.sizes, sizes, strict=True)),
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = gemm.shared_memory(self.geometry.shared)
        self.run(given, base, cta, tid)

    def by_weight(self, given: Any) -> dict[str, list[Any]]:
        """What a tile has of its weight, by name; `width`: elements of a row of the output."""
        rows = [Int32(n) for n in self.config.rows]
        return {"weight": given.weights, "out": given.outs, "rows": rows, "width": rows}

    def tile(self, given: Any, tile: Any, start: Any, lane: Any) -> Any:
        """Weight and output of a tile."""
        config = self.config
        found = of_tile(tile, config.firsts, self.by_weight(given))
        found.row = gemm.first_row(tile, found.first)
        found.lines = gemm.matrix(
            found.weight, found.row, found.rows, start, config.k, lane, self.whole
        )
        return found

    @property
    def whole(self) -> bool:
        """Whether all weights have a multiple of four rows."""
        return all(n % OWNED == 0 for n in self.config.rows)

    @cute.jit
    def store(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, token: Int32, row: Int32,
        total: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """Round once; store the four rows of one token, or those of them that exist."""
        words = ptx.pack(total)
        target = tile.out + bytes_of(token * tile.width + row)
        if cutlass.const_expr(self.whole):
            ptx.store8(target, words)
        else:
            if tile.rows % Int32(OWNED) == 0:
                ptx.store8(target, words)
            else:
                for i in cutlass.range_constexpr(OWNED):
                    if row + Int32(i) < tile.rows:
                        word = words[i // 2]
                        if cutlass.const_expr(i % 2):
                            word = word >> Int32(16)
                        ptx.store2(target + Int64(i * ELEMENT), word)

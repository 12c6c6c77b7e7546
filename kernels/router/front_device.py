"""Device code of the front kernel. Imports the DSL: only the builder's `trace` loads it.

The work and the order of summation are those of `common/device/gemm.py`: 448 columns of K a CTA,
then the 16 CTAs. A tile holds 32 rows of the gate, 32 of the latent weight, or 16 of the shared
gate and the same 16 of up, so that a CTA that owns four rows has gate and up of two columns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import gemm, lamport, ptx, situ
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.gemm import CALL, ELEMENT, OWNED
from k3fuse.kernels.router.front_config import LATENT, LOGITS, SHARED, Config
from k3fuse.kernels.router.layout import PRODUCERS


class Front(gemm.Gemm):
    """One grid: logits and latent go to every rank's mailbox, the shared hidden row stays."""

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
        self.router_front(addresses, sizes).launch(
            grid=[geometry.ctas, 1, 1],
            block=[32 * geometry.warps, 1, 1],
            cluster=[geometry.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def router_front(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended; then x, products, exchange, publication."""
        config = self.config
        count = len(config.pointers)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = gemm.shared_memory(self.geometry.shared)
        given = SimpleNamespace(
            **dict(zip(config.pointers, addresses[:count], strict=True)),
            **dict(zip(config.sizes, sizes, strict=True)),
            publisher=Publisher(list(addresses[count:]), config.multicast),
            base=base,
            cta=cta,
        )
        self.run(given, base, cta, tid)

    def tile(self, given: Any, tile: Any, start: Any, lane: Any) -> Any:
        """Rows of one of the three parts; `row` and `rows` count those of this rank's part."""
        config, pitch = self.config, self.config.k * ELEMENT
        shift = [given.rank * Int32(rows) for rows in config.rows]
        if config.replicated:
            shift[LOGITS] = Int32(0)
        first, rows = Int32(0), Int32(config.rows[LOGITS])
        weight, apart = given.gate_weight, shift[LOGITS]
        if config.latent:
            here = tile >= Int32(config.firsts[LATENT])
            weight = ptx.select(here, given.latent_weight, weight)
            apart = ptx.select(here, shift[LATENT], apart)
            first = ptx.select(here, Int32(config.firsts[LATENT]), first)
            rows = ptx.select(here, Int32(config.rows[LATENT]), rows)
        upper = weight + Int64(2 * pitch)
        if config.shared:
            here = tile >= Int32(config.firsts[SHARED])
            weight = ptx.select(here, given.shared_gate, weight)
            upper = ptx.select(here, given.shared_up, upper)
            first = ptx.select(here, Int32(config.firsts[SHARED]), first)
            rows = ptx.select(here, Int32(config.rows[SHARED]), rows)
        row = gemm.first_row(tile, first)
        # Lanes beyond the last row read what a lane before them reads in the same instruction.
        line = ptx.least_of(row + (lane >> Int32(2)) * Int32(OWNED), rows - OWNED)
        place = apart + line
        if config.shared:
            place = ptx.select(here, line >> Int32(1), place)
        offset = place.to(Int64) * Int64(pitch) + bytes_of(start)
        lines = [
            base + offset + Int64(i * pitch) for base in (weight, upper) for i in range(OWNED // 2)
        ]
        return SimpleNamespace(lines=lines, row=row, rows=rows, number=tile)

    @cute.jit
    def behind_wait(self, given: cutlass.Constexpr, base: Int32) -> None:
        """Keep the number of this call for the CTA, and advance its counters."""
        counters = given.mailbox + Int64(self.config.box.control)
        call = ptx.load4(counters + given.cta.to(Int64) * Int64(4))
        ptx.shared_store4(base, call, CALL)
        ctas = self.geometry.ctas
        for turn in cutlass.range_constexpr(-(-PRODUCERS // ctas)):
            counter = given.cta + Int32(turn * ctas)
            if counter < PRODUCERS:
                ptx.store4(counters + counter.to(Int64) * Int64(4), call + Int32(1))

    @cute.jit
    def store(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, token: Int32, row: Int32,
        total: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """Publish four logits or four columns of the latent, or store two of the hidden row."""
        config = self.config
        if tile.number < Int32(config.firsts[LATENT]):
            self.publish_logits(given, token, row, total)
        else:
            if tile.number < Int32(config.firsts[SHARED]):
                if cutlass.const_expr(config.latent > 0):
                    self.publish_latent(given, token, row, total)
            else:
                if cutlass.const_expr(config.shared > 0):
                    self.store_hidden(given, token, row, total)

    @cute.jit
    def store_spread(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, token: Int32, row: Int32,
        lane: Int32, total: Float32, here: cutlass.Boolean,
    ) -> None:  # fmt: skip
        """As `store`; a column of the hidden row is one lane's."""
        if tile.number < Int32(self.config.firsts[SHARED]):
            totals = [total, *(ptx.shuffle_down(total, i) for i in range(1, OWNED))]
            if here and (lane & Int32(OWNED - 1)) == 0:
                self.store(given, tile, token, row, totals)
        else:
            if cutlass.const_expr(self.config.shared > 0):
                value = self.hidden_column(given, total, ptx.shuffle_down(total, OWNED // 2))
                values = [value, ptx.shuffle_down(value, 1)]
                if here and (lane & Int32(OWNED - 1)) == 0:
                    self.store_pair(given, token, row, values)

    def row_of(self, given: Any, token: Any) -> Any:
        """Offset of a token's row in the mailboxes, Int64."""
        box = self.config.box
        parity = ptx.shared_load4(given.base, CALL) & Int32(1)
        return parity.to(Int64) * Int64(box.parity) + token.to(Int64) * Int64(box.row)

    def publish_logits(self, given: Any, token: Any, row: Any, total: list[Any]) -> None:
        """FP32 words, to all ranks; to this one alone where each computes all."""
        config = self.config
        words = [lamport.positive_zero(ptx.as_i32(value)) for value in total]
        if config.replicated:
            offset = self.row_of(given, token) + row.to(Int64) * Int64(4)
            ptx.store16_relaxed_sys(given.mailbox + offset, words)
            return
        column = given.rank * Int32(config.rows[LOGITS]) + row
        offset = self.row_of(given, token) + column.to(Int64) * Int64(4)
        given.publisher.everywhere(offset, words)

    def publish_latent(self, given: Any, token: Any, row: Any, total: list[Any]) -> None:
        """Pairs of BF16, to all ranks."""
        config = self.config
        column = given.rank * Int32(config.rows[LATENT]) + row
        offset = self.row_of(given, token) + bytes_of(column) + Int64(config.box.latent_offset)
        words = [lamport.positive_zeros(word) for word in ptx.pack(total)]
        given.publisher.everywhere(offset, words)

    def store_hidden(self, given: Any, token: Any, row: Any, total: list[Any]) -> None:
        """Two columns: gates, then ups."""
        values = [self.hidden_column(given, total[i], total[i + 2]) for i in range(2)]
        self.store_pair(given, token, row, values)

    def hidden_column(self, given: Any, gate: Any, up: Any) -> Any:
        """SiTU of gate and up, each rounded to BF16 first."""
        beta, linear_beta = ptx.as_f32(given.beta), ptx.as_f32(given.linear_beta)
        gate, up = ptx.unpack(ptx.pack([gate, up]))
        return situ.situ(gate, up, beta, linear_beta)

    def store_pair(self, given: Any, token: Any, row: Any, values: list[Any]) -> None:
        """Round two columns of the hidden row and store them."""
        place = token * Int32(self.config.shared) + (row >> Int32(1))
        ptx.store4(given.hidden + bytes_of(place), ptx.pack(values)[0])

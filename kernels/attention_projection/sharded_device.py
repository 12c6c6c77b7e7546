"""Device code of the row-sharded attention projection, for both engines. Imports the DSL.

What differs from `device.py` and `stream_device.py`: tiles of split rows are published instead of
stored, and behind its own rows each thread copies pieces of the published ones to the outputs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import sym_int32, sym_int64

from k3fuse.kernels.attention_projection import device, stream_device
from k3fuse.kernels.attention_projection.config import Config
from k3fuse.kernels.attention_projection.device import of_tile
from k3fuse.kernels.attention_projection.share import OWN, PIECE, PRODUCERS, Share
from k3fuse.kernels.attention_projection.stream_config import (
    CLUSTER,
    QUAD,
    WARPS,
    StreamConfig,
)
from k3fuse.kernels.attention_projection.stream_device import READER_THREADS
from k3fuse.kernels.common.device import abi, gemm, lamport, ptx, tcgen05
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.gemm import CALL, ELEMENT
from k3fuse.kernels.common.mailbox import ErrorWord


def arguments(config: Config, share: Share) -> tuple[Any, ...]:
    """Stand-ins for the stationary kernel's parameters."""
    addresses = ("x", *config.weight_pointers, *share.pointers)
    return abi.arguments(addresses, ("m", "rank", "x_pitch"))


def stream_arguments(config: StreamConfig, share: Share) -> tuple[Any, ...]:
    """Stand-ins for the stream kernel's parameters; rows of x and of weights lie apart."""

    def matrix(rows: Any) -> Any:
        stride = (sym_int64(divisibility=8), 1)
        return make_fake_tensor(BFloat16, (rows, config.k), stride, assumed_align=16)

    return (
        matrix(sym_int32()),
        tuple(matrix(rows) for rows in config.rows),
        tuple(Int64(0) for _ in share.pointers),
        (Int32(0), Int32(0)),
        make_fake_stream(),
    )


class Sharing:
    """What both engines do with split rows. `given` holds mailbox, publisher, m, rank, cta, call.

    ctas: of the grid. most: the most tokens.
    """

    def __init__(self, share: Share, ctas: int, most: int) -> None:
        self.share, self.ctas, self.most = share, ctas, most

    def operands(self, pointers: tuple[Any, ...]) -> dict[str, Any]:
        """The addresses behind the weights, by name."""
        share, count = self.share, len(self.share.rows)
        return {
            "whole": list(pointers[:count]),
            "mailbox": pointers[count],
            "publisher": Publisher(list(pointers[count + 1 :]), share.multicast),
        }

    def by_part(self, given: Any) -> dict[str, list[Any]]:
        """What a tile has of its part.

        out: where the part's first column of a row of the output lies. width: elements of such a
        row. column: of a published part, its first one in a row of the mailbox.
        """
        share, found = self.share, []
        for part in share.parts:
            out = given.whole[part.weight]
            column = Int32(share.firsts[part.weight])
            if part.split:
                column = column + given.rank * Int32(part.rows)
            else:
                out = out + Int64(part.start * ELEMENT)
            found.append((out, Int32(share.rows[part.weight]), column))
        outs, widths, columns = zip(*found, strict=True)
        return {"out": list(outs), "width": list(widths), "column": list(columns)}

    def counter(self, given: Any) -> Any:
        """Address of this CTA's counter of calls."""
        return given.mailbox + Int64(self.share.box.control) + given.cta.to(Int64) * Int64(4)

    @cute.jit
    def advance(self, given: cutlass.Constexpr, call: Int32) -> None:
        """Count the call, in this CTA's share of the counters; by one thread."""
        counters = given.mailbox + Int64(self.share.box.control)
        for turn in cutlass.range_constexpr(-(-PRODUCERS // self.ctas)):
            counter = given.cta + Int32(turn * self.ctas)
            if counter < PRODUCERS:
                ptx.store4(counters + counter.to(Int64) * Int64(4), call + Int32(1))

    def row_of(self, call: Any, token: Any) -> Any:
        """Offset of a token's row in the mailboxes, Int64."""
        box = self.share.box
        parity = call & Int32(1)
        return parity.to(Int64) * Int64(box.parity) + token.to(Int64) * Int64(box.row)

    @cute.jit
    def publish(self, given: cutlass.Constexpr, offset: Int64, words: cutlass.Constexpr) -> None:
        """Pairs of BF16, to all ranks."""
        given.publisher.everywhere(offset, [lamport.positive_zeros(word) for word in words])

    @cute.jit
    def take(
        self, given: cutlass.Constexpr, call: Int32, thread: Int32, threads: cutlass.Constexpr
    ) -> None:
        """Copy whole rows from this rank's mailbox to the outputs: a piece a thread at a time."""
        pieces = self.share.box.columns // PIECE
        stride = self.ctas * threads
        for turn in cutlass.range_constexpr(-(-self.most * pieces // stride)):
            item = given.cta * Int32(threads) + thread + Int32(turn * stride)
            if item < given.m * Int32(pieces):
                token = item // Int32(pieces)
                self.take_piece(given, call, token, item - token * Int32(pieces))

    @cute.jit
    def take_piece(self, given: cutlass.Constexpr, call: Int32, token: Int32, piece: Int32) -> None:
        """Poll eight columns, arm them again, store them."""
        share = self.share
        address = given.mailbox + self.row_of(call, token) + piece.to(Int64) * Int64(16)
        column = piece * Int32(PIECE)
        outs = {
            "out": given.whole,
            "width": [Int32(n) for n in share.rows],
            "start": [Int32(n) for n in share.firsts[:-1]],
            "share": [Int32(max(n // share.tp, 1)) for n in share.split],
        }
        found = of_tile(column, share.firsts, outs)
        inside = column - found.start
        error = given.mailbox + Int64(share.box.error)
        code = Int32(0)
        if cutlass.const_expr(share.timeout > 0):
            code = token * Int32(256) + Int32(ErrorWord.FLAG) + inside // found.share
        words = lamport.poll(address, 0, 1, share.timeout, error, code)
        if cutlass.const_expr(share.timeout > 0):
            # The last four columns may be another rank's than the first four.
            later = token * Int32(256) + Int32(ErrorWord.FLAG)
            later = later + (inside + Int32(OWN)) // found.share
            self.blame_later(words, error, later)
        lamport.rearm(address, 0, 1)
        target = found.out + bytes_of(token * found.width + inside)
        ptx.store16(target, [words[0, word] for word in range(4)])

    @cute.jit
    def blame_later(self, words: cutlass.Constexpr, error: Int64, code: Int32) -> None:
        """Where a poll gave up for the last two words alone: the code of their rank."""
        first = lamport.missing([words[0, 0], words[0, 1]])
        last = lamport.missing([words[0, 2], words[0, 3]])
        if first == 0 and last != 0:
            ptx.store4_relaxed_sys(error, code)


class ShardedGemm(device.Gemm):
    """The stationary kernel of a share."""

    def __init__(self, config: Config, share: Share) -> None:
        super().__init__(config)
        self.sharing = Sharing(share, self.geometry.ctas, config.m)

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        geometry = self.geometry
        self.attention_projection_sharded(addresses, sizes).launch(
            grid=[geometry.ctas, 1, 1],
            block=[32 * geometry.warps, 1, 1],
            cluster=[geometry.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attention_projection_sharded(
        self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]
    ) -> None:
        """Weights before the predecessor has ended; then x, products, publication, whole rows."""
        count = len(self.config.rows)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = gemm.shared_memory(self.geometry.shared)
        given = SimpleNamespace(
            x=addresses[0],
            weights=list(addresses[1 : 1 + count]),
            **self.sharing.operands(addresses[1 + count :]),
            **dict(zip(("m", "rank", "x_pitch"), sizes, strict=True)),
            base=base,
            cta=cta,
        )
        self.run(given, base, cta, tid)

    def by_weight(self, given: Any) -> dict[str, list[Any]]:
        """What a tile has of its part of a weight."""
        rows = [Int32(n) for n in self.config.rows]
        return {"weight": given.weights, "rows": rows, **self.sharing.by_part(given)}

    @cute.jit
    def behind_wait(self, given: cutlass.Constexpr, base: Int32) -> None:
        """Keep the number of this call for the CTA, and count it."""
        call = ptx.load4(self.sharing.counter(given))
        ptx.shared_store4(base, call, CALL)
        self.sharing.advance(given, call)

    @cute.jit
    def store(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, token: Int32, row: Int32,
        total: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """Publish four rows of one token, or store them."""
        published = self.config.firsts[self.sharing.share.published]
        if tile.number < Int32(published):
            call = ptx.shared_load4(given.base, CALL)
            offset = self.sharing.row_of(call, token) + bytes_of(tile.column + row)
            self.sharing.publish(given, offset, ptx.pack(total))
        else:
            device.Gemm.store(self, given, tile, token, row, total)

    @cute.jit
    def behind_all(self, given: cutlass.Constexpr, base: Int32, cta: Int32, tid: Int32) -> None:
        """Whole rows to the outputs, by all warps."""
        # Warps without a tile have not seen the number of the call yet.
        ptx.barrier_wait(base, 0)
        call = ptx.shared_load4(base, CALL)
        self.sharing.take(given, call, tid, 32 * self.geometry.warps)


class ShardedStream(stream_device.Stream):
    """The stream kernel of a share."""

    def __init__(self, config: StreamConfig, share: Share) -> None:
        super().__init__(config)
        self.sharing = Sharing(share, CLUSTER * config.clusters, config.m)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weights: tuple[Any, ...],
        pointers: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        config = self.config
        x_map = self.map_of(x, config.tokens)
        maps = tuple([self.map_of(weight, config.tile) for weight in weights])
        self.attention_projection_sharded_stream(x_map, maps, pointers, sizes).launch(
            grid=[CLUSTER * config.clusters, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attention_projection_sharded_stream(
        self,
        x_map: cute.CopyAtom,
        maps: tuple[Any, ...],
        pointers: tuple[Any, ...],
        sizes: tuple[Any, ...],
    ) -> None:
        """One grid for all parts."""
        given = SimpleNamespace(
            x=tcgen05.map_address(x_map),
            weights=[tcgen05.map_address(one) for one in maps],
            m=sizes[0],
            rank=sizes[1],
            **self.sharing.operands(pointers),
        )
        self.run(given)

    def by_weight(self, given: Any) -> dict[str, list[Any]]:
        """What a tile has of its part of a weight."""
        rows = [Int32(n) for n in self.config.rows]
        return {"map": given.weights, "rows": rows, **self.sharing.by_part(given)}

    @cute.jit
    def finish(self, given: cutlass.Constexpr, quarter: Int32) -> None:
        """As without a share; then whole rows to the outputs, by the readers."""
        # The counter is the predecessor's, too.
        ptx.wait_for_predecessor()
        given.call = ptx.load4(self.sharing.counter(given))
        stream_device.Stream.finish(self, given, quarter)
        # Behind the readers' barrier: all have read the counter.
        thread = quarter * Int32(32) + given.lane
        if thread == 0:
            self.sharing.advance(given, given.call)
        self.sharing.take(given, given.call, thread, READER_THREADS)

    @cute.jit
    def put(
        self, given: cutlass.Constexpr, tile: cutlass.Constexpr, words: cutlass.Constexpr,
        token: Int32, row: Int32,
    ) -> None:  # fmt: skip
        """Publish two rows of four tokens, or store them."""
        published = self.config.firsts[self.sharing.share.published]
        if tile.number < Int32(published):
            box = self.sharing.share.box
            offset = self.sharing.row_of(given.call, token) + bytes_of(tile.column + row)
            for i in cutlass.range_constexpr(QUAD):
                if token + Int32(i) < given.m:
                    self.sharing.publish(given, offset, [words[i]])
                offset = offset + Int64(box.row)
        else:
            stream_device.Stream.put(self, given, tile, words, token, row)

"""Device code of the route kernel: its CTAs' roles. Imports the DSL: only `trace` loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, memory

from k3fuse.kernels.common.device import lamport, ptx
from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.router.route_choice import Choice
from k3fuse.kernels.router.route_config import EACH, PIECE, Config, Shared
from k3fuse.kernels.router.route_latent import Latent
from k3fuse.kernels.router.route_plan import ExpertPlan

ROW_PIECE = 16  # bytes that a thread polls at a time


class Route:
    """One grid: a CTA a token that chooses (or copies logits), one that moves the latent row."""

    def __init__(self, config: Config) -> None:
        self.config, self.shared = config, Shared(config)

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.router_route(addresses, sizes).launch(
            grid=[self.config.roles * self.config.m, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[1, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def router_route(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Every role waits for the front kernel to end: it has counted the call."""
        config = self.config
        given = SimpleNamespace(
            **dict(zip(config.pointers, addresses, strict=True)),
            **dict(zip(config.sizes, sizes, strict=True)),
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        layout = cute.make_layout(self.shared.total)
        base = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
        base = base.iterator.toint()
        token = cta // config.roles
        if token < given.m:
            if cutlass.const_expr(config.roles == 2):
                if cta % 2 == 0:
                    self.logits(given, base, token, tid)
                else:
                    self.latent(given, token, tid)
            else:
                if cutlass.const_expr(config.moves_logits):
                    self.logits(given, base, token, tid)
                else:
                    self.latent(given, token, tid)
        else:
            ptx.wait_for_predecessor()

    def row(self, given: Any, token: Any) -> Any:
        """Address of a token's row in this call's parity; behind the wait."""
        box = self.config.box
        call = ptx.load4(given.mailbox + Int64(box.control)) - Int32(1)
        parity = (call & Int32(1)).to(Int64) * Int64(box.parity)
        return given.mailbox + parity + token.to(Int64) * Int64(box.row)

    @cute.jit
    def logits(self, given: cutlass.Constexpr, base: Int32, token: Int32, tid: Int32) -> None:
        """Four logits a thread: choose among them, or store them."""
        config = self.config
        if cutlass.const_expr(config.top_k > 0):
            choice = Choice(config, given, base, token, tid)
            Choice.prepare(choice)
            ptx.wait_for_predecessor()
            ptx.allow_successor()
            words = self.read_logits(given, token, tid)
            last = Choice.run(choice, words)
            if cutlass.const_expr(config.plan):  # noqa: SIM102
                if last != 0:
                    ExpertPlan(config, given, base, tid).build()
        else:
            ptx.wait_for_predecessor()
            ptx.allow_successor()
            words = self.read_logits(given, token, tid)
            if tid * EACH < config.experts:
                place = (token * config.experts + tid * EACH).to(Int64) * Int64(4)
                ptx.store16(given.logits_out + place, [words[i] for i in range(EACH)])

    @cute.jit
    def read_logits(self, given: cutlass.Constexpr, token: Int32, tid: Int32) -> cute.Tensor:
        """The words of a thread's logits, 0 beyond the last; the mailbox is armed again."""
        config = self.config
        words = cute.make_rmem_tensor((EACH,), Int32)
        for i in cutlass.range_constexpr(EACH):
            words[i] = Int32(0)
        first = tid * EACH
        if cutlass.const_expr(config.local_logits):
            start = given.logits + (token * config.experts + first).to(Int64) * Int64(4)
            if cutlass.const_expr(config.experts % EACH == 0):
                if first < config.experts:
                    got = ptx.load16(start)
                    for i in cutlass.range_constexpr(EACH):
                        words[i] = got[i]
            else:
                for i in cutlass.range_constexpr(EACH):
                    if first + i < config.experts:
                        words[i] = ptx.load4(start + Int64(4 * i))
        else:
            address = self.row(given, token) + tid.to(Int64) * Int64(ROW_PIECE)
            if cutlass.const_expr(config.experts == EACH * config.threads):
                self.take(given, words, address, token, first // (config.experts // config.tp))
            else:
                if first < config.experts:
                    self.take(given, words, address, token, first // (config.experts // config.tp))
        return words

    def take(self, given: Any, words: Any, address: Any, token: Any, rank: Any) -> None:
        """Poll 16 bytes that `rank` publishes, and arm them again."""
        got = self.poll(given, address, 1, token, rank)
        for i in range(4):
            words[i] = got[0, i]

    def poll(self, given: Any, address: Any, slots: int, token: Any, rank: Any) -> Any:
        """`slots` times 16 bytes, a CTA's pieces apart, once all are there; armed again."""
        config = self.config
        stride = ROW_PIECE * config.threads
        code = token * Int32(256) + rank + Int32(ErrorWord.FLAG)
        error = given.mailbox + Int64(config.box.error)
        words = lamport.poll(address, stride, slots, config.timeout, error, code)
        lamport.rearm(address, stride, slots)
        return words

    @cute.jit
    def latent(self, given: cutlass.Constexpr, token: Int32, tid: Int32) -> None:
        """The latent row, eight columns a thread at a time: store it, and in MXFP8."""
        config = self.config
        ptx.wait_for_predecessor()
        ptx.allow_successor()
        mover = Latent(config, given, token, tid)
        pieces = config.latent // PIECE
        turns = pieces // config.threads
        start = Int64(0)
        if cutlass.const_expr(not config.local_latent):
            start = self.row(given, token) + Int64(config.box.latent_offset)
            start = start + tid.to(Int64) * Int64(ROW_PIECE)
        # A poll that may give up names the rank, so it waits for one piece at a time.
        together = 1 if config.timeout else max(turns, 1)
        for first in cutlass.range_constexpr(0, turns, together):
            self.turns(given, mover, start, token, tid, first, together)
        # The two conditions are of different times: one is the compiler's, one the thread's.
        if cutlass.const_expr(pieces % config.threads):  # noqa: SIM102
            if tid < pieces % config.threads:
                self.turns(given, mover, start, token, tid, turns, 1)

    def turns(
        self, given: Any, mover: Latent, start: Any, token: Any, tid: Any, first: int, count: int
    ) -> None:
        """A thread's pieces of `count` turns from turn `first` on."""
        config = self.config
        left = config.latent // PIECE - first * config.threads
        whole = left >= count * config.threads or left % 32 == 0
        words = self.pieces(given, start, token, tid, first, count)
        for turn in range(count):
            mover.move(first + turn, [words[turn, i] for i in range(4)], whole)

    def pieces(self, given: Any, start: Any, token: Any, tid: Any, first: int, count: int) -> Any:
        """[count, 4] words of a thread's pieces, one a turn from turn `first` on."""
        config = self.config
        if config.local_latent:
            found = cute.make_rmem_tensor((count, 4), Int32)
            for turn in range(count):
                piece = tid + Int32((first + turn) * config.threads)
                place = (token * config.latent + piece * PIECE).to(Int64) * Int64(2)
                got = ptx.load16(given.latent_in + place)
                for i in range(4):
                    found[turn, i] = got[i]
            return found
        address = start + Int64(first * config.threads * ROW_PIECE)
        piece = tid + Int32(first * config.threads)
        rank = piece * PIECE // (config.latent // config.tp)
        return self.poll(given, address, count, token, rank)

"""Device code of the output projection: the parts that its kernels share, and the fused kernel.

Imports the DSL: only the builder's `trace` loads it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, memory

from k3fuse.kernels.common.device import lamport, ptx, residual, stationary
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.residual import Form, Residual
from k3fuse.kernels.common.device.stationary import Stationary
from k3fuse.kernels.common.device.stream import Stream, bytes_of
from k3fuse.kernels.common.geometry import CLUSTER, CONSUMER_THREADS, REGISTER_K, ROWS
from k3fuse.kernels.common.mailbox import PRODUCERS, ErrorWord
from k3fuse.kernels.output_projection.config import Config
from k3fuse.kernels.output_projection.plan import (
    CALL,
    FUSED_THREADS,
    PRODUCER_THREADS,
    UPPER_THERE,
    Shared,
)

PRODUCER_WARPS = PRODUCER_THREADS // 32
SUMMED, PUBLISHED = 1, 2  # named barriers of the fused kernel


def form_of(config: Config) -> Form:
    """What the consumer does with the row."""
    return Form(config.blocks, config.norm, config.round_mix, config.round_before, config.packed)


def operands(config: Config, addresses: Any, sizes: Any) -> Any:
    """The kernel's parameters by name; blocks and targets as lists."""
    first, second = len(config.pointers), len(config.pointers) + len(config.block_pointers)
    named = {
        **dict(zip(config.pointers, addresses[:first], strict=True)),
        **dict(zip(config.sizes, sizes, strict=True)),
    }
    blocks, targets = list(addresses[first:second]), list(addresses[second:])
    return SimpleNamespace(blocks=blocks, targets=targets, **named)


def shared_memory(size: int) -> Any:
    """Address of `size` bytes of dynamic shared memory."""
    layout = cute.make_layout(size)
    allocated = memory.SmemAllocator().allocate_tensor(cutlass.Uint8, layout, 128)
    return allocated.iterator.toint()


class Projection:
    """One CTA's 64 output columns: the steps of a producer."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self.config, self.shared = config, shared

    @cute.jit
    def stage_upper(
        self, given: cutlass.Constexpr, base: Int32, first: Int32, tid: Int32, policy: Int64
    ) -> None:
        """Copy the columns of W beyond the registers to shared memory, one row a thread."""
        k = self.config.k - REGISTER_K
        size = k * stationary.ELEMENT
        if cutlass.const_expr(k > 0):
            if tid == 0:
                ptx.barrier_expect(base + Int32(UPPER_THERE), ROWS * size)
            if tid < ROWS:
                row = (first + tid).to(Int64) * Int64(self.config.k)
                ptx.bulk_load_once(
                    base + Int32(self.shared.upper) + tid * Int32(stationary.upper_pitch(k)),
                    given.weight + (row + Int64(REGISTER_K)) * Int64(2),
                    size, base + Int32(UPPER_THERE), policy,
                )  # fmt: skip

    @cute.jit
    def count_call(self, given: cutlass.Constexpr, base: Int32, cta: Int32) -> None:
        """Read the number of this call into shared memory and advance it; one thread."""
        counter = given.mailbox + Int64(self.config.box.control) + cta.to(Int64) * Int64(4)
        call = ptx.load4(counter)
        ptx.shared_store4(base, call, CALL)
        ptx.store4(counter, call + Int32(1))

    def parity(self, base: Any) -> Any:
        """Parity of this call, Int64; behind a barrier after `count_call`."""
        return (ptx.shared_load4(base, CALL) & Int32(1)).to(Int64)

    def target(self, given: Any, cta: Any) -> Any:
        """Address of the mailbox that owns this CTA's columns; only two-shot has one."""
        owner = cta // Int32(self.config.owner_ctas)
        return lamport.choose(given.targets, owner) if self.config.two_shot else Int64(0)

    @cute.jit
    def publish(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        cta: Int32,
        tid: Int32,
        first: Int32,
        target: Int64,
    ) -> None:
        """Add the parts of a group's tokens, from token `first`; round, store 16 bytes a thread."""
        tokens = self.shared.tokens
        token, piece = first + tid // Int32(8), tid % Int32(8)
        if tid < 8 * tokens and token < given.m:
            parity = self.parity(base)
            memory_ = base + Int32(self.shared.sums)
            packed = self.config.packed
            value = stationary.total(memory_, tid // Int32(8), piece, tokens, packed)
            words = [lamport.positive_zeros(word) for word in ptx.pack(value)]
            column = cta * Int32(ROWS) + piece * Int32(8)
            box = self.config.box
            slot = (given.rank * Int32(box.max_m) + token).to(Int64)
            if cutlass.const_expr(self.config.two_shot):
                inside = column - cta // Int32(self.config.owner_ctas) * Int32(box.part // 2)
                offset = Int64(box.receive) + parity * Int64(box.receive_parity)
                offset = offset + slot * Int64(box.part) + bytes_of(inside)
                ptx.store16_relaxed_sys(target + offset, words)
            else:
                offset = parity * Int64(box.one_shot_parity) + slot * Int64(box.row)
                offset = offset + bytes_of(column)
                Publisher(given.targets, self.config.multicast).everywhere(offset, words)


class Fused(Projection):
    """Projection, exchange and residual in one grid of 112 CTAs in clusters of seven."""

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.output_projection(addresses, sizes).launch(
            grid=[PRODUCERS, 1, 1],
            block=[FUSED_THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def output_projection(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Warps 0-7 project and publish; warps 8-11 of the first M clusters sum and normalise."""
        given = operands(self.config, addresses, sizes)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = shared_memory(self.shared.total)
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        token, place = cta // CLUSTER, cta % CLUSTER
        consumes = token < given.m
        row = Residual(
            form_of(self.config), base + Int32(self.shared.residual), lane, warp - PRODUCER_WARPS,
            place, given.eps, given.out_eps,
        )  # fmt: skip
        if tid == 0:
            ptx.barrier_init(base, 1)
            if cutlass.const_expr(self.config.k > REGISTER_K):
                ptx.barrier_init(base + Int32(UPPER_THERE), 1)
            ptx.barrier_init_fence()
        if consumes:
            if tid == FUSED_THREADS - 1:
                Residual.arm(row)
            if warp == PRODUCER_WARPS:
                Residual.prepare(row)
        cute.arch.sync_threads()
        if consumes:
            ptx.cluster_arrive()
        if warp < PRODUCER_WARPS:
            self.produce(given, base, cta, warp, lane, tid)
            if consumes:
                ptx.named_barrier_arrive(PUBLISHED, FUSED_THREADS)
        elif consumes:
            self.consume(given, base, row, token, place, tid - PRODUCER_THREADS)

    def produce(self, given: Any, base: Any, cta: Any, warp: Any, lane: Any, tid: Any) -> None:
        """64 output columns of all tokens: load W, wait for x, multiply, publish."""
        engine = Stationary(self.config.k, lane, warp, self.config.packed)
        policy = ptx.evict_first()
        first = cta * Int32(ROWS)
        self.stage_upper(given, base, first, tid, policy)
        engine.load(given.weight, first, policy)
        ptx.wait_for_predecessor()
        self.stage_x(given, base, cta, tid, warp)
        if engine.upper_k:
            ptx.barrier_wait(base + Int32(UPPER_THERE), 0)
        ptx.barrier_wait(base, 0)
        sums = engine.products(
            base + Int32(self.shared.x), base + Int32(self.shared.upper), 1, given.m - 1
        )
        engine.store_sums(sums, base + Int32(self.shared.sums), self.shared.tokens)
        ptx.named_barrier(SUMMED, PRODUCER_THREADS)
        self.publish(given, base, cta, tid, Int32(0), Int64(0))

    @cute.jit
    def stage_x(
        self, given: cutlass.Constexpr, base: Int32, cta: Int32, tid: Int32, warp: Int32
    ) -> None:
        """Copy x to shared memory; count the call; let the next grid begin its prologue."""
        size = self.config.k * stationary.ELEMENT
        if warp == 0:
            if tid < given.m:
                ptx.bulk_load(
                    base + Int32(self.shared.x) + tid * Int32(stationary.pitch(self.config.k)),
                    given.x + bytes_of(tid * given.x_pitch), size, base,
                )  # fmt: skip
            if tid == 0:
                self.count_call(given, base, cta)
                ptx.barrier_expect(base, given.m * Int32(size))
                ptx.allow_successor()

    def consume(
        self, given: Any, base: Any, row: Residual, token: Any, place: Any, thread: Any
    ) -> None:
        """One token's 1024 columns, eight a thread."""
        config, box = self.config, self.config.box
        column = (place * Int32(CONSUMER_THREADS) + thread) * Int32(residual.COLUMNS)
        stream = Stream(row.form, config.prefix, given, token, column)
        ptx.wait_for_predecessor()
        stream.load()
        ptx.cluster_wait()
        stream.mix(row)
        # The other ranks are about as far as this CTA: polls before it has published find nothing.
        ptx.named_barrier(PUBLISHED, FUSED_THREADS)
        slots = given.mailbox + self.parity(base) * Int64(box.one_shot_parity)
        reduced = collect(config, given, slots, token, bytes_of(column))
        stream.finish(row, reduced)


def collect(config: Config, given: Any, slots: Any, token: Any, place: Any) -> list[Any]:
    """The all-reduced pairs of a thread's columns from the one-shot slots of a parity."""
    box = config.box
    address = slots + token.to(Int64) * Int64(box.row) + place
    stride = box.max_m * box.row
    code = token * Int32(256) + Int32(ErrorWord.FLAG)
    error = given.mailbox + Int64(box.error)
    words = lamport.poll(address, stride, config.tp, config.timeout, error, code)
    lamport.rearm(address, stride, config.tp)
    return ptx.pack(lamport.rank_sum(words, config.tp, config.packed))

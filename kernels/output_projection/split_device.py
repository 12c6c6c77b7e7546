"""Device code of the output projection in two grids: a producer for many tokens, a consumer.

Imports the DSL: only the builder's `trace` loads it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import lamport, ptx, residual, stationary
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.residual import Residual
from k3fuse.kernels.common.device.stationary import Stationary
from k3fuse.kernels.common.device.stream import Stream, bytes_of
from k3fuse.kernels.common.geometry import CLUSTER, CONSUMER_THREADS, REGISTER_K, ROWS
from k3fuse.kernels.common.mailbox import PRODUCERS, ErrorWord
from k3fuse.kernels.output_projection.config import Config
from k3fuse.kernels.output_projection.device import (
    Projection,
    collect,
    form_of,
    operands,
    shared_memory,
)
from k3fuse.kernels.output_projection.plan import (
    GROUP,
    PRODUCER_THREADS,
    UPPER_THERE,
    Shared,
)

ALL = (1 << CLUSTER) - 1  # CTAs of a cluster, as a mask


class Producer(Projection):
    """The projection of up to 64 tokens, 16 at a time; x is read once a cluster."""

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.output_projection_producer(addresses, sizes).launch(
            grid=[PRODUCERS, 1, 1],
            block=[PRODUCER_THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def output_projection_producer(
        self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]
    ) -> None:
        """Load W, then group by group: wait for x, multiply, publish, fetch a later group."""
        given = operands(self.config, addresses, sizes)
        shared = self.shared
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = shared_memory(shared.total)
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        if tid == 0:
            for buffer in cutlass.range_constexpr(shared.buffers):
                ptx.barrier_init(base + Int32(8 * buffer), 1)
            if cutlass.const_expr(self.config.k > REGISTER_K):
                ptx.barrier_init(base + Int32(UPPER_THERE), 1)
            ptx.barrier_init_fence()
        ptx.cluster_arrive()
        engine = Stationary(self.config.k, lane, warp, self.config.packed)
        policy = ptx.evict_first()
        first = cta * Int32(ROWS)
        ptx.cluster_wait()
        self.stage_upper(given, base, first, tid, policy)
        engine.load(given.weight, first, policy)
        ptx.wait_for_predecessor()
        if warp == 0:
            for buffer in cutlass.range_constexpr(shared.buffers):
                self.stage_group(given, base, Int32(buffer), cta, lane)
        if tid == 32:
            self.count_call(given, base, cta)
            ptx.allow_successor()
        if cutlass.const_expr(self.config.k > REGISTER_K):
            ptx.barrier_wait(base + Int32(UPPER_THERE), 0)
        target = self.target(given, cta)
        groups = (given.m + Int32(GROUP - 1)) // Int32(GROUP)
        for group in cutlass.range(groups, unroll=1):
            buffer = group % shared.buffers
            ptx.barrier_wait(base + buffer * Int32(8), group // shared.buffers % 2)
            x = base + Int32(shared.x) + buffer * Int32(shared.group_bytes)
            last = given.m - 1 - group * Int32(GROUP)
            sums = Stationary.products(engine, x, base + Int32(shared.upper), 2, last)
            more = group + shared.buffers < groups
            if cutlass.const_expr(shared.reuses):  # noqa: SIM102 - static, then dynamic
                if more:
                    ptx.cluster_arrive()
            Stationary.store_sums(engine, sums, base + Int32(shared.sums), GROUP)
            cute.arch.sync_threads()
            self.publish(given, base, cta, tid, group * Int32(GROUP), target)
            if cutlass.const_expr(shared.reuses):  # noqa: SIM102
                if more:
                    ptx.cluster_wait()
                    if warp == 0:
                        self.stage_group(given, base, group + shared.buffers, cta, lane)
            # The sums of the next group overwrite those that are being read.
            cute.arch.sync_threads()

    @cute.jit
    def stage_group(
        self, given: cutlass.Constexpr, base: Int32, group: Int32, cta: Int32, lane: Int32
    ) -> None:
        """Copy this CTA's share of a group of x to all CTAs of the cluster; one warp."""
        size = self.config.k * stationary.ELEMENT
        shared = self.shared
        buffer = group % shared.buffers
        rows = ptx.least(given.m - group * Int32(GROUP), GROUP)
        if rows > 0:
            barrier = base + buffer * Int32(8)
            if lane == 0:
                ptx.barrier_expect(barrier, rows * Int32(size))
            row = lane * Int32(CLUSTER) + cta % Int32(CLUSTER)
            if row < rows:
                token = group * Int32(GROUP) + row
                target = buffer * Int32(shared.group_bytes)
                target = target + row * Int32(stationary.pitch(self.config.k))
                ptx.bulk_multicast(
                    base + Int32(shared.x) + target, given.x + bytes_of(token * given.x_pitch),
                    size, barrier, ALL,
                )  # fmt: skip


class Consumer:
    """All-reduce and residual of up to 64 tokens; a cluster of seven CTAs a token."""

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
        self.output_projection_consumer(addresses, sizes).launch(
            grid=[CLUSTER * self.config.m, 1, 1],
            block=[CONSUMER_THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            # 64 tokens are 448 CTAs, four on an SM. Left to itself, ptxas spilled 32 bytes of one
            # form (3 blocks, two-shot) to fit a seventh. The carve-out is the driver's own: without
            # a value the DSL asks a device for its shared memory.
            min_blocks_per_mp=4,
            preferred_smem_carveout=-1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def output_projection_consumer(
        self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]
    ) -> None:
        """The sources' part before the producer has ended, then sum, mix and normalise.

        Sources may be read before the wait: the producer waited for its own predecessor, and so
        for whoever wrote them, before it let this grid start.
        """
        given = operands(self.config, addresses, sizes)
        config, box = self.config, self.config.box
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = shared_memory(self.shared.total)
        warp = cute.arch.make_warp_uniform(tid // 32)
        token, place = cta // CLUSTER, cta % CLUSTER
        if token < given.m:
            row = Residual(form_of(config), base, tid % 32, warp, place, given.eps, given.out_eps)
            if tid == 0:
                Residual.arm(row)
            if warp == 1:
                Residual.prepare(row)
            ptx.cluster_arrive()
            column = (place * Int32(CONSUMER_THREADS) + tid) * Int32(residual.COLUMNS)
            stream = Stream(row.form, config.prefix, given, token, column)
            Stream.load(stream)
            ptx.cluster_wait()
            Stream.mix(stream, row)
            ptx.wait_for_predecessor()
            ptx.allow_successor()
            # The producer has counted this call already.
            call = ptx.load4(given.mailbox + Int64(box.control)) - Int32(1)
            parity = (call & Int32(1)).to(Int64)
            if cutlass.const_expr(config.two_shot):
                self.reduce_owned(given, parity, token, column)
                rows = given.mailbox + Int64(box.gather) + parity * Int64(box.gather_parity)
                reduced = self.gathered(given, rows, token, bytes_of(column))
            else:
                slots = given.mailbox + parity * Int64(box.one_shot_parity)
                reduced = collect(config, given, slots, token, bytes_of(column))
            Stream.finish(stream, row, reduced)

    @cute.jit
    def reduce_owned(
        self, given: cutlass.Constexpr, parity: Int64, token: Int32, column: Int32
    ) -> None:
        """Where this rank owns the columns: add the ranks' partials, send the sum to all."""
        config, box = self.config, self.config.box
        inside = column - given.rank * Int32(box.part // 2)
        if inside >= 0 and inside < box.part // 2:
            address = given.mailbox + Int64(box.receive) + parity * Int64(box.receive_parity)
            address = address + token.to(Int64) * Int64(box.part) + bytes_of(inside)
            stride = box.max_m * box.part
            code = token * Int32(256) + Int32(ErrorWord.FLAG)
            error = given.mailbox + Int64(box.error)
            words = lamport.poll(address, stride, config.tp, config.timeout, error, code)
            lamport.rearm(address, stride, config.tp)
            sums = ptx.pack(lamport.rank_sum(words, config.tp, config.packed))
            row = Int64(box.gather) + parity * Int64(box.gather_parity)
            offset = row + token.to(Int64) * Int64(box.row) + bytes_of(column)
            published = [lamport.positive_zeros(word) for word in sums]
            Publisher(given.targets, config.multicast).everywhere(offset, published)

    def gathered(self, given: Any, rows: Any, token: Any, place: Any) -> list[Any]:
        """The all-reduced pairs of a thread's columns from the gather row."""
        box = self.config.box
        address = rows + token.to(Int64) * Int64(box.row) + place
        code = token * Int32(256) + Int32(ErrorWord.FLAG + ErrorWord.GATHER)
        error = given.mailbox + Int64(box.error)
        words = lamport.poll(address, 0, 1, self.config.timeout, error, code)
        lamport.rearm(address, 0, 1)
        return [words[0, word] for word in range(4)]

"""Device code of the tail. Imports the DSL: only the builder's `trace` loads it.

Every CTA does its share of each step, one step after the other: publish partials, add and normalise
latent rows, add shared partials, multiply, publish finished columns, read finished rows. The steps
that compute nothing are in `exchange_device.py`, AttnRes of the finished rows is in
`mix_device.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import lamport, ptx, stationary, vector
from k3fuse.kernels.common.device.cluster import ALL_STEPS, butterfly
from k3fuse.kernels.common.device.gemm import shared_memory
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.stationary import Stationary
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.geometry import ROWS
from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.tail.config import (
    CALL,
    CLUSTER,
    COLUMNS,
    OWNED,
    PARTS,
    PIECE,
    PITCH,
    SQUARES,
    THREADS,
    WARPS,
)
from k3fuse.kernels.tail.exchange_device import SIXTEEN
from k3fuse.kernels.tail.mailbox import LATENT
from k3fuse.kernels.tail.mix_device import Mixing

ITEM = OWNED * 4  # bytes of one token's partial sums of a piece


def warps_total(address: Any) -> Any:
    """The sum of the warps' sums, first to last."""
    values: list[Any] = []
    for quad in range(WARPS // 4):
        values += ptx.shared_load16_f32(address, SIXTEEN * quad)
    for warp in range(len(values), WARPS):
        values.append(ptx.shared_load_f32(address + Int32(4 * warp)))
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def senders_total(address: Any, stride: int, packed: bool) -> list[Any]:
    """The eight sums of one token over the CTAs of the cluster, first to last."""
    total: list[Any] = []
    for sender in range(CLUSTER):
        more: list[Any] = []
        for half in range(2):
            more += ptx.shared_load16_f32(address, sender * stride + SIXTEEN * half)
        total = vector.add(total, more, packed) if total else more
    return total


class Tail(Mixing):
    """One grid of 7 or 14 clusters of eight CTAs."""

    @cute.jit
    def __call__(
        self,
        addresses: tuple[Any, ...],
        sizes: tuple[Any, ...],
        stream: CUstream,
    ) -> None:
        """Launch; only its trace is used, for compilation."""
        self.latent_tail(addresses, sizes).launch(
            grid=[self.config.grid, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def latent_tail(self, addresses: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
        """Weights before the predecessor has ended, then the steps in order."""
        config = self.config
        named = {
            **dict(zip(config.addresses, addresses, strict=True)),
            **dict(zip(config.sizes, sizes, strict=True)),
        }
        given = SimpleNamespace(
            peers=[named[f"mailbox{rank}"] for rank in range(config.tp)],
            targets=[named[name] for name in config.targets],
            **named,
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        base = shared_memory(config.total)
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        part, first = cta % CLUSTER, cta // CLUSTER * Int32(ROWS * config.units)
        if tid == 0:
            for unit in cutlass.range_constexpr(config.units):
                ptx.barrier_init(base + Int32(8 * unit), 1)
            ptx.barrier_init_fence()
            for unit in cutlass.range_constexpr(config.units):
                ptx.barrier_expect(base + Int32(8 * unit), given.m * Int32(CLUSTER * ITEM))
        if cutlass.const_expr(config.mixes):
            self.arm_mixer(given, base, cta, tid, warp)
        ptx.cluster_arrive()
        engines = self.weights(given, first, part, lane, warp)
        ptx.wait_for_predecessor()
        self.count_call(given, base, cta, tid)
        cute.arch.sync_threads()
        if tid == 0:
            ptx.allow_successor()
        parity = (ptx.shared_load4(base, CALL) & Int32(1)).to(Int64)
        self.publish(given, parity, cta, tid)
        self.rearm_normed(given, base, parity, cta, tid)
        self.normalise(given, base, parity, cta, tid, warp, lane)
        shared = self.add_shared(given, parity, first, part, tid)
        self.stage(given, base, parity, part, tid)
        cute.arch.sync_threads()
        ptx.cluster_wait()
        self.multiply(given, base, engines, part, tid)
        self.finish(given, base, parity, first, part, tid, shared)
        if cutlass.const_expr(config.mixes):
            self.mix(given, base, parity, cta, tid, warp)
        else:
            self.collect(given, parity, cta, tid)

    def weights(self, given: Any, first: Any, part: Any, lane: Any, warp: Any) -> list[Stationary]:
        """This thread's registers of W for each unit of rows: every byte once a rank."""
        config = self.config
        policy = ptx.evict_first()
        row = given.rank * Int32(config.rows) + first
        columns = given.weight + bytes_of(part * Int32(COLUMNS))
        engines = []
        for unit in range(config.units):
            engine = Stationary(
                COLUMNS, lane, warp, config.packed, parts=PARTS, held=COLUMNS, row_k=LATENT
            )
            engine.load(columns, row + Int32(ROWS * unit), policy)
            engines.append(engine)
        return engines

    @cute.jit
    def normalise(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        parity: Int64,
        cta: Int32,
        tid: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """Add the ranks' latent rows, normalise; a token a CTA, eight columns a thread.

        The last CTAs do it: the first ones publish.
        """
        config, box = self.config, self.config.box
        place = bytes_of(tid * Int32(PIECE))
        error = given.mailbox + Int64(box.error)
        step = config.tp if config.two_shot else 1
        first = given.rank if config.two_shot else 0
        token = (Int32(config.grid - 1) - cta) * Int32(step) + first
        while token < given.m:
            norm = ptx.unpack(ptx.load16_constant(given.norm + place))
            row = token.to(Int64) * Int64(box.latent_row) + place
            slots = given.mailbox + Int64(box.latent) + parity * Int64(box.latent_parity) + row
            stride = box.max_m * box.latent_row
            code = token * Int32(256) + Int32(ErrorWord.FLAG)
            words = lamport.poll(slots, stride, config.tp, config.timeout, error, code)
            lamport.rearm(slots, stride, config.tp)
            sums = lamport.rank_sum(words, config.tp, config.packed)
            latent = ptx.unpack(ptx.pack(sums))
            squares = butterfly([vector.dot(latent, latent, config.packed)], ALL_STEPS)[0]
            if lane == 0:
                ptx.shared_store_f32(base + Int32(SQUARES) + warp * Int32(4), squares)
            cute.arch.sync_threads()
            total = warps_total(base + Int32(SQUARES))
            scale = ptx.rsqrt(total * Float32(1.0 / LATENT) + ptx.as_f32(given.eps))
            scaled = vector.scaled(latent, scale, config.packed)
            if cutlass.const_expr(config.round_before):
                scaled = ptx.unpack(ptx.pack(scaled))
            normed = ptx.pack(vector.mul(scaled, norm, config.packed))
            normed = [lamport.positive_zeros(word) for word in normed]
            offset = Int64(box.normed) + parity * Int64(box.normed_parity) + row
            if cutlass.const_expr(config.two_shot):
                Publisher(given.targets, config.multicast).everywhere(offset, normed)
            else:
                ptx.store16_relaxed_sys(given.mailbox + offset, normed)
            # The sums of the next token overwrite those that are being read.
            cute.arch.sync_threads()
            token += config.grid * step

    @cute.jit
    def multiply(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        engines: cutlass.Constexpr,
        part: Int32,
        tid: Int32,
    ) -> None:
        """Groups of tokens times units of rows; each sum goes to the CTA that owns its row."""
        config = self.config
        groups = (given.m + Int32(config.tokens - 1)) // Int32(config.tokens)
        for group in cutlass.range(groups, unroll=1):
            token = group * Int32(config.tokens)
            x = base + Int32(config.x) + token * Int32(PITCH)
            last = given.m - 1 - token
            for unit in cutlass.range_constexpr(config.units):
                # Two buffers: who writes one again has passed the barrier behind its readers.
                turn = (group * Int32(config.units) + Int32(unit)) % Int32(2)
                sums = base + Int32(config.sums)
                if cutlass.const_expr(config.rounds > 1):
                    sums = sums + turn * Int32(config.sums_bytes)
                engine = engines[unit]
                found = Stationary.products(engine, x, Int32(0), config.tokens // 8, last)
                Stationary.store_sums(engine, found, sums, config.tokens)
                cute.arch.sync_threads()
                self.push(given, base, sums, unit, token, part, tid)

    @cute.jit
    def push(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        sums: Int32,
        unit: cutlass.Constexpr[int],
        first: Int32,
        part: Int32,
        tid: Int32,
    ) -> None:
        """Add the parts of a token's eight rows, send the sums to the CTA that owns them."""
        config = self.config
        inside, piece = tid // Int32(CLUSTER), tid % Int32(CLUSTER)
        token = first + inside
        if inside < config.tokens:
            value = stationary.total(sums, inside, piece, config.tokens, config.packed, PARTS)
            place = (part + Int32(CLUSTER * unit)) * Int32(8 * config.passes) + token
            address = base + Int32(config.received) + place * Int32(ITEM)
            barrier = base + Int32(8 * unit)
            beyond = token - given.m
            ptx.store_async(address, value[:4], barrier, piece, beyond, 0)
            ptx.store_async(address + Int32(SIXTEEN), value[4:], barrier, piece, beyond, 0)

    @cute.jit
    def finish(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        parity: Int64,
        first: Int32,
        part: Int32,
        tid: Int32,
        shared: cute.Tensor,
    ) -> None:
        """Add what the cluster has sent, CTA by CTA, and the shared row; publish eight columns."""
        config, box = self.config, self.config.box
        unit, token = tid // Int32(8 * config.passes), tid % Int32(8 * config.passes)
        if unit < config.units and token < given.m:
            ptx.barrier_wait(base + unit * Int32(8), 0, "cluster")
            place = unit * Int32(CLUSTER * 8 * config.passes) + token
            address = base + Int32(config.received) + place * Int32(ITEM)
            total = senders_total(address, 8 * config.passes * ITEM, config.packed)
            up = ptx.unpack(ptx.pack(total))
            rest = ptx.unpack([shared[word] for word in range(4)])
            words = ptx.pack(vector.add(up, rest, config.packed))
            words = [lamport.positive_zeros(word) for word in words]
            column = given.rank * Int32(config.rows) + first
            column = column + unit * Int32(ROWS) + part * Int32(OWNED)
            offset = Int64(box.rows) + parity * Int64(box.rows_parity)
            offset = offset + token.to(Int64) * Int64(box.row) + bytes_of(column)
            Publisher(given.targets, config.multicast).everywhere(offset, words)

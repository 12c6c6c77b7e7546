"""What a CTA of the tail does with the mailboxes alone: publish, poll, copy, arm. Imports the DSL.

Where rows are computed on the way, see `device.py`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import lamport, ptx
from k3fuse.kernels.common.device.lamport import Publisher
from k3fuse.kernels.common.device.stream import bytes_of
from k3fuse.kernels.common.geometry import ROWS
from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.tail.config import (
    CALL,
    COLUMNS,
    OWNED,
    PIECE,
    PIECES,
    PITCH,
    THREADS,
    Config,
)
from k3fuse.kernels.tail.mailbox import CTAS

SIXTEEN = 16


class Exchange:
    """The steps of one CTA between the mailboxes, its registers and its shared memory."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def count_call(self, given: cutlass.Constexpr, base: Int32, cta: Int32, tid: Int32) -> None:
        """Read this call's number and the tokens of the call before; advance this CTA's pairs."""
        box, grid = self.config.box, self.config.grid
        place = cta + tid * Int32(grid)
        if place < CTAS:
            pair = given.mailbox + Int64(box.control) + place.to(Int64) * Int64(8)
            call, tokens = ptx.load4(pair), ptx.load4(pair + Int64(4))
            if tid == 0:
                ptx.shared_store4(base, call, CALL)
                ptx.shared_store4(base, tokens, CALL + 4)
            ptx.store8(pair, (call + Int32(1), given.m))

    @cute.jit
    def publish(self, given: cutlass.Constexpr, parity: Int64, cta: Int32, tid: Int32) -> None:
        """Send this rank's partials: latent rows to all or to their owner, columns to theirs."""
        config, box = self.config, self.config.box
        mine = given.rank * Int32(box.max_m)
        token = cta
        while token < given.m:
            source = given.routed + bytes_of(token * given.routed_pitch + tid * Int32(PIECE))
            words = [lamport.positive_zeros(word) for word in ptx.load16(source)]
            offset = Int64(box.latent) + parity * Int64(box.latent_parity)
            offset = offset + (mine + token).to(Int64) * Int64(box.latent_row)
            offset = offset + bytes_of(tid * Int32(PIECE))
            if cutlass.const_expr(config.two_shot):
                owner = lamport.choose(given.peers, token % Int32(config.tp))
                ptx.store16_relaxed_sys(owner + offset, words)
            else:
                Publisher(given.targets, config.multicast).everywhere(offset, words)
            token += config.grid
        # The CTAs behind those that have sent latent rows.
        turn = (cta + Int32(8 * config.grid) - given.m) % config.grid
        piece = turn * Int32(THREADS) + tid
        while piece < given.m * Int32(config.hidden // PIECE):
            token = piece // Int32(config.hidden // PIECE)
            column = piece % Int32(config.hidden // PIECE) * Int32(PIECE)
            source = given.shared + bytes_of(token * given.shared_pitch + column)
            words = [lamport.positive_zeros(word) for word in ptx.load16(source)]
            owner = lamport.choose(given.peers, column // Int32(config.rows))
            offset = Int64(box.shared) + parity * Int64(box.shared_parity)
            offset = offset + (mine + token).to(Int64) * Int64(box.part)
            offset = offset + bytes_of(column % Int32(config.rows))
            ptx.store16_relaxed_sys(owner + offset, words)
            piece += config.grid * THREADS

    @cute.jit
    def rearm_normed(
        self, given: cutlass.Constexpr, base: Int32, parity: Int64, cta: Int32, tid: Int32
    ) -> None:
        """Arm the normalised rows of the call before, whose readers have all ended."""
        box = self.config.box
        tokens = ptx.shared_load4(base, CALL + 4)
        start = given.mailbox + Int64(box.normed) + bytes_of(tid * Int32(PIECE))
        start = start + (Int64(1) - parity) * Int64(box.normed_parity)
        token = cta
        while token < tokens:
            lamport.rearm(start + token.to(Int64) * Int64(box.latent_row), 0, 1)
            token += self.config.grid

    @cute.jit
    def add_shared(
        self, given: cutlass.Constexpr, parity: Int64, first: Int32, part: Int32, tid: Int32
    ) -> cute.Tensor:
        """The shared rows of the piece that this thread will finish: four pairs of BF16."""
        config, box = self.config, self.config.box
        total = cute.make_rmem_tensor((4,), Int32)
        total.fill(0)
        unit, token = tid // Int32(8 * config.passes), tid % Int32(8 * config.passes)
        if unit < config.units and token < given.m:
            column = first + unit * Int32(ROWS) + part * Int32(OWNED)
            slots = given.mailbox + Int64(box.shared) + parity * Int64(box.shared_parity)
            slots = slots + token.to(Int64) * Int64(box.part) + bytes_of(column)
            stride = box.max_m * box.part
            error = given.mailbox + Int64(box.error)
            code = token * Int32(256) + Int32(ErrorWord.FLAG + ErrorWord.SHARED)
            words = lamport.poll(slots, stride, config.tp, config.timeout, error, code)
            lamport.rearm(slots, stride, config.tp)
            sums = ptx.pack(lamport.rank_sum(words, config.tp, config.packed))
            for word in cutlass.range_constexpr(4):
                total[word] = sums[word]
        return total

    @cute.jit
    def stage(
        self, given: cutlass.Constexpr, base: Int32, parity: Int64, part: Int32, tid: Int32
    ) -> None:
        """Wait for the CTA's columns of all normalised rows; copy them to shared memory.

        Up to four times eight tokens at once.
        """
        config, box = self.config, self.config.box
        token, piece = tid // Int32(PIECES), tid % Int32(PIECES)
        rows = given.mailbox + Int64(box.normed) + parity * Int64(box.normed_parity)
        rows = rows + bytes_of(part * Int32(COLUMNS) + piece * Int32(PIECE))
        rows = rows + token.to(Int64) * Int64(box.latent_row)
        target = base + Int32(config.x) + token * Int32(PITCH) + piece * Int32(SIXTEEN)
        error = given.mailbox + Int64(box.error)
        chunk = min(4, config.passes)
        for start in cutlass.range_constexpr(0, config.passes, chunk):
            # Rows of this thread from here on: tokens 8 start + token, eight apart.
            count = ptx.least((given.m - token + Int32(7)) // Int32(8) - Int32(start), chunk)
            code = (token + Int32(8 * start)) * Int32(256)
            code = code + Int32(ErrorWord.FLAG + ErrorWord.NORMED)
            for turns in cutlass.range_constexpr(1, chunk + 1):
                if count == turns:
                    places = [(rows, 8 * (start + turn) * box.latent_row) for turn in range(turns)]
                    words = lamport.poll_all(places, config.timeout, error, code)
                    for turn in cutlass.range_constexpr(turns):
                        four = [ptx.as_f32(words[turn, word]) for word in range(4)]
                        ptx.shared_store16(target, four, 8 * (start + turn) * PITCH)

    @cute.jit
    def collect(self, given: cutlass.Constexpr, parity: Int64, cta: Int32, tid: Int32) -> None:
        """Copy this CTA's share of the finished rows to the output, all of it in flight at once."""
        config, box = self.config, self.config.box
        pieces, step = config.hidden // PIECE, config.grid * THREADS
        rows = given.mailbox + Int64(box.rows) + parity * Int64(box.rows_parity)
        error = given.mailbox + Int64(box.error)
        first = cta * Int32(THREADS) + tid
        place = first.to(Int64) * Int64(SIXTEEN)
        code = first // Int32(pieces) * Int32(256) + Int32(ErrorWord.FLAG + ErrorWord.GATHER)
        count = (given.m * Int32(pieces) - first + Int32(step - 1)) // Int32(step)
        for turns in cutlass.range_constexpr(1, -(-config.m * pieces // step) + 1):
            if count == turns:
                places = [(rows + place, turn * step * SIXTEEN) for turn in range(turns)]
                words = lamport.poll_all(places, config.timeout, error, code)
                lamport.rearm_all(places)
                for turn in cutlass.range_constexpr(turns):
                    target = given.out + place + Int64(turn * step * SIXTEEN)
                    ptx.store16(target, [words[turn, word] for word in range(4)])

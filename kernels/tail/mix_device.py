"""AttnRes of the finished rows, in the tail's own launch. Imports the DSL.

A token has four warps in each of the first seven CTAs of a cluster, eight columns a thread: the
layout of the kernel of AttnRes alone (`kernels/attn_res/device.py`), so its sums, their order and
the bits are the same. The eighth CTA takes no part. Where there are more tokens than clusters, a
cluster has several, each with warps of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import lamport, ptx
from k3fuse.kernels.common.device.residual import Form, Residual
from k3fuse.kernels.common.device.stream import Stream, bytes_of
from k3fuse.kernels.common.geometry import CLUSTER as MIXERS
from k3fuse.kernels.common.geometry import (
    COLUMNS,
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    residual_bytes,
)
from k3fuse.kernels.common.mailbox import ErrorWord
from k3fuse.kernels.tail.config import CLUSTER
from k3fuse.kernels.tail.exchange_device import Exchange


class Mixing(Exchange):
    """The steps of one CTA from finished rows to mixed ones."""

    def mixer(self, given: Any, base: Any, cta: Any, tid: Any, warp: Any) -> SimpleNamespace:
        """The part of a thread of the last warps: its token, its place, and whether it has any.

        takes: a Boolean; the rest says nothing where it does not hold.
        """
        config = self.config
        inside, place = warp - Int32(config.mix_warp), cta % CLUSTER
        thread = tid - Int32(32 * config.mix_warp)
        token, memory = cta // CLUSTER, base + Int32(config.residual)
        if config.mix_groups > 1:
            which = inside // Int32(CONSUMER_WARPS)
            inside, thread = inside % Int32(CONSUMER_WARPS), thread % Int32(CONSUMER_THREADS)
            token = token + which * Int32(config.clusters)
            memory = memory + which * Int32(residual_bytes(config.blocks))
        form = Form(config.blocks, config.norm, config.round_mix, packed=config.packed)
        row = Residual(form, memory, tid % 32, inside, place, given.mix_eps, given.out_eps)
        takes = (place < MIXERS) & (token < given.m)
        return SimpleNamespace(
            form=form, row=row, token=token, thread=thread, place=place, takes=takes
        )

    @cute.jit
    def arm_mixer(
        self, given: cutlass.Constexpr, base: Int32, cta: Int32, tid: Int32, warp: Int32
    ) -> None:
        """Set up what the cluster exchanges for a token; the cluster's barrier comes after."""
        if warp >= self.config.mix_warp:
            mixer = self.mixer(given, base, cta, tid, warp)
            if mixer.takes:
                if mixer.thread == 0:
                    Residual.arm(mixer.row)
                if mixer.row.warp == 1:
                    Residual.prepare(mixer.row)

    @cute.jit
    def mix(
        self,
        given: cutlass.Constexpr,
        base: Int32,
        parity: Int64,
        cta: Int32,
        tid: Int32,
        warp: Int32,
    ) -> None:
        """Wait for a token's finished row, store it; add it to the prefix, mix, normalise.

        All that does not need the row is on its way or done before it is there.
        """
        if warp >= self.config.mix_warp:
            mixer = self.mixer(given, base, cta, tid, warp)
            if mixer.takes:
                self.mix_row(given, parity, mixer)

    def mix_row(self, given: Any, parity: Any, mixer: SimpleNamespace) -> None:
        """As `mix`, by the threads that have a part."""
        config, box, token = self.config, self.config.box, mixer.token
        column = (mixer.place * Int32(CONSUMER_THREADS) + mixer.thread) * Int32(COLUMNS)
        operands = SimpleNamespace(
            blocks=[getattr(given, name) for name in config.block_pointers],
            prefix=given.prefix, score_norm=given.score_norm, score_proj=given.score_proj,
            out_norm=given.out_norm, out=given.mixed, new_prefix=given.new_prefix,
            prefix_pitch=given.prefix_pitch, block_pitch=given.block_pitch,
        )  # fmt: skip
        stream = Stream(mixer.form, True, operands, token, column)
        stream.load()
        stream.mix(mixer.row)
        place = token.to(Int64) * Int64(box.row) + bytes_of(column)
        rows = given.mailbox + Int64(box.rows) + parity * Int64(box.rows_parity) + place
        error = given.mailbox + Int64(box.error)
        code = token * Int32(256) + Int32(ErrorWord.FLAG + ErrorWord.GATHER)
        found = lamport.poll(rows, 0, 1, config.timeout, error, code)
        lamport.rearm(rows, 0, 1)
        delta = [found[0, word] for word in range(4)]
        ptx.store16(given.out + place, delta)
        stream.finish(mixer.row, delta)

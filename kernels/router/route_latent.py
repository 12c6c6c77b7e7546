"""The latent row: a copy in BF16, and in MXFP8 by the round-up rule. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx, warp
from k3fuse.kernels.router.route_config import BLOCK, PIECE, Config

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
# Added to a magnitude's bits it carries into the exponent where the mantissa exceeds 1.75.
_ROUND_UP = 0x7FFFFF - 0x600000
_E4M3_EXPONENT = 8  # 448 = 1.75 * 2**8
_NAN_SCALE = 255
_NAN_FACTOR = 0x00200000  # 2**-128


class Latent:
    """A thread's part of one token's row: eight columns a turn; four lanes have one scale."""

    def __init__(self, config: Config, given: Any, token: Any, tid: Any) -> None:
        self.config, self.given, self.token, self.tid = config, given, token, tid

    @cute.jit
    def move(
        self, turn: cutlass.Constexpr[int], words: cutlass.Constexpr,
        whole: cutlass.Constexpr[bool],
    ) -> None:  # fmt: skip
        """Store the four pairs of BF16 of one turn. whole: all lanes of the warp have some."""
        config = self.config
        piece = self.tid + Int32(turn * config.threads)
        column = self.token * Int32(config.latent) + piece * Int32(PIECE)
        if cutlass.const_expr(not config.local_latent):
            ptx.store16(self.given.latent + column.to(Int64) * Int64(2), words)
        if cutlass.const_expr(config.quantize):
            values = []
            for word in words:
                values += [word << Int32(16), word & Int32(-65536)]
            # Else at least the four lanes of each block have: L is a multiple of BLOCK.
            lanes = Int32(-1) if whole else Int32(15) << (self.tid % 32 // 4 * Int32(4))
            scale, factor = scale_of(values, lanes)
            packed = [warp.pack_e4m3(values[:4], factor), warp.pack_e4m3(values[4:], factor)]
            ptx.store8(self.given.latent_q + column.to(Int64), packed)
            if self.tid % (BLOCK // PIECE) == 0:
                place = (column // BLOCK).to(Int64)
                warp.store1(self.given.latent_scale + place, scale)


def scale_of(values: list[Any], lanes: Any) -> tuple[Any, Any]:
    """The E8M0 byte of the block that four neighbouring lanes hold, and bits of 2 ** (127 - byte).

    values: bits of FP32. lanes: those that take part, as bits.
    `common/microscaling.py` has the rule. A NaN or an infinity makes the byte 255.
    """
    most = values[0] & Int32(_MAGNITUDE)
    for value in values[1:]:
        most = warp.most_of(most, value & Int32(_MAGNITUDE))
    for step in (1, 2):
        most = warp.most_of(most, warp.shuffle_word_xor(most, step, lanes))
    power = ((most + Int32(_ROUND_UP)) >> Int32(23)) - Int32(_E4M3_EXPONENT)
    power = warp.most_of(power, Int32(0))
    finite = most < Int32(_INFINITY)
    scale = ptx.select(finite, power, Int32(_NAN_SCALE))
    factor = ptx.select(finite, (Int32(254) - power) << Int32(23), Int32(_NAN_FACTOR))
    return scale, factor

"""The residual stream of one thread's eight columns: what it loads, and what it stores."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int64

from k3fuse.kernels.common.device import ptx, residual, vector
from k3fuse.kernels.common.device.residual import Form, Residual


def bytes_of(elements: Any) -> Any:
    """Int64 bytes of an Int32 number of BF16."""
    return elements.to(Int64) * Int64(2)


class Stream:
    """Weights and sources of one row, and its outputs.

    given: the kernel's operands by name. column: Int32, the first of the thread's columns.
    Weights are loaded at construction, before the grid's predecessor has ended; weights False:
    `weigh` is told them.
    """

    def __init__(
        self,
        form: Form,
        prefix: bool,
        given: Any,
        token: Any,
        column: Any,
        weights: bool = True,
    ) -> None:
        self.form, self.given, self.token = form, given, token
        self.has_prefix = prefix
        self.place = bytes_of(column)
        self.score_weight: list[Any] = []
        self.norm: list[Any] = []
        if weights:
            found = [given.score_norm, given.score_proj] if form.blocks > 0 else []
            found += [given.out_norm] if form.norm else []
            self.weigh([ptx.load16_constant(address + self.place) for address in found])
        self.prefix: Any = None
        self.blocks: list[Any] = []
        self.mixed: tuple[list[Any], Any, Any] = ([], Float32(0.0), Float32(0.0))

    def weigh(self, vectors: list[Any]) -> None:
        """Take the weights: score norm and projection where there are blocks, output norm."""
        unpacked = [ptx.unpack(words) for words in vectors]
        if self.form.blocks > 0:
            self.score_weight = vector.mul(unpacked[0], unpacked[1], self.form.packed)
        if self.form.norm:
            self.norm = unpacked[-1]

    def load(self) -> None:
        """Load prefix and blocks."""
        given = self.given
        if self.has_prefix:
            offset = bytes_of(self.token * given.prefix_pitch) + self.place
            self.prefix = ptx.load16(given.prefix + offset)
        if self.form.blocks > 0:
            offset = bytes_of(self.token * given.block_pitch) + self.place
            self.blocks = [ptx.load16(block + offset) for block in given.blocks]

    def mix(self, row: Residual) -> None:
        """The blocks' sums and their mix, all of it before the row is there."""
        if self.form.blocks > 0:
            row.send_blocks(self.blocks, self.score_weight)
            self.mixed = row.mix_blocks(self.blocks)

    def finish(self, row: Residual, reduced: list[Any], store_row: bool = True) -> None:
        """Add the all-reduced row (four pairs of BF16) to the prefix, mix, normalise, store."""
        target = self.token.to(Int64) * Int64(2 * residual.HIDDEN) + self.place
        out, new_prefix = self.given.out + target, self.given.new_prefix + target
        total = ptx.unpack(reduced)
        if self.prefix is not None:
            total = vector.add(total, ptx.unpack(self.prefix), self.form.packed)
        rounded = ptx.pack(total) if self.prefix is not None else reduced
        if store_row:
            ptx.store16(new_prefix, rounded)
        if self.form.attn_res:
            values = row.finish(ptx.unpack(rounded), self.score_weight, self.norm, *self.mixed)
        else:
            values = row.add_norm(total, self.norm)
        ptx.store16(out, ptx.pack(values))

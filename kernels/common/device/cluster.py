"""Sums over the threads of a cluster: fold a warp, push to every CTA, add in a fixed order.

Each warp reduces its lanes and stores its sums straight into the shared memory of every CTA of the
cluster, its own included; 16 bytes an `st.async`, counted by an mbarrier there. Every warp then
adds what all warps sent, so that all threads of the cluster hold the same bits. No barrier of the
CTA is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.common.geometry import LANES

ALL_STEPS = (16, 8, 4, 2, 1)


def fold(values: list[Any], lane: Any) -> Any:
    """The sum over the lanes of a warp of one of n values (n a power of two up to 32).

    Lane l gets the sum of value l // (32 / n): n - 1 + log2(32 / n) shuffles instead of 5 n.
    """
    left = list(values)
    step = LANES // 2
    while step:
        if len(left) > 1:
            half = len(left) // 2
            upper = (lane & Int32(step)) != Int32(0)
            keep = [ptx.select(upper, left[i + half], left[i]) for i in range(half)]
            send = [ptx.select(upper, left[i], left[i + half]) for i in range(half)]
            left = [k + ptx.shuffle_xor(s, step) for k, s in zip(keep, send, strict=True)]
        else:
            left = [left[0] + ptx.shuffle_xor(left[0], step)]
        step //= 2
    return left[0]


def butterfly(values: list[Any], steps: Sequence[int]) -> list[Any]:
    """The sums over the lanes that differ in the bits `steps`, in every lane."""
    for step in steps:
        values = [value + ptx.shuffle_xor(value, step) for value in values]
    return values


class Exchange:
    """One all-to-all of sums of Float32 between all warps of a cluster, used once a launch.

    quads: how many times four values a warp sends, 1, 2 or 4; or 0 for a single value. address:
    shared memory of `exchange_bytes(quads)` bytes; barrier: an mbarrier of its own. `ctas` CTAs of
    `warps` warps each take part; ctas x quads and ctas x warps are at most 32.
    """

    def __init__(self, address: Any, barrier: Any, quads: int, ctas: int, warps: int) -> None:
        if quads not in (0, 1, 2, 4) or ctas * quads > LANES or ctas * warps > LANES:
            raise ValueError(f"quads={quads}, ctas={ctas}, warps={warps}: no such exchange")
        self.address, self.barrier = address, barrier
        self.quads, self.ctas, self.warps = quads, ctas, warps
        self.item = 16 if quads else 4  # bytes
        self.items = max(quads, 1)

    def prepare(self, lane: Any) -> None:
        """Clear the places that no warp fills; one warp, before the cluster's barrier."""
        senders = self.ctas * self.warps
        spare = (LANES - senders) * self.items
        if spare:
            # Lanes beyond the last spare place clear that one again.
            place = senders * self.items + ptx.least(lane, spare - 1)
            address, zero = self.address + place * Int32(self.item), Float32(0.0)
            if self.quads:
                ptx.shared_store16(address, [zero] * 4)
            else:
                ptx.shared_store_f32(address, zero)

    def arm(self) -> None:
        """Initialise the barrier and expect everything; one thread, before the cluster's."""
        ptx.barrier_init(self.barrier, 1)
        ptx.barrier_expect(self.barrier, self.ctas * self.warps * self.items * self.item)

    def send(self, values: list[Any], lane: Any, cta: Any, warp: Any) -> None:
        """Add up each value over the lanes of warp `warp` of CTA `cta`; push the sums to all."""
        place = cta * Int32(self.warps) + warp
        if not self.quads:
            sums = butterfly(values, ALL_STEPS)
            address = self.address + place * Int32(self.item)
            ptx.store_async(address, sums, self.barrier, lane, lane, self.ctas)
            return
        folded = fold(values, lane)
        quad, there = lane % Int32(self.quads), lane // Int32(self.quads)
        # Lane l has value l // width: a quad starts 4 x width lanes after the one before it.
        width = LANES // (4 * self.quads)
        first = quad * Int32(4 * width)
        sums = [ptx.shuffle_from(folded, first + Int32(i * width)) for i in range(4)]
        address = self.address + (place * Int32(self.quads) + quad) * Int32(self.item)
        ptx.store_async(address, sums, self.barrier, there, lane, self.ctas * self.quads)

    def receive(self, lane: Any) -> list[Any]:
        """Wait, and add up what all warps sent: the same bits in all threads of the cluster.

        The single value; or the four of quad lane % quads.
        """
        ptx.barrier_wait(self.barrier, 0, "cluster")
        address = self.address + lane * Int32(self.item)
        if not self.quads:
            return butterfly([ptx.shared_load_f32(address)], ALL_STEPS)
        total: list[Any] = []
        for turn in range(self.quads):
            part = ptx.shared_load16_f32(address, turn * LANES * self.item)
            total = [a + b for a, b in zip(total, part, strict=True)] if total else list(part)
        if self.quads > 1:
            return butterfly(total, [step for step in ALL_STEPS if step >= self.quads])
        folded = fold(total, lane)
        return [ptx.shuffle_from(folded, Int32(8 * i)) for i in range(4)]

"""Which CTAs a chip holds at once: placement by registers, shared memory, warps and clusters.

A grid whose CTAs wait for each other, or kernels that poll what another one writes, end only where
all of them are resident together. `co_residency` says so before anything runs, and the simulator
places CTAs with the same `Chip`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.resources import (
    SM_CTAS,
    SM_REGISTERS,
    SM_SMEM,
    SM_WARPS,
    Resources,
    cta_registers,
    cta_smem,
)
from k3fuse.kernels.build.variant import Plan

# A cluster lives in one GPC. The chips have 8 GPCs of up to 10 pairs of SMs; which pairs are turned
# off differs from chip to chip, so an even split is assumed.
GPCS = 8


def gpc_sizes(sms: int) -> tuple[int, ...]:
    """SMs of each GPC, pairs split evenly: 152 -> 20 x 4 and 18 x 4, 148 -> 20 x 2 and 18 x 6."""
    pairs, odd = divmod(sms, 2)
    sizes = [2 * (pairs // GPCS + (gpc < pairs % GPCS)) for gpc in range(GPCS)]
    sizes[-1] += odd
    return tuple(size for size in sizes if size)


@dataclass(frozen=True)
class Footprint:
    """What one CTA holds of an SM. cluster: CTAs that are placed together. smem, with the system's
    1024 bytes, in bytes; registers as the chip deals them out to a CTA."""

    warps: int
    registers: int
    smem: int
    cluster: int = 1

    @classmethod
    def of(cls, threads: int, registers: int, smem: int, cluster: int = 1) -> Footprint:
        """From a launch: threads a CTA, registers a thread (0: not known, takes none), bytes of
        static and dynamic shared memory a CTA, CTAs a cluster."""
        warps = -(-threads // 32)
        return cls(warps, cta_registers(registers, warps), cta_smem(smem), cluster)

    @classmethod
    def built(cls, plan: Plan, resources: Resources) -> Footprint:
        """From a built kernel."""
        x, y, z = plan.cluster
        smem = plan.dynamic_smem + resources.static_smem
        return cls.of(plan.threads, resources.registers, smem, x * y * z)


class Chip:
    """Free registers, shared memory, warps and CTA slots of each SM; CTAs come and go by cluster.

    A CTA goes to the SM of its GPC that holds the fewest, a cluster to the GPC that has most room.
    """

    LIMITS = ("registers", "shared memory", "warps", "CTAs")

    def __init__(self, sms: int) -> None:
        if sms < 1:
            raise BuildError(f"sms is {sms}; use the number of SMs of a chip, for example 152")
        self.sms = sms
        self.gpc: NDArray[np.int64] = np.repeat(
            np.arange(len(gpc_sizes(sms))), np.array(gpc_sizes(sms))
        )
        whole = np.array([SM_REGISTERS, SM_SMEM, SM_WARPS, SM_CTAS])
        self.free: NDArray[np.int64] = np.tile(whole, (sms, 1))

    def take(self, need: Footprint) -> list[int] | None:
        """Place one cluster; the SM of each of its CTAs, or None where there is no room."""
        vector = _vector(need)
        room = _room(self.free, vector)
        if need.cluster == 1:
            # The emptiest SM of those with room; the first one at a tie.
            order = np.where(room > 0, self.free[:, 3] * 1024 + self.free[:, 2], -1)
            best = int(order.argmax())
            if order[best] < 0:
                return None
            self.free[best] -= vector
            return [best]
        by_gpc = np.bincount(self.gpc, weights=room).astype(np.int64)
        gpc = int(by_gpc.argmax())
        if by_gpc[gpc] < need.cluster:
            return None
        inside = np.flatnonzero(self.gpc == gpc)
        chosen: list[int] = []
        for _ in range(need.cluster):
            order = np.where(room[inside] > 0, self.free[inside, 3], -1)
            sm = int(inside[order.argmax()])
            self.free[sm] -= vector
            room[sm] -= 1
            chosen.append(sm)
        return chosen

    def give(self, sm: int, need: Footprint) -> None:
        """One CTA has left."""
        self.free[sm] += _vector(need)

    def obstacle(self, need: Footprint) -> str:
        """What a cluster that finds no room lacks: one of LIMITS, or "cluster placement"."""
        vector = _vector(need)
        room = _room(self.free, vector)
        if int(room.sum()) >= need.cluster:
            return "cluster placement"
        return self.LIMITS[int((self.free // np.maximum(vector, 1)).sum(axis=0).argmin())]


def _vector(need: Footprint) -> NDArray[np.int64]:
    return np.array([need.registers, need.smem, need.warps, 1])


def _room(free: NDArray[np.int64], vector: NDArray[np.int64]) -> NDArray[np.int64]:
    """CTAs that still fit on each SM."""
    fits: NDArray[np.int64] = (free // np.maximum(vector, 1)).min(axis=1)
    return fits


@dataclass(frozen=True)
class Member:
    """One of the grids that wait for each other: its name, its CTAs, and what one of them takes."""

    name: str
    ctas: int
    need: Footprint

    @classmethod
    def built(cls, plan: Plan, resources: Resources, name: str) -> Member:
        """From a built kernel."""
        return cls(name, plan.ctas, Footprint.built(plan, resources))


@dataclass(frozen=True)
class CoResidency:
    """Whether grids fit a chip together.

    fits: all CTAs are resident at once. placed: CTAs of each grid that found room, in the order
    given. bound: what the first cluster without room lacks ("registers", "shared memory", "warps",
    "CTAs", "cluster placement"), "" where all fit. free_slots: CTAs of the last grid that would
    have found room on top.
    """

    sms: int
    fits: bool
    members: tuple[Member, ...]
    placed: tuple[int, ...]
    bound: str
    free_slots: int

    def explain(self) -> str:
        """One line; where they do not fit, with the fix."""
        held = ", ".join(
            f"{placed} of {member.ctas} CTAs of {member.name}"
            for member, placed in zip(self.members, self.placed, strict=True)
        )
        if self.fits:
            return f"{self.sms} SMs hold {held} at once; room for {self.free_slots} more CTAs"
        place = next(i for i, m in enumerate(self.members) if self.placed[i] < m.ctas)
        member = self.members[place]
        fix = {
            "registers": f"use fewer than {member.need.registers} registers a CTA",
            "shared memory": f"use fewer than {member.need.smem} bytes of shared memory a CTA",
            "warps": f"use fewer than {member.need.warps} warps a CTA",
            "CTAs": "use fewer, larger CTAs",
            "cluster placement": f"use clusters smaller than {member.need.cluster} CTAs",
        }[self.bound]
        return (
            f"{self.sms} SMs hold only {held} at once, bound by {self.bound}: CTAs that wait for "
            f"those of {member.name} that are not resident never end; {fix}, or launch at most "
            f"{self.placed[place]} CTAs of {member.name}"
        )


def co_residency(members: Sequence[Member], sms: int) -> CoResidency:
    """Place all CTAs of grids that wait for each other on an empty chip, one grid after the other.

    That is the order of a stream: a producer's CTAs start before those of the successor that polls.
    Raises BuildError for no members, and for a CTA that no SM can hold.
    """
    if not members:
        raise BuildError("members is empty; give the grids that wait for each other")
    chip = Chip(sms)
    placed, bound = [], ""
    for member in members:
        if Chip(sms).take(member.need) is None:
            raise BuildError(
                f"{member.name}: no cluster of {member.need.cluster} CTAs fits {sms} SMs, bound by "
                f"{Chip(sms).obstacle(member.need)}; use smaller CTAs or clusters"
            )
        count = 0
        while count < member.ctas and not bound:
            if chip.take(member.need) is None:
                bound = chip.obstacle(member.need)
                break
            count += member.need.cluster
        placed.append(count)
    free = 0
    while not bound and chip.take(members[-1].need) is not None:
        free += members[-1].need.cluster
    return CoResidency(sms, not bound, tuple(members), tuple(placed), bound, free)


def require_co_residency(members: Sequence[Member], sms: int) -> CoResidency:
    """`co_residency`, or BuildError with the reason and the fix where they do not fit."""
    found = co_residency(members, sms)
    if not found.fits:
        raise BuildError(found.explain())
    return found

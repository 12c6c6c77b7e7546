"""Co-residency of grids that wait for each other, computed from resources alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.residency import (
    Chip,
    CoResidency,
    Footprint,
    Member,
    co_residency,
    gpc_sizes,
    require_co_residency,
)
from k3fuse.kernels.build.resources import SM_COUNTS, Resources, occupancy
from k3fuse.kernels.build.variant import Plan


def plan(ctas: int, threads: int = 256, smem: int = 0, cluster: int = 1) -> Plan:
    return Plan((ctas, 1, 1), (threads, 1, 1), (cluster, 1, 1), smem, ())


def member(ctas: int, registers: int = 32, name: str = "k", **options: int) -> Member:
    return Member.built(plan(ctas, **options), Resources(registers, 0, 0, 0), name)


@pytest.mark.parametrize("sms", SM_COUNTS)
def test_gpcs_of_the_chips(sms: int) -> None:
    sizes = gpc_sizes(sms)
    assert sum(sizes) == sms
    assert len(sizes) == 8
    assert max(sizes) - min(sizes) <= 2
    assert sizes == {152: (20,) * 4 + (18,) * 4, 148: (20,) * 2 + (18,) * 6,
                     132: (18,) * 2 + (16,) * 6}[sms]  # fmt: skip


@pytest.mark.parametrize("registers", [16, 32, 40, 56, 80, 96, 128, 168, 255])
@pytest.mark.parametrize("smem", [0, 3000, 50_000, 150_000, 232_448])
def test_one_grid_fits_as_often_as_its_occupancy_says(registers: int, smem: int) -> None:
    """Without clusters both ways of counting must agree."""
    for threads in (32, 96, 128, 160, 256, 512, 1024):
        found = occupancy(plan(1, threads, smem), Resources(registers, 0, 0, 0), 3)
        if not found.resident:
            with pytest.raises(BuildError, match="bound by registers"):
                co_residency([member(1, registers, threads=threads, smem=smem)], 3)
            continue
        full = member(found.resident, registers, threads=threads, smem=smem)
        assert co_residency([full], 3).fits
        assert co_residency([full], 3).free_slots == 0
        over = co_residency([replace(full, ctas=found.resident + 1)], 3)
        assert not over.fits
        assert over.placed == (found.resident,)
        assert over.bound == found.limit


def clusters(size: int, count: int, sms: int) -> CoResidency:
    return co_residency([member(size * count, smem=200_000, cluster=size)], sms)


@pytest.mark.parametrize(
    ("sms", "size", "most"),
    [
        (132, 16, 8),
        (148, 16, 8),
        (152, 16, 8),
        (152, 8, 16),
        (152, 4, 36),
        (148, 4, 34),
        (132, 2, 66),
    ],
)
def test_clusters_of_one_cta_an_sm_are_bound_by_their_gpc(sms: int, size: int, most: int) -> None:
    assert clusters(size, most, sms).fits
    found = clusters(size, most + 1, sms)
    assert not found.fits
    assert found.placed == (size * most,)
    assert found.bound == ("cluster placement" if sms - size * most >= size else "shared memory")


def test_a_producer_and_its_polling_successor() -> None:
    producer = member(112, 96, "produce", smem=100_000)
    consumer = member(56, 32, "consume", threads=512, smem=60_000)
    for sms in SM_COUNTS:
        found = require_co_residency([producer, consumer], sms)
        assert found.placed == (112, 56)
        assert f"{sms} SMs hold 112 of 112 CTAs of produce, 56 of 56 CTAs of consume" in (
            found.explain()
        )
    with pytest.raises(BuildError) as caught:
        require_co_residency([producer, replace(consumer, ctas=400)], 132)
    message = str(caught.value)
    assert "132 SMs hold only 112 of 112 CTAs of produce, " in message
    assert "bound by shared memory" in message
    assert "those of consume that are not resident never end; use fewer than 61056 bytes" in message


@pytest.mark.parametrize(
    ("big", "bound", "fix"),
    [
        (member(133, 255, threads=256), "registers", "use fewer than 65536 registers a CTA"),
        (member(133, 16, threads=1024, smem=150_000), "shared memory", "bytes of shared memory"),
        (member(265, 16, threads=1024), "warps", "use fewer than 32 warps a CTA"),
        (member(132 * 32 + 1, 16, threads=32), "CTAs", "use fewer, larger CTAs"),
        (member(108, 16, smem=150_000, cluster=12), "cluster placement", "smaller than 12 CTAs"),
    ],
)
def test_every_reason_has_its_fix(big: Member, bound: str, fix: str) -> None:
    found = co_residency([big], 132)
    assert (found.fits, found.bound) == (False, bound)
    assert fix in found.explain()
    fitting = replace(big, ctas=found.placed[0])
    assert co_residency([fitting], 132).fits, "as many as were placed do fit"


def test_slots_come_back() -> None:
    chip, need = Chip(2), Footprint.of(128, 32, 200_000)
    first, second = chip.take(need), chip.take(need)
    assert (first, second, chip.take(need)) == ([0], [1], None)
    assert chip.obstacle(need) == "shared memory"
    chip.give(0, need)
    assert chip.take(need) == [0]


def test_wrong_calls() -> None:
    with pytest.raises(BuildError, match="members is empty"):
        co_residency([], 132)
    with pytest.raises(BuildError, match="sms is 0; use the number of SMs"):
        co_residency([member(1)], 0)

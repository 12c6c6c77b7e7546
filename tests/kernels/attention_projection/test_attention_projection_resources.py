"""What the kernel takes of a chip: no spills, one wave; and what it does not cover."""

from __future__ import annotations

import pytest
from attention_runs import kernel

from k3fuse.kernels.attention_projection.builder import BUILDER, KDA, MLA, config_of, rows_shape
from k3fuse.kernels.attention_projection.config import Config
from k3fuse.kernels.attention_projection.stream_config import HEADER, StreamConfig
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.resources import occupancy
from k3fuse.kernels.common.gemm import SHARED_LIMIT
from stored import store

pytest.importorskip("cutlass")

SMS = (132, 148, 152)
REAL = [*KDA[8], *KDA[16], *MLA[8], *MLA[16]]


def fits(arch: str, rows: tuple[int, ...], m: int, stream: int = 0) -> None:
    built = store().get(kernel(m, rows, arch=arch, stream=stream))
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 0
    for sms in SMS:
        assert occupancy(built.plan, built.resources, sms).co_resident, f"{sms} SMs"


@pytest.mark.parametrize(
    ("arch", "rows", "m", "stream"),
    [
        ("sm_103a", KDA[8][0], 64, 0),
        ("sm_90a", KDA[16][1], 8, 0),
        ("sm_100a", KDA[8][1], 64, 1),
    ],
)
def test_the_largest(arch: str, rows: tuple[int, ...], m: int, stream: int) -> None:
    fits(arch, rows, m, stream)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arch", "stream"),
    [("sm_90a", 0), ("sm_100a", 0), ("sm_103a", 0), ("sm_100a", 1), ("sm_103a", 1)],
)
@pytest.mark.parametrize("rows", REAL)
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_every_kernel(arch: str, stream: int, rows: tuple[int, ...], m: int) -> None:
    fits(arch, rows, m, stream)


@pytest.mark.parametrize("m", [8, 64])
def test_weights_are_asked_for_before_the_predecessor_has_ended(m: int) -> None:
    variant = kernel(m, KDA[16][0])
    before, _, behind = store().get(variant).ptx.partition("griddepcontrol.wait")
    config = config_of(variant)
    assert isinstance(config, Config)
    grid = config.geometry
    assert before.count("ld.global.nc") == 4 * grid.ring
    assert behind.count("ld.global.nc") == 4 * (grid.blocks - grid.ring)
    assert "bulk" not in before  # x is the predecessor's


@pytest.mark.parametrize("m", [8, 64])
def test_the_ring_is_filled_before_the_predecessor_has_ended(m: int) -> None:
    variant = kernel(m, MLA[16][0], stream=1)
    before, _, behind = store().get(variant).ptx.partition("griddepcontrol.wait")
    config = config_of(variant)
    assert isinstance(config, StreamConfig)
    copy = "cp.async.bulk.tensor.2d"
    # Behind the ring's first blocks comes the loop over the others, then the warp that waits.
    assert before.split("barrier.cluster.arrive")[0].count(copy) == config.stages
    assert before.count(copy) == config.steps
    assert behind.count(copy) == config.blocks
    ahead, _, later = behind.partition("griddepcontrol.launch_dependents")
    assert ahead.count(copy) == config.blocks
    assert "tcgen05.mma" in later


@pytest.mark.parametrize("rows", REAL)
def test_rows_are_shared_out(rows: tuple[int, ...]) -> None:
    for m in (8, 16, 32, 64):
        config = config_of(kernel(m, rows, stream=1))
        assert isinstance(config, StreamConfig)
        plan = BUILDER.plan(kernel(m, rows, stream=1))
        assert plan.ctas == 128
        assert config.shared <= SHARED_LIMIT
        assert config.slots * config.tile * 16 <= 1.12 * sum(rows)
        assert config.stages * config.tile * 128 >= 60 * 1024
        assert config.early >= (1 if m == 64 else config.slots)
        # What lies where: the sums of late tiles in x, those of early ones behind it.
        ends = [config.sums_place(slot) + config.exchange for slot in range(config.slots)]
        assert max(ends[config.early :], default=0) <= config.x_place + config.x_bytes
        assert max(ends) <= config.shared
        assert config.barriers * 8 + 8 <= HEADER


@pytest.mark.parametrize("rows", REAL)
def test_tiles_are_shared_out(rows: tuple[int, ...]) -> None:
    for m in (8, 16, 32, 64):
        config = config_of(kernel(m, rows))
        assert isinstance(config, Config)
        grid = config.geometry
        plan = BUILDER.plan(kernel(m, rows))
        assert plan.ctas == 128
        assert grid.shared <= SHARED_LIMIT
        assert grid.passes * grid.warps >= grid.slots
        assert (grid.slots - 1) * grid.clusters < grid.tiles
        assert grid.ring >= 8


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 65}, {}, "m=65 is outside the kernel; use 1 to 64"),
        ({"m": 0}, {}, "m=0"),
        ({"k": 256}, {}, "k=256 is outside the kernel; use a multiple of 512 up to 7168"),
        ({"k": 7680}, {}, "k=7680"),
        ({"n0": -1}, {}, "n0=-1"),
        ({"n0": 8, "n2": 8}, {}, "n2=8 is outside the kernel; use rows, 0 behind the last"),
        ({"n0": 7000, "m": 64}, {"stream": 0}, "rows=7000 is outside the kernel"),
        ({"n0": 17_000, "m": 64}, {}, "rows=17000 is outside the kernel; use fewer rows or tokens"),
        ({"h": 1}, {}, "no shape 'h'"),
        ({}, {"warps": 4}, "no config 'warps'"),
        ({}, {"stream": 2}, "stream=2 is outside the kernel; use 0 or 1"),
        ({}, {"clusters": 0}, "clusters=0 is outside the kernel; use 1 to 16"),
        ({}, {"stages": 15}, "stages=15 is outside the kernel; use 1 to 14"),
        ({}, {"stream": 0, "early": 3}, "early=3 is outside the kernel; use 32, it limits the str"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)
    BUILDER.variant("sm_103a", rows_shape((8, 8)), {})  # the control


def test_chips_without_tcgen05_have_the_stationary_kernel_alone() -> None:
    assert BUILDER.variant("sm_90a", {}, {}).tuning("stream") == 0
    assert BUILDER.variant("sm_100a", {}, {}).tuning("stream") == 1
    with pytest.raises(VariantError, match="stream=1 is outside the kernel; use 0: sm_90a has no"):
        BUILDER.variant("sm_90a", {}, {"stream": 1})
    assert {v.tuning("stream") for v in BUILDER.variants("sm_90a")} == {0}
    assert {v.tuning("stream") for v in BUILDER.variants("sm_103a")} == {0, 1}

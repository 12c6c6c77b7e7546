"""What the kernel takes of a chip: no spills, one wave; and what it does not cover."""

from __future__ import annotations

import pytest
from attention_runs import kernel

from k3fuse.kernels.attention_projection.builder import BUILDER, KDA, MLA, config_of, rows_shape
from k3fuse.kernels.build.compile import compile_variant
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.resources import occupancy
from k3fuse.kernels.common.gemm import SHARED_LIMIT

pytest.importorskip("cutlass")

SMS = (132, 148, 152)
REAL = [*KDA[8], *KDA[16], *MLA[8], *MLA[16]]


def fits(arch: str, rows: tuple[int, ...], m: int) -> None:
    built = compile_variant(kernel(m, rows, arch=arch))
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 0
    for sms in SMS:
        assert occupancy(built.plan, built.resources, sms).co_resident, f"{sms} SMs"


@pytest.mark.parametrize(
    ("arch", "rows", "m"),
    [("sm_103a", KDA[8][0], 64), ("sm_90a", KDA[16][1], 8)],
)
def test_the_largest(arch: str, rows: tuple[int, ...], m: int) -> None:
    fits(arch, rows, m)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("rows", REAL)
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_every_kernel(arch: str, rows: tuple[int, ...], m: int) -> None:
    fits(arch, rows, m)


@pytest.mark.parametrize("m", [8, 64])
def test_weights_are_asked_for_before_the_predecessor_has_ended(m: int) -> None:
    variant = kernel(m, KDA[16][0])
    before, _, behind = compile_variant(variant).ptx.partition("griddepcontrol.wait")
    grid = config_of(variant).geometry
    assert before.count("ld.global.nc") == 4 * grid.ring
    assert behind.count("ld.global.nc") == 4 * (grid.blocks - grid.ring)
    assert "bulk" not in before  # x is the predecessor's


@pytest.mark.parametrize("rows", REAL)
def test_tiles_are_shared_out(rows: tuple[int, ...]) -> None:
    for m in (8, 16, 32, 64):
        grid = config_of(kernel(m, rows)).geometry
        plan = BUILDER.plan(kernel(m, rows))
        assert plan.ctas == 128
        assert grid.shared <= SHARED_LIMIT
        assert grid.passes * grid.warps >= grid.slots
        assert (grid.slots - 1) * grid.clusters < grid.tiles
        assert grid.ring >= 8


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"m": 65}, "m=65 is outside the kernel; use 1 to 64"),
        ({"m": 0}, "m=0"),
        ({"k": 256}, "k=256 is outside the kernel; use a multiple of 512 up to 7168"),
        ({"k": 7680}, "k=7680"),
        ({"n0": -1}, "n0=-1"),
        ({"n0": 8, "n2": 8}, "n2=8 is outside the kernel; use rows, 0 behind the last"),
        ({"n0": 7000, "m": 64}, "rows=7000 is outside the kernel"),
        ({"h": 1}, "no shape 'h'"),
    ],
)
def test_what_no_kernel_covers_is_refused(shape: dict[str, int], message: str) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, {})
    BUILDER.variant("sm_103a", rows_shape((8, 8)), {})  # the control
    with pytest.raises(VariantError, match="no config 'warps'"):
        BUILDER.variant("sm_103a", {}, {"warps": 4})

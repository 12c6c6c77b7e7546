"""What the tail takes of a chip: no spills, and a grid that fits at once."""

from __future__ import annotations

import pytest

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.resources import occupancy
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.tail.builder import BUILDER, config_of
from stored import store

pytest.importorskip("cutlass")

SMS = (132, 148, 152)


def fits(variant: Variant) -> None:
    built = store().get(variant)
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 0
    for sms in SMS:
        assert occupancy(built.plan, built.resources, sms).co_resident, f"{sms} SMs"


def test_the_largest_kernel() -> None:
    fits(BUILDER.variant("sm_103a", {"tp": 8, "m": 64}, {}))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_every_kernel(arch: str, tp: int, m: int) -> None:
    for two_shot in (0, 1):
        for multicast in (0, 1):
            for timeout in (0, 1000):
                tuning = {"two_shot": two_shot, "multicast": multicast, "timeout": timeout}
                fits(BUILDER.variant(arch, {"tp": tp, "m": m}, tuning))


@pytest.mark.parametrize(
    "arch",
    ["sm_103a", *(pytest.param(a, marks=pytest.mark.nightly) for a in ("sm_90a", "sm_100a"))],
)
def test_the_kernel_with_attn_res(arch: str) -> None:
    fits(BUILDER.variant(arch, {"tp": 16}, {"blocks": 8}))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("blocks", range(9))
def test_every_kernel_with_attn_res(arch: str, tp: int, blocks: int) -> None:
    # Output norm, mix rounded before it, multicast, time-out: stores to every rank take addresses.
    for norm, round_mix, multicast, timeout in ((1, 0, 1, 0), (1, 1, 0, 1000), (0, 0, 0, 0)):
        tuning = {
            "blocks": blocks, "norm": norm, "round_mix": round_mix, "multicast": multicast,
            "timeout": timeout,
        }  # fmt: skip
        fits(BUILDER.variant(arch, {"tp": tp}, tuning))


@pytest.mark.parametrize(
    ("tp", "m", "grid"), [(8, 8, 112), (8, 16, 56), (8, 64, 56), (16, 8, 56), (16, 64, 56)]
)
def test_many_tokens_take_few_clusters(tp: int, m: int, grid: int) -> None:
    variant = BUILDER.variant("sm_103a", {"tp": tp, "m": m}, {})
    assert BUILDER.plan(variant).grid == (grid, 1, 1)
    assert config_of(variant).hidden == 7168


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 65}, {}, "m=65 is outside the kernel; use 1 to 64"),
        ({"tp": 3}, {}, "tp=3 is outside the kernel; use 2, 4, 8 or 16"),
        ({"rows": 96}, {}, "rows=96 is outside the kernel; use a multiple of 64 up to 896"),
        ({"rows": 64}, {"units": 2}, "rows=64 is outside the kernel; use a multiple of 128"),
        ({"rows": 960}, {}, "rows=960 is outside the kernel"),
        ({}, {"units": 3}, "units=3 is outside the kernel; use 1 or 2"),
        ({}, {"max_m": 4}, "max_m=4 is outside the kernel; use m to 64"),
        ({}, {"two_shot": 2}, "two_shot=2 is outside the kernel; use 0 or 1"),
        ({}, {"timeout": -1}, "timeout=-1 is outside the kernel; use 0 or more"),
        ({"k": 1}, {}, "no shape 'k'"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)


def test_packed_arithmetic_needs_its_architecture() -> None:
    assert not config_of(BUILDER.variant("sm_90a", {}, {})).packed
    with pytest.raises(VariantError, match="packed=1"):
        BUILDER.variant("sm_90a", {}, {"packed": 1})

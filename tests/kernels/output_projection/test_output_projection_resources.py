"""What every kernel takes of a chip: no spills anywhere, and grids that wait fit at once."""

from __future__ import annotations

import pytest

from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.resources import occupancy
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.output_projection.builder import BUILDER
from k3fuse.kernels.output_projection.config import CONSUMER, FUSED, PRODUCER
from stored import store

pytest.importorskip("cutlass")

ARCHS = ("sm_90a", "sm_103a")
SMS = (132, 148, 152)


def fits(variant: Variant) -> None:
    built = store().get(variant)
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 0
    for sms in SMS:
        assert occupancy(built.plan, built.resources, sms).co_resident, f"{sms} SMs"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp", [8, 16])
def test_the_fused_kernel(arch: str, tp: int) -> None:
    fits(BUILDER.variant(arch, {"tp": tp}, {"stage": FUSED, "multicast": int(tp == 8)}))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("tp", "two_shot"), [(8, 1), (16, 0)])
def test_producer_and_consumer(arch: str, tp: int, two_shot: int) -> None:
    for stage in (PRODUCER, CONSUMER):
        tuning = {"stage": stage, "two_shot": two_shot}
        fits(BUILDER.variant(arch, {"tp": tp, "m": 64}, tuning))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("blocks", range(-1, 9))
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("stage", [FUSED, CONSUMER])
def test_every_consumer(arch: str, blocks: int, tp: int, stage: int) -> None:
    # Stores to every rank take more addresses than the multicast store.
    for two_shot in (0, 1) if stage == CONSUMER else (0,):
        for timeout in (0, 1000):
            tuning = {
                "stage": stage, "blocks": blocks, "multicast": 0, "two_shot": two_shot,
                "timeout": timeout,
            }  # fmt: skip
            m = 8 if stage == FUSED else 64
            fits(BUILDER.variant(arch, {"tp": tp, "m": m}, tuning))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("blocks", range(9))
def test_every_attn_res(arch: str, blocks: int) -> None:
    for delta in (0, 1):
        for round_mix in (0, 1):
            tuning = {"delta": delta, "round_mix": round_mix}
            fits(ATTN_RES.variant(arch, {"m": 64, "blocks": blocks}, tuning))


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 9}, {}, "m=9 is outside the kernel; use 1 to 8"),
        ({"m": 65}, {"stage": PRODUCER}, "m=65 is outside the kernel; use 1 to 64"),
        ({"tp": 4}, {}, "tp=4 is outside the kernel; use 8 or 16"),
        ({"k": 512}, {}, "k=512"),
        ({}, {"blocks": 9}, "blocks=9 is outside the kernel; use -1 to 8"),
        ({}, {"blocks": -1, "prefix": 0}, "prefix=1 and norm=1"),
        ({}, {"round_before": 1}, "round_before=1"),
        ({}, {"two_shot": 1}, "two_shot=1"),
        ({}, {"max_m": 4}, "max_m=4"),
        ({}, {"stage": 3}, "stage=3 is outside the kernel; use 0, 1 or 2"),
        ({}, {"warps": 4}, "no config 'warps'"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 65}, {}, "m=65 is outside the kernel; use 1 to 64"),
        ({"blocks": 9}, {}, "blocks=9 is outside the kernel; use 0 to 8"),
        ({}, {"delta": 2}, "delta=2 is outside the kernel; use 0 or 1"),
        ({"h": 1}, {}, "no shape 'h'"),
    ],
)
def test_attn_res_that_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        ATTN_RES.variant("sm_103a", shape, config)

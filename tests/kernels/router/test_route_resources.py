"""What the route kernel takes of a chip, its instructions, and what it does not cover."""

from __future__ import annotations

import pytest
from route_runs import core, kernel, run

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.resources import occupancy
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.router.route_builder import BUILDER
from k3fuse.kernels.router.route_problem import make
from stored import store

pytest.importorskip("cutlass")

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
SMS = (132, 148, 152)
# vLLM's route and copy CTAs for one token, all instructions counted, without MXFP8 (docs page).
BASELINE = 2_900


def fits(variant: Variant) -> None:
    built = store().get(variant)
    assert built.resources.spill_bytes == 0
    assert built.resources.stack_bytes == 0
    assert built.resources.registers <= 64
    for sms in SMS:
        assert occupancy(built.plan, built.resources, sms).co_resident, f"{sms} SMs"


def test_the_largest_on_hopper() -> None:
    fits(BUILDER.variant("sm_90a", {"m": 64, "tp": 16}, {"quantize": 1, "plan": 1}))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel(arch: str) -> None:
    for variant in BUILDER.variants(arch):
        fits(variant)
    for tp in (8, 16):
        for m in (1, 2, 4, 8, 16, 32, 64):
            fits(BUILDER.variant(arch, {"m": m, "tp": tp}, {"quantize": 1, "plan": int(m > 8)}))


def test_instructions_of_a_token() -> None:
    variant = kernel(4, {"tp": 8}, quantize=1)
    for m in (1, 4):
        problem = make(variant, m, seed=m)
        report = run(problem, variant).reports[0]
        if m == 4:
            assert report.sim.warp_instructions / m <= BASELINE
            assert core(report) / m <= 2_650
        # Rows are read once, but for the call's number, and written once.
        asked = sum(traffic.requested for traffic in report.traffic.values())
        assert asked / sum(report.needed.values()) <= 1.15


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 65}, {}, "m=65 is outside the kernel; use 1 to 64"),
        ({"e": 1025}, {}, "e=1025 is outside the kernel; use 1 to 1024"),
        ({"k": 33}, {}, "k=33 is outside the kernel; use 1 to 32, 0 for gather"),
        ({"e": 8, "k": 9, "tp": 1}, {}, "k=9 is outside the kernel; use 1 to 8"),
        ({"e": 895}, {}, "e=895 is outside the kernel; use a multiple of 32 with a mailbox"),
        ({"l": 3592, "tp": 16}, {}, "l=3592"),
        ({"l": 3600}, {"quantize": 1}, "l=3600 is outside the kernel; use a multiple of 32"),
        ({"l": 0}, {"quantize": 1}, "quantize=1 without a latent row"),
        ({"m": 64, "k": 17}, {"plan": 1}, "k=17 is outside the kernel; use m k of 1 to 1024"),
        ({"k": 0}, {"local_logits": 1, "local_latent": 1}, "nothing is left to do"),
        ({}, {"max_m": 4}, "max_m=4 is outside the kernel; use m to 64"),
        ({}, {"softmax": 2}, "softmax=2"),
        ({}, {"timeout": -1}, "timeout=-1"),
        ({"tp": 0}, {}, "tp=0"),
        ({"n": 1}, {}, "no shape 'n'"),
        ({}, {"warps": 4}, "no config 'warps'"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)
    BUILDER.variant("sm_103a", {"e": 895, "tp": 1, "l": 0}, {"local_logits": 1})  # the control

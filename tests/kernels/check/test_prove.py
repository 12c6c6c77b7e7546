"""`check_case`: right kernels pass every gate, each planted fault fails the gate it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hand_kernels import (
    FIRST_BARRIER,
    GB300,
    NEVER_RAISED,
    NO_ACQUIRE,
    NO_REARM,
    NO_RELEASE,
    SECOND_BARRIER,
    WRONG_SCOPE,
    double,
    double_case,
    exchange_case,
)
from k3fuse.kernels.check import Case, CheckTarget, check_case
from k3fuse.kernels.common.tolerances import Tolerance, compare, tolerance


def failed(case: Case, *gates: str) -> str:
    """The detail of the first of the gates, which alone must have failed."""
    result = check_case(case, GB300)
    assert not result.passed
    wrong = [g for g in result.gates if not g.passed]
    assert [g.name for g in wrong] == list(gates)
    return wrong[0].detail


@pytest.mark.parametrize("case", [double_case(), exchange_case()], ids=lambda c: c.name)
def test_a_right_kernel_passes(case: Case) -> None:
    seen: list[tuple[str, int, int]] = []
    result = check_case(case, GB300, progress=lambda *step: seen.append(step))
    assert result.passed
    gates = ("build", "resources", "numerics", "garbage", "protocol", "races")
    assert {gate.name: gate.passed for gate in result.gates} == dict.fromkeys(gates, True)
    assert result.races == ()
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert len(seen) == seen[0][2]
    (row,) = result.to_json()
    assert row["passed"] is True
    assert (row["registers"], row["spill_bytes"], row["seeds"]) == (32, 0, 5)
    assert row["ranks"] == (2 if case.name == "exchange" else 1)
    assert row["max_error"] == 0.0
    assert row["warp_instructions"] > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("add.f32 %f1, %f0, %f0", "fma.rn.f32 %f1, %f0, 0f40000011, 0f00000000"), "outside"),
        (("st.global.f32 [%d1]", "st.global.f32 [%d1+128]"), "out-of-bounds write"),
        (("add.s64 %d0, %p0, %b4", "add.s64 %d0, %p1, %b4"), "before anyone wrote it"),
        (("add.f32 %f1, %f0, %f0", "add.f32 %f1, %f0, %f9"), "is read before it is written"),
    ],
)
def test_wrong_kernels_fail(change: tuple[str, str], message: str) -> None:
    detail = failed(double_case(double(change)), "numerics")
    assert message in detail


def test_a_missing_store_is_a_wrong_number() -> None:
    half = double(("st.global.f32 [%d1]", "setp.gt.u32 %q0, %t, 30;\n  @!%q0 st.global.f32 [%d1]"))
    assert "1 of 32 elements outside the tolerance, worst at (0, 31)" in failed(
        double_case(half), "numerics"
    )


def test_missing_barriers_are_found() -> None:
    """The first one shows under random schedules only; without the other, warps read too early."""
    early = "of buffer 'inbox' of rank 0 (256 bytes) before anyone wrote it"
    assert early in failed(exchange_case(FIRST_BARRIER), "protocol", "races")
    assert early in failed(exchange_case(SECOND_BARRIER), "numerics", "races")


@pytest.mark.parametrize("change", [NO_RELEASE, NO_ACQUIRE, WRONG_SCOPE], ids=str)
def test_what_memory_order_breaks_is_a_race(change: tuple[str, str]) -> None:
    """No schedule shows it: the simulated memory is sequentially consistent."""
    result = check_case(exchange_case(change), GB300)
    assert [g.name for g in result.gates if not g.passed] == ["races"]
    assert result.races is not None
    place = "'flag'" if change is WRONG_SCOPE else "inbox'"
    assert any(place in race for race in result.races)
    assert result.to_json()[0]["races"] == len(result.races) >= 1


def test_a_flag_that_stays_up_breaks_the_invariant() -> None:
    assert "flags are down: the flag of rank 0 is still up" in failed(
        exchange_case(NO_REARM), "numerics"
    )


def test_a_flag_that_is_never_raised_is_a_deadlock() -> None:
    detail = failed(exchange_case(NEVER_RAISED), "numerics")
    assert detail.startswith("deadlock after ")
    assert "reads 0x0 from byte 0 of buffer 'flag' of rank 0 (4 bytes) again and again" in detail


def test_resources_are_a_gate() -> None:
    assert "spills 8 bytes" in failed(double_case(double(resources=(32, 8))), "resources")
    wide = double(resources=(200, 0))
    assert "takes 200 registers a thread; at most 128 are allowed" in failed(
        double_case(wide, max_registers=128), "resources"
    )
    # 152 SMs hold 32 CTAs of one warp each.
    grid = double(ctas=152 * 32 + 1)
    case = double_case(grid, waits=True)
    assert "152 SMs hold only 4864 of 4865 CTAs" in failed(case, "resources")
    assert check_case(replace(case, waits=False), GB300, seeds=1).passed


def test_a_check_that_cannot_fail_fails() -> None:
    case = double_case()

    def loose(seed: int) -> object:
        step = case.step(seed)
        return replace(
            step, outputs=tuple(replace(o, tolerance=Tolerance(9, 9, 9)) for o in step.outputs)
        )

    blind = replace(case, step=loose)  # type: ignore[arg-type]
    assert "y of rank 0: 'shifted rows' would pass" in failed(blind, "garbage")
    assert "no garbage to refuse" in failed(replace(case, garbage={}), "garbage")
    empty = replace(case, step=lambda s: replace(case.step(s), outputs=()))
    assert "states no output" in failed(empty, "numerics")


def test_every_target_has_its_chip() -> None:
    assert CheckTarget("x", "sm_90a", 8).sms == 132
    with pytest.raises(ValueError, match="'sm_80' has no SM count; use one of sm_90a"):
        _ = CheckTarget("x", "sm_80", 8).sms


# --- the comparison -----------------------------------------------------------------------------


def test_a_hundredth_is_seen_in_bf16() -> None:
    """Element by element, 1.01 is about one ULP of BF16; over a tensor it is far off."""
    exact = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    wanted = exact.bfloat16()
    band = tolerance(torch.bfloat16, 768)
    assert compare(wanted, wanted, band).ok
    # An FP32 sum in another order: errors far below a rounding, which flip some of them.
    noise = 1 + 1e-5 * torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    other = (exact * noise).bfloat16()
    assert not torch.equal(other, wanted)
    assert compare(other, wanted, band).ok
    found = compare((exact * 1.01).bfloat16(), wanted, band)
    assert not found.ok
    assert found.outside < 0.1 * wanted.numel()
    assert found.rms_error == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_wrong_unless_expected(value: float) -> None:
    wanted = torch.ones(4)
    wrong = wanted.clone()
    wrong[2] = value
    band = tolerance(torch.float32, 1)
    found = compare(wrong, wanted, band)
    assert (found.ok, found.outside, found.worst) == (False, 1, (2,))
    assert compare(wrong, wrong.clone(), band).ok
    assert not compare(wanted, wrong, band).ok


def test_integers_are_exact() -> None:
    ids = torch.arange(8)
    band = tolerance(ids.dtype, 768)
    assert compare(ids, ids.clone(), band).ok
    assert compare(ids + (ids == 3), ids, band).outside == 1
    with pytest.raises(ValueError, match="compare tensors of one form"):
        compare(ids, ids[:4], band)
    with pytest.raises(ValueError, match="has no tolerance; use one of"):
        tolerance(torch.complex64, 1)

"""The L2 prefetch: every byte of its ranges once, nothing else, and only where it is turned on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from host_ranks import Recorder
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.check import run
from k3fuse.kernels.common.policy import MAX_M
from k3fuse.kernels.prefetch import policy
from k3fuse.kernels.prefetch.builder import BUILDER, MAX_RANGES
from k3fuse.kernels.prefetch.launch import launch, table
from k3fuse.kernels.simulator import MemoryAccessError
from stored import store

SIZES = (16, 40_000, 1_200_000)


def values(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    ranges = {f"range{i}": torch.zeros(n // 4, dtype=torch.int32) for i, n in enumerate(SIZES)}
    return {**ranges, **{f"bytes{i}": n for i, n in enumerate(sizes)}}


def test_every_byte_is_requested_once() -> None:
    pytest.importorskip("cutlass")
    variant = BUILDER.variant("sm_103a", {"ranges": 3}, {"ctas": 2})
    report = run(variant, [values()], cache=store())
    for i, size in enumerate(SIZES):
        part = report.traffic[0, f"range{i}", 0, "read"]
        assert part.requested == part.distinct == size
    assert {way for _, _, _, way in report.traffic} == {"read"}
    assert report.built.resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((32, 40_000, 1_200_000), "prefetch"), ((16, 39_992, 1_200_000), "no multiple of 16")],
)
def test_the_simulator_checks_what_is_asked_for(sizes: tuple[int, ...], message: str) -> None:
    pytest.importorskip("cutlass")
    variant = BUILDER.variant("sm_103a", {"ranges": 3}, {"ctas": 2})
    with pytest.raises(MemoryAccessError, match=message):
        run(variant, [values(sizes)], cache=store())


def test_the_policy_turns_it_on_nowhere() -> None:
    recorder: Any = Recorder()
    weights = [torch.zeros(64, dtype=torch.bfloat16)]
    for target in ("gb300:tp8", "gb300:tp16", "reference"):
        assert not any(policy.wanted(target, m) for m in range(1, MAX_M + 1))
        assert launch(target, 8, weights, runtime=recorder) == 0
    assert recorder.launched == []
    # The control: turned on, it is one launch with the table as its parameters.
    assert launch("gb300:tp8", 8, weights, runtime=recorder, on=lambda *_: True) == 1
    ((variant, given),) = recorder.launched
    assert variant == BUILDER.variant("sm_103a", {"ranges": 1}, {})
    assert given == (weights[0].data_ptr(), 128)


def test_ranges_are_whole_pieces_of_16_bytes() -> None:
    rows = torch.zeros(100, dtype=torch.bfloat16)
    assert table([rows]) == [(rows.data_ptr(), 192)]
    assert table([rows[4:]]) == [(rows.data_ptr() + 16, 176)]
    assert table([rows[1:4]])[0][1] == 0
    with pytest.raises(ValueError, match=r"weights\[1\] has .* give a contiguous one"):
        table([rows, rows.view(10, 10).t()])
    with pytest.raises(ValueError, match="there are 17 weights; give 1 to 16"):
        table([rows] * (MAX_RANGES + 1))


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"ranges": 17}, {}, "ranges=17 is outside the kernel; use 1 to 16"),
        ({}, {"ctas": 65}, "ctas=65 is outside the kernel; use 1 to 64"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)

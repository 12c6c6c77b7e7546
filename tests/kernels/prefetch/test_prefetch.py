"""The L2 prefetch: every byte of its ranges once, nothing else, and only where it is turned on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.attention_projection.share import Share
from k3fuse.kernels.attention_projection.stream_config import CLUSTER, ROW, StreamConfig
from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.check import run
from k3fuse.kernels.common.policy import MAX_M
from k3fuse.kernels.output_projection.launch import Form, Residual
from k3fuse.kernels.output_projection.launch import launch as launch_projection
from k3fuse.kernels.output_projection.policy import TABLE as OUTPUT_PROJECTION
from k3fuse.kernels.prefetch import policy
from k3fuse.kernels.prefetch.builder import BUILDER, MAX_RANGES, RANGES
from k3fuse.kernels.prefetch.launch import NOTHING, Ahead, given, launch, table
from k3fuse.kernels.router.front_builder import config_of as front_config
from k3fuse.kernels.router.launch import front_variant
from k3fuse.kernels.router.policy import TABLE as ROUTER
from k3fuse.kernels.simulator import MemoryAccessError
from stored import store

SIZES = (16, 40_000, 1_200_000)


def values(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    ranges = {f"range{i}": torch.zeros(n // 4, dtype=torch.int32) for i, n in enumerate(SIZES)}
    return {**ranges, **{f"bytes{i}": n for i, n in enumerate(sizes)}}


def test_a_kernel_is_built_for_each_number_of_ranges() -> None:
    assert [v.size("ranges") for v in BUILDER.variants("sm_103a")] == list(RANGES) == [4, 8, 16]


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


def test_the_policy_has_a_row_up_to_eight_tokens() -> None:
    weights = [torch.zeros(64, dtype=torch.bfloat16)]
    for target in ("gb300:tp8", "gb300:tp16"):
        recorder: Any = Recorder()
        made = [launch(target, m, Ahead(weights), 0, runtime=recorder) for m in range(1, MAX_M + 2)]
        assert made == [1] * 8 + [0] * 57
        assert len(recorder.launched) == 8
        # Fewer ranges than the kernel was built for: the last ones are empty.
        variant, given = recorder.launched[0]
        assert variant == BUILDER.variant("sm_103a", {"ranges": 4}, {})
        assert given == (weights[0].data_ptr(), 0, 0, 0, 128, 0, 0, 0)
        assert launch(target, 1, NOTHING, 0, runtime=recorder) == 0
    assert policy.row_of("gb200:tp8", 1) is None


def test_each_rank_asks_for_its_rows() -> None:
    """The shares are those that the router's front kernel multiplies."""
    gate, latent, gate_up = torch.zeros(896, 8), torch.zeros(3584, 8), torch.zeros(1536, 8)
    ahead = Ahead([gate, latent, gate_up], (896, 3584, 0))
    row = ROUTER.lookup("gb300:tp8", 1)
    assert row is not None
    front = front_config(front_variant(row, "gb300:tp8", 7168, 896, 3584, True, 768))
    for rank in range(8):
        parts = ahead.parts(8, rank)
        assert tuple(p.shape[0] for p in parts) == front.rows == (112, 448, 1536)
        assert [p.data_ptr() for p in parts] == [
            gate[112 * rank :].data_ptr(), latent[448 * rank :].data_ptr(), gate_up.data_ptr()
        ]  # fmt: skip
    # Leading rows are split, what follows is the rank's own: row-sharded latent attention.
    share = Share(8, (3648,), (2112,), multicast=True)
    weight = torch.zeros(3648, 8)
    for rank in range(8):
        want = [part.of(weight, rank) for part in share.parts]
        got = Ahead([weight], (2112,)).parts(8, rank)
        assert [(p.data_ptr(), p.shape) for p in got] == [(p.data_ptr(), p.shape) for p in want]


@pytest.mark.parametrize(
    ("weights", "split", "message"),
    [
        ([torch.zeros(4, 4).t()], (), r"prefetch\[0\] has strides \(1, 4\); give a contiguous"),
        ([torch.zeros(4, 4)], (1, 2), "prefetch_split=.1, 2. for 1 weights"),
        ([torch.zeros(4, 4)], (5,), r"prefetch_split\[0\]=5; prefetch\[0\] has 4 rows"),
    ],
)
def test_what_cannot_be_asked_for_is_named(
    weights: list[torch.Tensor], split: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Ahead(weights, split)
    with pytest.raises(ValueError, match=message):
        given(weights, split)


def test_rows_have_to_divide_and_no_list_is_none() -> None:
    with pytest.raises(ValueError, match="4 rows do not divide by 8 ranks"):
        Ahead([torch.zeros(4, 4)], (4,)).parts(8, 0)
    assert given(None, ()) == given([], ()) == NOTHING


def test_the_cap_is_what_the_next_projection_has_room_for() -> None:
    """The least of the four shapes of an attention projection, at the largest count with a row."""
    rings = []
    for tp in (8, 16):
        for rows in (4 * 12288 // tp + 128 + 96 // tp, 12288 // tp + 2112):
            config = StreamConfig(policy.MOST_TOKENS, 7168, (rows,))
            rings.append(config.stages * config.tile * ROW * config.clusters * CLUSTER)
    assert min(rings) == policy.MOST_BYTES == 18 * 2**20


def test_the_cap_cuts_the_last_range_and_drops_the_rest() -> None:
    weights = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
    starts = [-w.data_ptr() % 16 for w in weights]
    assert starts == [0, 0, 0]
    assert [size for _, size in table(weights, 150)] == [96, 48]
    assert [size for _, size in table(weights, 100)] == [96]
    assert [size for _, size in table(weights)] == [96, 96, 96]


@pytest.mark.parametrize("m", [1, 9])
def test_it_is_launched_before_the_projection(m: int) -> None:
    ranks = HostRanks(8, multicast=True)
    recorder: Any = Recorder()
    row = OUTPUT_PROJECTION.lookup("gb300:tp8", m)
    assert row is not None
    norm = torch.zeros(7168, dtype=torch.bfloat16)
    form = Form(-1, True, True, True, True)
    rows = torch.zeros(m, 7168, dtype=torch.bfloat16)
    residual = Residual(form, rows, (), None, None, norm, 1e-5, 1e-5)
    x, weight = rows[:, :1536], torch.zeros(7168, 1536, dtype=torch.bfloat16)
    gate = torch.zeros(896, 16, dtype=torch.bfloat16)
    launch_projection(
        row, "gb300:tp8", "tp", x, weight, residual, Ahead([gate], (896,)), runtime=recorder,
        space=lambda *_: ranks.spaces[3],
    )  # fmt: skip
    own = ["output_projection"] * row.launches
    ops = [variant.op for variant, _ in recorder.launched]
    assert ops == (["l2_prefetch", *own] if m <= 8 else own)
    if m <= 8:
        assert recorder.launched[0][1][:1] == (gate[3 * 112].data_ptr(),)


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

"""Geometry, tensor memory, registers and residency of the block-scaled engine; what it refuses."""

from __future__ import annotations

import re
from itertools import product

import pytest
from block_runs import HALVES, LINES, block, settings

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.residency import Footprint, Member, require_co_residency
from k3fuse.kernels.experts.block_config import (
    BLOCK_PITCH,
    MMA_ROWS,
    MOST_BLOCKS,
    PIECE,
    ROW_PITCH,
    SCALE_COLUMNS,
    SPAN,
    TILE_BYTES,
)
from k3fuse.kernels.experts.block_shuffled import end_barriers
from k3fuse.kernels.experts.builder import BUILDER, k3
from k3fuse.kernels.experts.config import SHARED_LIMIT, THREADS
from stored import store

# Bytes of weights under way on a CTA: 60 KB on each of 128 SMs are 7.9 MB, 8 TB/s for 1 us.
UNDER_WAY = {8: 54 * 1024, 16: 54 * 1024, 32: 42 * 1024, 64: 30 * 1024}


ORDERS = pytest.mark.parametrize("shuffled", [0, 1], ids=["rows", "shuffled"])


@ORDERS
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_one_wave_whatever_the_registers(tp: int, m: int, shuffled: int) -> None:
    how = {"block": 1, "shuffled": shuffled}
    variant = BUILDER.variant("sm_103a", k3(tp, m), how)
    assert settings(BUILDER.variant("sm_103a", k3(tp, m), {**how, "mxfp8": 1})).mxfp8
    plan, config = BUILDER.plan(variant), settings(variant)
    assert plan.ctas == 128
    assert plan.dynamic_smem <= SHARED_LIMIT
    need = Footprint.of(THREADS, 255, plan.dynamic_smem, 8)
    for sms in (132, 148, 152):
        require_co_residency([Member(variant.label, plan.ctas, need)], sms)
    # A tile of FC1 and one of FC2 are three quarters and seven eighths full, at both sizes.
    assert config.bytes1 == 6144
    assert config.rows2 * config.inter // 2 == config.stages2 * 7168
    other = settings(BUILDER.variant("sm_103a", k3(tp, m), {"block": 1, "shuffled": 1 - shuffled}))
    assert config.stages == other.stages
    assert config.stages * config.bytes1 >= UNDER_WAY[m]


REAL = [k3(8, 8), k3(16, 8), k3(8, 64), k3(16, 64)]
SHAPES = [*((s, 0) for s in (LINES, HALVES, *REAL)), *((s, 1) for s in (HALVES, *REAL))]


@pytest.mark.parametrize(("shape", "shuffled"), SHAPES)
def test_regions_follow_one_another(shape: dict[str, int], shuffled: int) -> None:
    clusters = 16 if shape["inter"] * shape.get("tp", 0) == 3072 else 1
    config = settings(block(shape, shape.get("m", 64), clusters=clusters, shuffled=shuffled))
    starts = [
        config.totals + 32, config.order, config.list, config.sums, config.rows,
        config.first_scales, config.token_scales, config.second_scales, config.hidden_scales,
        config.hidden8, config.ring,
    ]  # fmt: skip
    assert starts == sorted(starts)
    barriers = [config.product2 + 8 * turn for turn in range(config.rounds)]
    barriers += end_barriers(config)
    assert barriers == sorted(set(barriers))
    assert config.held >= barriers[-1] + 8
    assert config.rows - config.sums >= MMA_ROWS * ROW_PITCH
    assert config.first_scales - config.rows >= config.blocks2 * BLOCK_PITCH
    assert config.hidden8 - config.hidden_scales >= config.blocks8 * PIECE
    assert config.ring % 1024 == config.hidden8 % 1024 == config.stage % 1024 == 0
    assert config.stage >= max(TILE_BYTES + config.columns1 * SPAN, config.shared_bytes)
    assert config.blocks <= MOST_BLOCKS
    # Sums and scales lie apart in tensor memory, within 512 columns.
    assert config.tensor_scales >= config.columns1 + config.tiles2 * (
        config.line_rows * config.tokens
    )
    assert config.tensor_hidden - config.tensor_scales >= 2 * SCALE_COLUMNS * config.stages
    assert config.tensor_columns >= config.tensor_hidden + config.blocks8 * SCALE_COLUMNS
    assert config.tensor_columns <= 512
    assert config.columns1 <= 128
    rows = config.tile_lines * config.tiles2 * config.line_rows
    assert rows == config.rows2 or (shuffled and rows >= config.rows2 > rows - 3 * MMA_ROWS)


@pytest.mark.nightly
@ORDERS
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("tp", [8, 16])
def test_real_kernels_do_not_spill(arch: str, tp: int, shuffled: int) -> None:
    pytest.importorskip("cutlass")
    for m, mxfp8 in product((8, 16, 32, 64), (0, 1)):
        how = {"block": 1, "shuffled": shuffled, "mxfp8": mxfp8}
        built = store().get(BUILDER.variant(arch, k3(tp, m), how))
        assert built.resources.spill_bytes == 0, built.variant.label
        assert built.resources.registers <= (96 if shuffled else 255)


@pytest.mark.parametrize(
    ("arch", "shape", "config", "said"),
    [
        ("sm_90a", {}, {}, "block=1 .* sm_90a has no tcgen05"),
        ("sm_103a", {"inter": 64}, {"shuffled": 1}, "inter=64 .* 192 or a multiple of 128"),
        ("sm_103a", {"inter": 320}, {"shuffled": 1}, "inter=320 .* 192 or a multiple of 128"),
        ("sm_103a", {"latent": 896}, {"shuffled": 1}, "which 896 has to be"),
        ("sm_103a", {"inter": 576}, {}, "inter=576 .* a multiple of 64 up to 512"),
        ("sm_103a", {}, {"block": 2}, "block=2"),
    ],
)
def test_other_sizes_are_refused(
    arch: str, shape: dict[str, int], config: dict[str, int], said: str
) -> None:
    with pytest.raises(VariantError) as error:
        BUILDER.variant(arch, shape, {"block": 1, **config})
    assert re.search(said, str(error.value)), error.value
    BUILDER.variant("sm_103a", {}, {"block": 1})  # the control

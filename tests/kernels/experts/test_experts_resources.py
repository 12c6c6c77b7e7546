"""Geometry, registers, residency, and sizes that the kernel does not cover."""

from __future__ import annotations

import re

import pytest

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.residency import Footprint, Member, require_co_residency
from k3fuse.kernels.build.variant import ARCHITECTURES
from k3fuse.kernels.experts.builder import BUILDER, config_of, k3
from k3fuse.kernels.experts.config import SHARED_LIMIT, THREADS
from stored import store


@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_one_wave_whatever_the_registers(tp: int, m: int) -> None:
    variant = BUILDER.variant("sm_103a", k3(tp, m), {})
    plan, config = BUILDER.plan(variant), config_of(variant)
    assert plan.ctas == 128
    assert plan.dynamic_smem <= SHARED_LIMIT
    assert config.stages >= 3
    need = Footprint.of(THREADS, 255, plan.dynamic_smem, 8)
    for sms in (132, 148, 152):
        require_co_residency([Member(variant.label, plan.ctas, need)], sms)
    # A slot of the ring holds each kind of stage, and the regions follow one another.
    assert max(config.bytes1, config.bytes2, config.shared_bytes) <= config.stage
    starts = [config.bins, config.order, config.list, config.own, config.sums, config.rows]
    assert starts == sorted(starts)
    assert config.totals + 32 <= config.bins


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_real_kernels_do_not_spill(arch: str) -> None:
    pytest.importorskip("cutlass")
    for variant in BUILDER.variants(arch):
        built = store().get(variant)
        assert built.resources.spill_bytes == 0, variant.label
        assert built.resources.registers <= 255


@pytest.mark.parametrize(
    ("shape", "config", "said"),
    [
        ({"m": 65}, {}, "m=65 is outside"),
        ({"latent": 3585}, {}, "latent=3585 .* multiple of 896 up to 3584"),
        ({"inter": 100}, {}, "inter=100 .* multiple of 64"),
        ({"inter": 3584}, {}, "inter=3584 .* narrower"),
        ({"hidden": 7000}, {}, "hidden=7000 .* 7168 rows"),
        ({"shared": 100}, {}, "shared=100 .* multiple of 192"),
        ({"top_k": 17}, {}, "top_k=17"),
        ({}, {"clusters": 17}, "clusters=17"),
        ({}, {"floor": 2}, "floor=2"),
        ({}, {"warps": 4}, "no config 'warps'"),
        ({"n": 4}, {}, "no shape 'n'"),
    ],
)
def test_other_sizes_are_refused(shape: dict[str, int], config: dict[str, int], said: str) -> None:
    with pytest.raises(VariantError) as error:
        BUILDER.variant("sm_103a", shape, config)
    assert re.search(said, str(error.value)), error.value
    BUILDER.variant("sm_103a", {}, {})  # the control

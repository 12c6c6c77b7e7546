"""What the front kernels take of a chip, and which sizes are refused."""

from __future__ import annotations

import pytest
from front_runs import full, kernel

from k3fuse.kernels.build.errors import VariantError
from k3fuse.kernels.build.residency import Member, co_residency
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.common.gemm import MAX_OWNED, SHARED_LIMIT
from k3fuse.kernels.router.front_builder import BUILDER, config_of
from k3fuse.kernels.router.layout import FrontMailbox
from stored import store

SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}


def fits(variant: Variant) -> None:
    built = store().get(variant)
    assert built.resources.spill_bytes == 0
    member = Member.built(built.plan, built.resources, variant.label)
    assert co_residency([member], SMS[variant.arch]).fits


def test_no_spills() -> None:
    pytest.importorskip("cutlass")
    fits(full(16, 8))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SMS)
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("tuning", [{}, {"multicast": 0}, {"replicated": 1}])
def test_every_kernel(arch: str, tp: int, shared: bool, m: int, tuning: dict[str, int]) -> None:
    pytest.importorskip("cutlass")
    if tuning.get("replicated") and m > 8:
        pytest.skip("for one token")
    columns = 6144 // tp if shared else 0
    fits(kernel(m, {"tp": tp, "shared": columns}, arch, **tuning))


@pytest.mark.parametrize(
    ("tp", "shared", "rows", "clusters", "slots"),
    [
        (8, True, (112, 448, 1536), 8, 9),
        (16, True, (56, 224, 768), 7, 5),
        (8, False, (112, 448, 0), 6, 3),
        (16, False, (56, 224, 0), 3, 3),
    ],
)
def test_tiles_are_shared_out(
    tp: int, shared: bool, rows: tuple[int, ...], clusters: int, slots: int
) -> None:
    for m in (8, 16, 32, 64):
        config = config_of(full(tp, m, shared))
        grid = config.geometry
        assert (config.rows, grid.clusters, grid.slots) == (rows, clusters, slots)
        assert BUILDER.plan(full(tp, m, shared)).ctas == 16 * clusters <= 128
        assert grid.shared <= SHARED_LIMIT
        assert grid.owned < MAX_OWNED
        assert grid.passes * grid.warps >= grid.slots


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"m": 65}, {}, "m=65 is outside the kernel; use 1 to 64"),
        ({"tp": 17}, {}, "tp=17"),
        ({"k": 512}, {}, "k=512 is outside the kernel; use a multiple of 1024 up to 7168"),
        ({"experts": 900}, {}, "experts=900 is outside the kernel; use a multiple of 32"),
        ({"experts": 0}, {}, "experts=0"),
        ({"latent": 100}, {}, "latent=100"),
        ({"shared": 3}, {}, "shared=3"),
        ({"shared": 7168}, {}, "14896 rows are outside the kernel"),
        ({}, {"multicast": 2}, "multicast=2"),
        ({"m": 9}, {"max_m": 8}, "max_m=8"),
        ({"h": 1}, {}, "no shape 'h'"),
        ({}, {"warps": 4}, "no config 'warps'"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: dict[str, int], config: dict[str, int], message: str
) -> None:
    with pytest.raises(VariantError, match=message):
        BUILDER.variant("sm_103a", shape, config)
    BUILDER.variant("sm_103a", {}, {})  # the control


def test_the_mailbox() -> None:
    layout = FrontMailbox(16)
    assert (layout.row, layout.latent_offset) == (10752, 3584)
    assert layout.data == 2 * 64 * 10752
    assert layout.control < layout.error < layout.arrivals < layout.total
    assert layout.total % 128 == layout.at(1, 0) % 128 == 0
    assert layout.at(3, 2) == layout.parity + 2 * layout.row
    for wrong in ({"experts": 900}, {"latent": 3592}, {"tp": 0}):
        with pytest.raises(ValueError, match="multiple of 4"):
            FrontMailbox(**{"tp": 16, **wrong})

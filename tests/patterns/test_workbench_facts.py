"""Launch geometry and resources of a site's kernels in the report, from the workbench."""

from __future__ import annotations

from pathlib import Path

import pytest

from build import DATA
from k3fuse.kernels.build.variant import builder
from k3fuse.kernels.common import policy
from k3fuse.patterns import workbench
from k3fuse.rewriter import target
from k3fuse.rewriter.inspecting import inspect_source


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3FUSE_KERNEL_CACHE", str(tmp_path))
    workbench._facts.cache_clear()


def built(m: int, layer: int = 3) -> dict[str, dict[str, dict[str, object]]]:
    document = inspect_source(str(DATA / f"layer{layer}_tp8_m{m}_opaque.json"), plan=True)
    return {s["pattern"]: s["built"] for s in document["sites"] if s["outcome"] != "near"}


def test_a_site_of_a_variants_own_size() -> None:
    (name, row), *rest = built(8)["output_projection"].items()
    assert rest == []
    source = builder("output_projection")
    variant = source.variant("sm_103a", {"m": 8, "tp": 8}, {})
    plan = source.plan(variant)
    assert name == variant.name
    assert row["grid"] == list(plan.grid)
    assert row["cluster"] == list(plan.cluster)
    assert "registers" not in row  # nothing was compiled into this cache


def test_a_larger_step_names_the_kernels_that_serve_it() -> None:
    rows = built(64)["output_projection"]
    assert rows
    assert all("tp8" in name and "m64" in name for name in rows)


def test_an_op_without_a_kernel_says_nothing() -> None:
    found = built(8)
    assert workbench._facts("no_op", "sm_103a", (("m", 8),)) == {}
    assert found["experts"]  # the control
    assert set(found) == {
        "attention_projection", "output_projection", "router", "experts", "attn_res",
    }  # fmt: skip


def test_rewriter_and_kernels_know_the_same_targets() -> None:
    # Neither imports the other, so each has its own table of chips.
    assert target.ARCHITECTURES == policy.CHIPS
    assert target.TP_SIZES == policy.TP_SIZES


@pytest.mark.parametrize(
    ("layer", "m", "rows"), [(0, 8, (6288,)), (3, 8, (2112, 1536)), (3, 64, (2112, 1536))]
)
def test_a_projection_has_the_figures_of_its_own_rows(
    layer: int, m: int, rows: tuple[int, ...]
) -> None:
    found = built(m, layer)["attention_projection"]
    shape = {"m": m, **{f"n{i}": n for i, n in enumerate(rows)}}
    variant = builder("attention_projection").variant("sm_103a", shape, {})
    plan = builder("attention_projection").plan(variant)
    assert list(found) == [variant.name] == [f"stream_m{m}_k7168_n{'_'.join(map(str, rows))}"]
    assert found[variant.name]["dynamic_smem"] == plan.dynamic_smem


def test_a_count_between_two_rows_has_the_figures_of_the_kernel_that_serves_it() -> None:
    document = inspect_source("kimi-k3", m=9, layers=4)
    sites = [s for s in document["sites"] if s["pattern"] == "attention_projection"]
    names = {s["form"].split()[0]: list(s["built"]) for s in sites}
    assert names == {"kda": ["stream_m16_k7168_n6288"], "mla": ["stream_m16_k7168_n3648"]}

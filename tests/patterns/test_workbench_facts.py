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


def built(m: int) -> dict[str, dict[str, dict[str, object]]]:
    document = inspect_source(str(DATA / f"layer3_tp8_m{m}_opaque.json"), plan=True)
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

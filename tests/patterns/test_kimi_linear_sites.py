"""transformers' kimi_linear: every projection, o-proj, router and expert site, taken or refused."""

from __future__ import annotations

from typing import Any

import pytest

from k3fuse.rewriter.inspecting import inspect_source

# Four layers: KDA + dense, KDA + MoE, KDA + MoE, MLA + MoE.
SITES = {
    "attention_projection": 4,
    "output_projection": 4,
    "router": 3,
    "experts": 3,
    "attn_res": 0,
}


def counts(document: dict[str, Any], outcome: str) -> dict[str, int]:
    """Sites of one outcome by pattern."""
    return {name: count[outcome] for name, count in document["patterns"].items()}


@pytest.mark.parametrize(
    ("form", "m"),
    [
        ("batched_mm", 1),
        ("grouped_mm", 3),
        pytest.param("batched_mm", 3, marks=pytest.mark.nightly),
        pytest.param("grouped_mm", 1, marks=pytest.mark.nightly),
    ],
)
def test_reference_takes_every_site(form: str, m: int) -> None:
    document = inspect_source("kimi-linear", target="reference", m=m, form=form)
    assert counts(document, "found") == SITES
    assert counts(document, "near") == dict.fromkeys(SITES, 0)
    assert counts(document, "refused") == dict.fromkeys(SITES, 0)
    forms = {s["form"] for s in document["sites"]}
    kind = "silu_batched" if form == "batched_mm" else "silu_grouped"
    assert forms == {
        "kda separate x6", "mla separate x2", "add + rms_norm", "router",
        f"plain {kind} + shared",
    }  # fmt: skip
    assert document["nodes"]["after"] < document["nodes"]["before"]


@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
def test_gb300_refuses_every_site_by_geometry_with_the_right_numbers(form: str) -> None:
    document = inspect_source("kimi-linear", target="gb300:tp8", m=1, plan=True, form=form)
    assert counts(document, "refused") == SITES
    assert counts(document, "near") == dict.fromkeys(SITES, 0)
    assert document["nodes"]["after"] == document["nodes"]["before"]
    actual = {"attention_projection": "K = 128", "output_projection": "H = 128", "router": "E = 8",
              "experts": "H = 128"}  # fmt: skip
    for site in document["sites"]:
        first = site["reasons"][0]
        assert first["code"] == "SHAPE_MISMATCH"
        assert first["actual"] == actual[site["pattern"]]

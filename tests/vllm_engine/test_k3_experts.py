"""vLLM 0.33's own Kimi K3 experts behind our operator; needs its wheel unpacked in $K3FUSE_VLLM."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("K3FUSE_VLLM"), reason="K3FUSE_VLLM names no unpacked vLLM 0.33"
)


@pytest.fixture(scope="module")
def found(script: Any) -> dict[str, Any]:
    """What k3_moe.py saw."""
    seen: dict[str, Any] = script("k3_moe.py")
    return seen


@pytest.mark.parametrize("layout", ["rows", "trtllm"])
def test_a_loaded_layer_is_taken_and_gives_the_references_values(found: Any, layout: str) -> None:
    """Real parameters of vLLM's layers, in both orders that the kernel reads; one graph."""
    seen = found[layout]
    assert seen["graphs"] == 1  # whatever the token count
    assert seen["sites"] == [[f"{layout} mxfp4", "found"]]
    assert len(seen["worst"]) == 6
    for name, (shared, routed) in seen["worst"].items():
        assert shared == 0, name
        assert routed <= 1e-3, name  # sums over slots in another order, then one rounding
    assert seen["in place"]
    # Above the policy vLLM's own op runs, once.
    assert seen["above 64"] == [0, 0]
    assert seen["stock calls"] == 1


def test_inductor_lowers_it_with_the_layer_as_an_input(found: Any) -> None:
    assert max(found["inductor"]["worst"]) <= 1e-3
    assert found["inductor"]["differ"]  # the control: two layers have other weights


REFUSED = {
    "marlin": ["STRIDE_OR_ALIGN", "DTYPE_MISMATCH"],
    "bf16 activations": ["DTYPE_MISMATCH"],
    "activation": ["ATTR_MISMATCH", "ATTR_MISMATCH"],
    "shared beta": ["ATTR_MISMATCH"],
    "scoring": ["ATTR_MISMATCH"],
    "groups": ["ATTR_MISMATCH"],
    "bias dtype": ["DTYPE_MISMATCH"],
    "local experts": ["STRIDE_OR_ALIGN", "SHAPE_MISMATCH"],
    "a gate inside": ["OP_MISMATCH"],
    "capture": ["OP_MISMATCH"],
    "no scales": ["DTYPE_MISMATCH", "STRIDE_OR_ALIGN"],
    "strides": ["STRIDE_OR_ALIGN"],
}


def test_every_change_of_a_layer_is_refused_by_its_guard(found: Any) -> None:
    seen = found["refusals"]
    for control in ("nothing", "nothing, again"):
        assert seen.pop(control) == [["found"], ["ours ran"]]
    near, ran = seen.pop("not loaded")
    assert near[0] == "near"
    assert "have no memory" in near[1]
    assert ran == ["vLLM's op ran"]
    assert set(seen) == set(REFUSED)
    for name, (site, ran) in seen.items():
        assert site[0] == "refused", name
        assert [text.split()[0] for text in site[1:]] == REFUSED[name], name
        assert ran == ["vLLM's op ran"], name


def test_switched_off(found: Any) -> None:
    assert found["off"][0][0] == "refused"
    assert found["off"][0][1].startswith("DISABLED_BY_USER")
    assert found["off"][1] == ["vLLM's op ran"]


def test_another_layer_at_run_time_gets_vllms_op(found: Any) -> None:
    """With the very arguments that the graph gives; a layer of the same form gets ours again."""
    seen = found["at run time"]
    assert seen["stock"] == [0, 0]
    assert seen["again"] == [0, 0]
    assert all(seen["arguments"])


def test_the_operator_keeps_its_contract(found: Any) -> None:
    assert found["contract"] == ["SUCCESS"] * 4


def test_the_graph_holds_what_a_cache_key_needs(found: Any) -> None:
    assert set(found["cache keys"].values()) == {True}, found["cache keys"]
    assert len(found["cache keys"]) == 6

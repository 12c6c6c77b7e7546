"""Where the rewrite enters a vLLM engine, from its configuration alone; no vLLM needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k3fuse.rewriter.options import OptionError
from k3fuse_vllm.facts import Facts
from k3fuse_vllm.regional import classes_of
from k3fuse_vllm.routes import decide
from k3fuse_vllm.settings import Settings
from k3fuse_vllm.versions import decision_digest, unknown_version

PASS = {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}
# A GB300 engine that serves Kimi K3 as vLLM sets it up, with k3fuse asked for.
K3 = Facts(
    architecture="KimiK3ForConditionalGeneration",
    vllm="0.33.0",
    tp=8,
    full_graphs=True,
    capability=(10, 3),
    additional={"k3fuse": {}},
)
DEEPSEEK = replace(
    K3, architecture="DeepseekV3ForCausalLM", additional={"k3fuse": {"target": "reference"}}
)


def outcome(facts: Facts) -> tuple[str, list[str]]:
    """Route and reason codes."""
    settings = Settings.of(facts)
    assert settings is not None
    decision = decide(facts, settings)
    return decision.route.value, [r.code.value for r in decision.reasons]


def test_k3_is_compiled_by_layers_and_its_target_detected() -> None:
    assert outcome(K3) == ("regional", [])
    settings = Settings.of(K3)
    assert settings is not None
    assert settings.options.target is not None
    assert settings.options.target.name == "gb300:tp8"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"pp": 2}, "ENGINE_UNSUPPORTED"),
        ({"expert_parallel": True}, "ENGINE_UNSUPPORTED"),
        ({"lora": True}, "ENGINE_UNSUPPORTED"),
        ({"dbo": True}, "ENGINE_UNSUPPORTED"),
        ({"dcp": 4}, "ENGINE_UNSUPPORTED"),
        ({"full_graphs": False}, "ENGINE_UNSUPPORTED"),
        ({"full_graphs": False, "eager": True}, "ENGINE_UNSUPPORTED"),
        ({"dtype": "float16"}, "DTYPE_MISMATCH"),
        ({"draft_tokens": 8}, "M_OUT_OF_RANGE"),
        (
            {"additional": {"k3fuse": {}, "decode_backend": "latency_specialized"}},
            "ENGINE_UNSUPPORTED",
        ),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused(change: dict[str, Any], code: str) -> None:
    route, codes = outcome(replace(K3, **change))
    assert codes == [code]
    assert route == "regional"


@pytest.mark.parametrize("change", [{"dcp": 8}, {"dcp": 1}, {"draft_tokens": 7}])
def test_the_edges_are_covered(change: dict[str, Any]) -> None:
    assert outcome(replace(K3, **change)) == ("regional", [])


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", ""])
def test_an_unknown_vllm_is_refused_in_one_line(version: str) -> None:
    assert outcome(replace(K3, vllm=version)) == ("none", ["ENGINE_UNSUPPORTED"])
    assert "\n" not in unknown_version(version)
    assert unknown_version("0.32.0+cpu") == unknown_version("0.33.1") == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mode": 3, "passes": PASS}, ("pass", [])),
        ({"mode": 2, "backend": "k3fuse"}, ("backend", [])),
        ({"mode": 1, "backend": "k3fuse.rewriter.backend.k3fuse"}, ("backend", [])),
        ({"mode": 0, "passes": PASS, "eager": True}, ("none", ["COMPILE_NOT_REACHED"])),
        ({"mode": 2, "passes": PASS}, ("none", ["COMPILE_NOT_REACHED"])),
        ({"mode": 3, "backend": "inductor"}, ("none", ["COMPILE_NOT_REACHED"])),
        ({"mode": 0}, ("none", ["COMPILE_NOT_REACHED"])),
    ],
)
def test_route_of_a_model_that_vllm_compiles(
    change: dict[str, Any], expected: tuple[str, list[str]]
) -> None:
    assert outcome(replace(DEEPSEEK, **change)) == expected


def test_a_named_region_goes_without_vllm_compile_only() -> None:
    region = {"k3fuse": {"target": "reference", "region": ["DeepseekV2DecoderLayer"]}}
    facts = replace(DEEPSEEK, additional=region)
    assert outcome(facts) == ("regional", [])
    for change in ({"mode": 2}, {"mode": 3, "passes": PASS}):
        route, codes = outcome(replace(facts, **change))
        assert (route, codes) == ("none", ["ENGINE_UNSUPPORTED"])


def test_k3_in_other_modes() -> None:
    """A pass alone is never called for Kimi K3; asked for by name as well, its layers compile."""
    assert outcome(replace(K3, mode=3, passes=PASS, additional={})) == (
        "none",
        ["COMPILE_NOT_REACHED"],
    )
    assert outcome(replace(K3, mode=0, passes=PASS)) == ("regional", [])
    # Breakable graphs forced off: the user's mode 1 survives and takes the place of the region.
    unbroken = replace(K3, mode=1, full_graphs=False)
    assert outcome(unbroken) == ("none", ["ENGINE_UNSUPPORTED"])
    # Named as the backend it is reached, in an engine that then captures no decode graph.
    assert outcome(replace(unbroken, backend="k3fuse")) == ("backend", ["ENGINE_UNSUPPORTED"])
    for mode in (2, 3):
        assert outcome(replace(K3, mode=mode)) == ("regional", [])


def test_the_whole_text_model_is_a_region_of_kimi_k3() -> None:
    settings = Settings.of(replace(K3, additional={"k3fuse": {"region": "model"}}))
    assert settings is not None
    assert classes_of(settings.region) == ("KimiLinearModel",)
    for given in ({}, {"region": "layers"}):
        settings = Settings.of(replace(K3, additional={"k3fuse": given}))
        assert settings is not None
        assert classes_of(settings.region) == ("KimiDecoderLayer",)
    with pytest.raises(OptionError, match="name the class to compile for DeepseekV3ForCausalLM"):
        Settings.of(replace(DEEPSEEK, additional={"k3fuse": {"region": "model"}}))


def test_nobody_asked() -> None:
    assert Settings.of(replace(K3, additional={})) is None
    assert Settings.of(replace(K3, additional={"k3fuse": False})) is None
    assert Settings.of(replace(K3, additional={"other": 1})) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tarjet": "reference"}, "'tarjet' does not exist"),
        ({"route": "mode3"}, "route='mode3' is unknown"),
        ({"region": "Layer"}, "region='Layer' is no list"),
        ({"fresh": 1}, "fresh=1 is no bool"),
        ({"report": 3}, "report=3 is no file name"),
        ("yes", "give an object of options"),
    ],
)
def test_wrong_options_name_themselves(given: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Settings.of(replace(K3, additional={"k3fuse": given}))


def test_no_range_at_the_limit_is_noted() -> None:
    facts = replace(DEEPSEEK, mode=3, passes=PASS)
    settings = Settings.of(facts)
    assert settings is not None
    assert "compile_ranges_endpoints" in decide(facts, settings).notes[0]
    assert decide(replace(facts, ranges=(64,)), settings).notes == ()


def test_dumps_and_dry_runs_compile_afresh() -> None:
    for given, fresh in (({}, False), ({"dry_run": True}, True), ({"dump_dir": "d"}, True)):
        settings = Settings.of(replace(K3, additional={"k3fuse": given}))
        assert settings is not None
        assert settings.fresh is fresh


def test_every_factor_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    base = decision_digest({"plan": True}, "gb300:tp8")
    assert decision_digest({"plan": True}, "gb300:tp8") == base
    assert decision_digest({"plan": False}, "gb300:tp8") != base
    assert decision_digest({"plan": True}, "gb300:tp16") != base
    monkeypatch.setattr("torch.__version__", "0")
    assert decision_digest({"plan": True}, "gb300:tp8") != base
    monkeypatch.undo()
    monkeypatch.setenv("K3FUSE_DISABLE", "router")
    assert decision_digest({"plan": True}, "gb300:tp8") != base


def test_the_package_imports_without_vllm() -> None:
    """In this environment: the pass is there with vLLM, and one line says so without."""
    import importlib.util

    import k3fuse_vllm

    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ImportError, match="needs vLLM"):
            _ = k3fuse_vllm.decode_pass
        assert "decode_pass" not in vars(k3fuse_vllm)
    else:
        assert "decode_pass" in vars(k3fuse_vllm)

"""`vllm:CONFIG.json`: an engine's route, refusals and sites from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from k3fuse.patterns.sources.vllm_engine import EngineRefusedError, build, read_facts
from k3fuse.rewriter.cli import main
from k3fuse.rewriter.sources import SourceError, SourceRequest
from k3fuse.rewriter.target import Target

MODEL = {"architectures": ["KimiK3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
K3: dict[str, Any] = {
    "hf_config": MODEL,
    "tensor_parallel_size": 8,
    "additional_config": {"k3fuse": {}},
}


def request(path: Path) -> SourceRequest:
    """Two layers at eight tokens for GB300."""
    return SourceRequest(Target.parse("gb300:tp8"), 8, layers=2, argument=str(path))


def written(folder: Path, document: Any) -> Path:
    """A configuration file."""
    path = folder / "engine.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_kimi_k3_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3fuse.patterns.sources.vllm_engine._vllm_folder", lambda: None)
    command = ["inspect", f"vllm:{written(tmp_path, K3)}", "--plan", "--layers", "2", "--json"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    found = {name: count["found"] for name, count in document["patterns"].items()}
    assert found == {
        "attention_projection": 2,
        "output_projection": 2,
        "router": 1,
        "experts": 1,
        "attn_res": 3,
    }
    assert "route regional: 24 graphs" in document["notes"][0]
    assert "own spelling" in document["notes"][1]


def test_the_whole_model_as_one_region_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3fuse.patterns.sources.vllm_engine._vllm_folder", lambda: None)
    document = {**K3, "additional_config": {"k3fuse": {"region": "model"}}}
    graphs = build(request(written(tmp_path, document)))
    assert "one graph of the whole text model" in graphs[0].notes[0]


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"pipeline_parallel_size": 2}, 1, "pipeline parallelism"),
        ({"enable_expert_parallel": True}, 1, "expert parallelism"),
        ({"enable_lora": True}, 1, "LoRA"),
        ({"enforce_eager": True}, 1, "FULL CUDA graphs, because enforce_eager"),
        ({"dtype": "float16"}, 1, "float16"),
        ({"speculative_config": {"num_speculative_tokens": 8}}, 1, "9 tokens a request"),
        ({"vllm_version": "0.40.0"}, 1, "vLLM 0.40.0 is not known"),
        ({"additional_config": {}}, 3, "nothing in the configuration asks"),
        (
            {
                "additional_config": {},
                "compilation_config": {"mode": 3, "inductor_passes": {"p": "k3fuse_vllm.x"}},
            },
            3,
            "never compiles its Kimi K3 classes",
        ),
    ],
)
def test_an_engine_that_runs_stock_says_why(
    tmp_path: Path, change: dict[str, Any], code: int, text: str
) -> None:
    path = written(tmp_path, {**K3, **change})
    done = CliRunner().invoke(main, ["inspect", f"vllm:{path}"])
    assert done.exit_code == code
    assert text in done.stderr
    with pytest.raises(EngineRefusedError):
        build(request(path))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "is no JSON"),
        ("[]", "is no object"),
        ({"tensor_parallel_size": 8}, '"model"'),
        ({"model": "nowhere"}, "has no config.json"),
        ({**K3, "compilation_config": {"mode": 7}}, "mode=7 is unknown"),
        ({**K3, "compilation_config": 3}, "compilation_config is no object"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, document: Any, text: str) -> None:
    with pytest.raises(SourceError, match=text) as error:
        read_facts(written(tmp_path, document), request(tmp_path))
    assert "\n" not in str(error.value)


def test_a_models_config_stands_for_an_engine(tmp_path: Path) -> None:
    facts = read_facts(written(tmp_path, MODEL), request(tmp_path))
    assert (facts.architecture, facts.tp, facts.mode) == (MODEL["architectures"][0], 8, 0)
    assert facts.additional == {"k3fuse": {}}


def test_another_model_is_not_guessed(tmp_path: Path) -> None:
    other = {
        "hf_config": {"architectures": ["DeepseekV3ForCausalLM"]},
        "compilation_config": {"mode": 2, "backend": "k3fuse"},
    }
    with pytest.raises(SourceError, match="its graphs exist there only"):
        build(request(written(tmp_path, other)))

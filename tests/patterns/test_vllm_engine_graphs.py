"""`vllm:CONFIG.json` with vLLM 0.33 at hand: its layers are traced once a form, and counted."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build import DATA
from k3fuse.patterns.sources import vllm_engine
from k3fuse.patterns.sources.vllm_engine import FOLDER, build
from k3fuse.rewriter.sources import SourceError, SourceRequest
from k3fuse.rewriter.target import Target

ENGINE = {
    "hf_config": {"architectures": ["KimiK3ForConditionalGeneration"], "torch_dtype": "bfloat16"},
    "tensor_parallel_size": 8,
    "additional_config": {"k3fuse": {}},
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says it is vLLM 0.33's."""
    folder = tmp_path / "unpacked"
    (folder / "vllm-0.33.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def request(folder: Path, m: int | None = 4, layers: int = 6) -> SourceRequest:
    path = folder / "engine.json"
    path.write_text(json.dumps(ENGINE))
    return SourceRequest(Target.parse("gb300:tp8"), m, layers=layers, argument=str(path))


def test_a_graph_a_layer_of_one_trace_a_form(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def traced(command: list[str], **_: Any) -> Any:
        asked.append(command)
        output = Path(command[-1])
        for layer in map(int, command[command.index("--layers") + 1].split(",")):
            kept = layer if (DATA / f"layer{layer}_tp8_m4_opaque.json").exists() else 1
            text = (DATA / f"layer{kept}_tp8_m4_opaque.json").read_text()
            text = text.replace(f"layers.{kept}.", f"layers.{layer}.")
            (output / f"layer{layer}_tp8_m4_opaque.json").write_text(text)
        shutil.copy(DATA / "final_tp8_m4_plain.json", output)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(vllm_engine.subprocess, "run", traced)
    graphs = build(request(tmp_path))
    (command,) = asked
    # Layers 0 (dense, block write), 1 (KDA) and 3 (MLA) stand for the first six.
    assert command[command.index("--layers") + 1] == "0,1,3"
    assert command[command.index("--vllm") + 1] == str(vllm)
    assert command[command.index("--m") + 1] == "4"
    assert command[:3] == [sys.executable, "-m", "k3fuse.patterns.sources.vllm_k3"]
    assert [g.first_layer for g in graphs[:-1]] == [0, 1, 2, 3, 4, 5]
    assert {g.name for g in graphs} == {"vllm kimi-k3"}
    assert [bool(g.expected) for g in graphs] == [True, *[False] * 6]
    assert graphs[0].expected["router"] == 5
    names = [str(n.target) for n in graphs[4].module.graph.nodes if n.op == "placeholder"]
    assert not [n for n in names if "layers.1." in n]


def test_what_cannot_be_traced_is_one_line(
    vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, line in (
        ("Traceback\n  wrong\nImportError: no einops\n", "no einops"),
        ("", "no me"),
    ):
        failed = SimpleNamespace(returncode=1, stderr=said)
        monkeypatch.setattr(vllm_engine.subprocess, "run", lambda *_, failed=failed, **__: failed)
        with pytest.raises(SourceError, match=f"vLLM's layers cannot be traced: .*{line}"):
            build(request(tmp_path))


def test_another_vllm_is_not_at_hand(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_engine._vllm_folder() == vllm
    (vllm / "vllm-0.33.0.dist-info").rename(vllm / "vllm-0.34.0.dist-info")
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    assert vllm_engine._vllm_folder() is None
    installed = vllm / "site-packages"
    (installed / "vllm-0.33.1.dist-info").mkdir(parents=True)
    found = SimpleNamespace(origin=str(installed / "vllm" / "__init__.py"))
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: found)
    assert vllm_engine._vllm_folder() == installed


@pytest.mark.parametrize("mode", [4, "fast", -1, 2.5])
def test_an_unknown_mode_is_refused(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"mode=.* is unknown; use 0 to 3"):
        vllm_engine._mode(mode, eager=False)
    assert [vllm_engine._mode(m, eager=False) for m in (None, 0, 3)] == [3, 0, 3]
    assert vllm_engine._mode(mode, eager=True) == 0

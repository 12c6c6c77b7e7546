"""The capture command's checks that need no vLLM; what it captures is in test_vllm_k3_data."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from k3fuse.patterns.sources.vllm_k3.__main__ import main
from k3fuse.patterns.sources.vllm_k3.capture import Job, _readable
from k3fuse.patterns.sources.vllm_k3.environment import CaptureError, find_wheel, schema_texts
from k3fuse.patterns.sources.vllm_k3.layers import text_config


def wheel(folder: Path, version: str) -> Path:
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    (folder / f"vllm-{version}.dist-info").mkdir()
    return folder


def test_the_known_version_is_found(tmp_path: Path) -> None:
    assert find_wheel(wheel(tmp_path, "0.33.0")) == "0.33.0"


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"vLLM 0\.34\.1 at .* unpack 0\.33\.0"):
        find_wheel(wheel(tmp_path, "0.34.1"))


def test_a_folder_without_a_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no vLLM at .*pip download"):
        find_wheel(tmp_path)


def test_schemas_are_found_in_an_extension() -> None:
    """Between other bytes, over lines, after an arrow that is no schema; not beyond 4096 bytes."""
    first, second = b"add(Tensor a, Tensor b) -> Tensor", b"fill(Tensor(a!) out,\n  int n) -> ()"
    data = b"\0".join([b"\x7fELF", b"a -> b", b"??" + first, b"", second, b"end"])
    assert list(schema_texts(data)) == [first, second]
    long = b"long(" + b"x" * 5000 + b") -> Tensor"
    assert list(schema_texts(long + b"\0" + first + b"\0")) == [first]
    assert list(schema_texts(b"")) == list(schema_texts(b"no -> schema")) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "1"], "no vLLM at"),
        ([], "nothing to capture"),
        (["--layers", "93"], "numbers from 0 to 92"),
        (["--layers", "1", "--m", "four"], "no comma-separated list"),
    ],
)
def test_wrong_use_is_told_in_words(tmp_path: Path, options: list[str], says: str) -> None:
    base = ["--vllm", str(tmp_path), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, base + options)
    assert result.exit_code != 0
    assert says in result.output
    assert not (tmp_path / "out").exists()


def test_layer_kinds_are_those_of_the_published_model() -> None:
    kinds = text_config()["linear_attn_config"]
    assert (len(kinds["kda_layers"]), len(kinds["full_attn_layers"])) == (69, 24)
    assert kinds["full_attn_layers"][-2:] == [92, 93]
    assert text_config(5)["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5]


def test_file_names() -> None:
    assert Job("layer1", (1,), None, "opaque", 8).file == "layer1_tp8_mdyn_opaque.json"
    assert Job("final", (92,), 64, "plain", 16).file == "final_tp16_m64_plain.json"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['mlp']._parameters['weight']", "self.mlp.weight"),
        ("L['tail'].__dict__['_modules']['norm']._parameters['weight']", "tail.norm.weight"),
        ("L['self']._modules['self_attn'].kv_cache[0]", "self.self_attn.kv_cache[0]"),
        ("L['prefix'].size()[0]", "prefix.size(0)"),
        ("G['x']._forward_context.slot_mapping['model.layers.3.self_attn']",
         "slot_mapping['model.layers.3.self_attn']"),
    ],
)  # fmt: skip
def test_input_names_are_readable(source: str, name: str) -> None:
    assert _readable(source) == name

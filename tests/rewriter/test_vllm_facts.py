"""What is read of an engine's configuration, and of the process, with stand-ins of vLLM's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from k3fuse_vllm import facts as facts_module
from k3fuse_vllm import processes
from k3fuse_vllm.facts import Facts


def config(**changes: Any) -> Any:
    """A VllmConfig with the fields that are read; `changes`: PART__FIELD or FIELD -> value."""
    made = SimpleNamespace(
        compilation_config=SimpleNamespace(
            mode=3, backend="inductor", inductor_passes={"post_grad_custom_post_pass": "a.b"},
            compile_ranges_endpoints=[64], cudagraph_mode=None,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8, pipeline_parallel_size=1, decode_context_parallel_size=1,
            enable_expert_parallel=False, use_ubatching=True,
        ),
        model_config=SimpleNamespace(
            architecture="KimiK3ForConditionalGeneration", dtype=torch.bfloat16, enforce_eager=False
        ),
        additional_config={"k3fuse": {}}, speculative_config=None, lora_config=None,
    )  # fmt: skip
    for place, value in changes.items():
        part, _, name = place.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's platform: a CPU, unless a test says otherwise."""
    found = SimpleNamespace(is_cuda=lambda: False, get_device_capability=lambda: None)
    module: Any = ModuleType("vllm.platforms")
    module.current_platform = found
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setattr(facts_module, "vllm_version", lambda: "0.33.0")
    return found


def test_every_field_is_read() -> None:
    found = Facts.of(config())
    assert found == Facts(
        architecture="KimiK3ForConditionalGeneration", vllm="0.33.0", tp=8, dbo=True, mode=3,
        backend="inductor", passes={"post_grad_custom_post_pass": "a.b"}, ranges=(64,),
        additional={"k3fuse": {}},
    )  # fmt: skip
    assert found.is_k3


class Backend:
    pass


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"model_config": None}, "architecture", ""),
        ({"compilation_config__mode": None}, "mode", 0),
        ({"compilation_config__backend": Backend}, "backend", "Backend"),
        ({"compilation_config__compile_ranges_endpoints": None}, "ranges", ()),
        ({"compilation_config__cudagraph_mode": SimpleNamespace(has_full_cudagraphs=lambda: True)},
         "full_graphs", True),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=3)}, "draft_tokens", 3),
        ({"lora_config": object()}, "lora", True),
        ({"model_config__enforce_eager": True}, "eager", True),
        ({"parallel_config__decode_context_parallel_size": 8}, "dcp", 8),
        ({"additional_config": None}, "additional", {}),
    ],
)  # fmt: skip
def test_what_differs_is_seen(change: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(Facts.of(config(**change)), field) == value
    assert getattr(Facts.of(config()), field) != value  # the control


def test_a_speculation_of_no_stated_length_has_no_draft_tokens() -> None:
    asked = SimpleNamespace(num_speculative_tokens=None)
    assert Facts.of(config(speculative_config=asked)).draft_tokens == 0


def test_a_pass_given_as_an_object_is_named_by_its_module() -> None:
    passes = {"post_grad_custom_post_pass": Backend()}
    found = Facts.of(config(compilation_config__inductor_passes=passes)).passes
    assert found["post_grad_custom_post_pass"].startswith(f"{Backend.__module__}.")


def test_the_capability_is_the_platforms(platform: Any) -> None:
    assert Facts.of(config()).capability is None
    platform.is_cuda = lambda: True
    assert Facts.of(config()).capability is None
    platform.get_device_capability = lambda: SimpleNamespace(major=10, minor=3)
    assert Facts.of(config()).capability == (10, 3)


def test_groups_and_rank_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.group_sizes() == {}
    state: Any = ModuleType("vllm.distributed.parallel_state")
    group = SimpleNamespace(unique_name="tp:0", world_size=8)
    state._groups = {"tp:0": lambda: group, "gone": lambda: None}
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert processes.group_sizes() == {"tp:0": 8}
    monkeypatch.delenv("RANK", raising=False)
    assert processes.rank() == 0
    monkeypatch.setenv("RANK", "5")
    assert processes.rank() == 5
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 7)
    assert processes.rank() == 7

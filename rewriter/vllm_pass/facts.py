"""What of an engine's configuration decides whether and where the rewrite runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3fuse_vllm.versions import vllm_version

# Field terms of vLLM's compilation modes.
MODES = ("none", "stock torch.compile", "Dynamo once", "vLLM compile")
# Architectures whose decoder layers vLLM never compiles itself (0.32 and 0.33).
K3_ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")


@dataclass(frozen=True)
class Facts:
    """One engine, as plain values.

    mode: vLLM's compilation mode (0-3) after its own adjustments. draft_tokens: speculative tokens
    a request. dcp: decode context parallel size. full_graphs: whether decode steps are captured
    whole. capability: CUDA compute capability, None without a GPU.
    """

    architecture: str = ""
    vllm: str = ""
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    expert_parallel: bool = False
    lora: bool = False
    dbo: bool = False
    dtype: str = "bfloat16"
    draft_tokens: int = 0
    mode: int = 0
    backend: str = ""
    passes: Mapping[str, str] = field(default_factory=dict)
    ranges: tuple[int, ...] = ()
    full_graphs: bool = False
    eager: bool = False
    capability: tuple[int, int] | None = None
    additional: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_k3(self) -> bool:
        """Whether the layers are vLLM's Kimi K3 (or Kimi Linear) decoder layers."""
        return self.architecture in K3_ARCHITECTURES

    @classmethod
    def of(cls, config: Any) -> Facts:
        """Read vLLM's VllmConfig."""
        compilation, parallel = config.compilation_config, config.parallel_config
        model, additional = config.model_config, config.additional_config
        speculative = config.speculative_config
        graphs = compilation.cudagraph_mode
        return cls(
            architecture=str(model.architecture) if model is not None else "",
            vllm=vllm_version(),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            expert_parallel=bool(parallel.enable_expert_parallel),
            lora=config.lora_config is not None,
            dbo=bool(getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", False))),
            dtype=str(model.dtype).removeprefix("torch.") if model is not None else "",
            draft_tokens=(speculative.num_speculative_tokens or 0) if speculative else 0,
            mode=int(compilation.mode or 0),
            backend=_backend_name(compilation.backend),
            passes=_pass_names(compilation),
            ranges=tuple(compilation.compile_ranges_endpoints or ()),
            full_graphs=bool(graphs is not None and graphs.has_full_cudagraphs()),
            eager=bool(model is not None and model.enforce_eager),
            capability=_capability(),
            additional=additional if isinstance(additional, Mapping) else {},
        )


def _backend_name(backend: Any) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", str(backend))


def _pass_names(compilation: Any) -> dict[str, str]:
    """Return hook -> qualified name; a pass given as an object under its module's name."""
    found = {}
    for hook, value in compilation.inductor_passes.items():
        name = value if isinstance(value, str) else f"{type(value).__module__}.{type(value)}"
        found[str(hook)] = name
    return found


def _capability() -> tuple[int, int] | None:
    """Return the GPU's capability as the platform knows it, without starting CUDA here."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    found = current_platform.get_device_capability()
    return (int(found.major), int(found.minor)) if found is not None else None

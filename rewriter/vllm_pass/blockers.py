"""What of vLLM's Kimi K3 code Dynamo cannot trace, and how each place is passed.

Every patch looks at `torch.compiler.is_compiling()`: only a traced decode step takes the other way.
Whatever runs eagerly (prefill, a refused engine's decode, draft models) runs vLLM's own code.
vLLM's files are not touched; a place that is not as expected is refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse_vllm import cores
from k3fuse_vllm.layer_ref import layer_ref

_NVIDIA = "vllm.models.kimi_k3.nvidia"
_DONE: set[str] = set()


def attribute(module: str, name: str) -> Any:
    """Return `module.name`, dotted names followed. Raises Refusal naming what is missing."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Refusal(
            Reason(
                Code.ENGINE_UNSUPPORTED,
                f"this vLLM's Kimi K3 code has no {module}.{name} ({error})",
                expected="vLLM 0.33's Kimi K3 for NVIDIA",
                actual="another layout",
            )
        ) from error
    return found


def prepare() -> None:
    """Pass every blocker of the module code, before the model is built; once a process.

    Raises Refusal for a place that this vLLM does not have.
    """
    for step in (
        _attention_cores,
        _head_views,
        _experts_name,
        _latent_tail,
        _streams,
        _low_latency_linears,
        _dependent_launch,
        _locked_property,
    ):
        if step.__name__ not in _DONE:
            step()
            _DONE.add(step.__name__)


def _while_compiling(owner: Any, name: str, traced: Callable[..., Any]) -> None:
    """Let `owner.name` be `traced` in a trace and what it was elsewhere."""
    stock = getattr(owner, name)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        return stock(*args, **kwargs)

    setattr(owner, name, chosen)


def _attention_cores() -> None:
    """Forward context, metadata counts, caches, workspace sizes, bmm into a view: all inside."""
    kda = attribute(f"{_NVIDIA}.kda", "KimiK3DeltaAttention")
    mla = attribute(f"{_NVIDIA}.mla", "MultiHeadLatentAttention")
    cores.define(kda._forward, mla._attention)

    def kda_forward(
        self: Any, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any
    ) -> None:
        torch.ops.k3fuse_vllm.kda_core(mixed_qkv, g1, g2, beta, core_attn_out, self.k3fuse_ref)

    def mla_attention(
        self: Any, positions: Any, q: Any, kv_c_normed: Any, k_pe: Any, attn_out: Any
    ) -> None:
        torch.ops.k3fuse_vllm.mla_core(positions, q, kv_c_normed, k_pe, attn_out, self.k3fuse_ref)

    _while_compiling(kda, "_forward", kda_forward)
    _while_compiling(mla, "_attention", mla_attention)


def _head_views() -> None:
    """einops asks whether the count is 1, which makes one token a graph of its own: plain views."""

    def rearrange(rows: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
        if pattern == "n (h d) -> 1 n h d":
            return rows.view(1, rows.shape[0], -1, sizes["d"])
        if pattern == "... (h d) -> ... h d":
            return rows.view(*rows.shape[:-1], -1, sizes["d"])
        if pattern == "1 n h d -> n (h d)":
            return rows.view(rows.shape[1], rows.shape[2] * rows.shape[3])
        raise Refusal(
            Reason(Code.ENGINE_UNSUPPORTED, f"KDA rearranges by {pattern!r}, which is not known")
        )

    kda = importlib.import_module(f"{_NVIDIA}.kda")
    attribute(kda.__name__, "rearrange")
    _while_compiling(kda, "rearrange", rearrange)


def _experts_name() -> None:
    """The experts operator gets a reference, so that its graph is not fixed to one layer."""
    runner = attribute("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner")
    _while_compiling(runner, "_encode_layer_name", lambda self: self.k3fuse_ref)


def _latent_tail() -> None:
    """The CuTe tail (tier 0) and its deferred finalize are off: our tail stands there instead.

    Both are chosen when the runner is built. In a trace the tail is tier 1, whatever the count.
    """
    runner = attribute(f"{_NVIDIA}.latent_moe_runner", "LatentMoERunner")
    tiers = attribute(f"{_NVIDIA}.latent_moe_runner", "LatentTailTier")
    reduce = attribute("vllm.distributed", "tensor_model_parallel_all_reduce")
    build, path = runner.__init__, runner._use_fused_path
    building: list[bool] = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        building.append(True)
        try:
            build(self, *args, **kwargs)
        finally:
            building.pop()
        self.enable_k3_latent_moe_tail_fusion = False

    def use_fused_path(self: Any) -> Any:
        return False if building else path(self)

    def norm_latent(self: Any, rows: Any, norm: Any) -> Any:
        return norm(reduce(rows) if self.moe_config.tp_size > 1 else rows)

    runner.__init__, runner._use_fused_path = init, use_fused_path
    _while_compiling(
        runner, "_select_tail_tier", lambda self, fused, shared: tiers.ALLREDUCE_OVERLAP
    )
    _while_compiling(runner, "allreduce_norm_latent_out", norm_latent)


def _streams() -> None:
    """Two-stream overlap becomes a sequence: events cannot be traced, and the ops fuse both."""

    def in_sequence(first: Any, second: Any, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        return first(), second()

    for module in ("model", "mla", "latent_moe_runner"):
        owner = importlib.import_module(f"{_NVIDIA}.{module}")
        attribute(owner.__name__, "maybe_execute_in_parallel")
        _while_compiling(owner, "maybe_execute_in_parallel", in_sequence)


def _low_latency_linears() -> None:
    """Shape-selected CuTe linears read data pointers; in a trace the plain linear stands there."""
    module = importlib.import_module(f"{_NVIDIA}.low_latency_gemm")
    attribute(module.__name__, "_runtime_ok")
    _while_compiling(module, "_runtime_ok", lambda x, weight: False)
    mla = importlib.import_module(f"{_NVIDIA}.mla")
    attribute(mla.__name__, "try_low_latency_gemm")
    _while_compiling(mla, "try_low_latency_gemm", lambda *args, **kwargs: None)


def _dependent_launch() -> None:
    """is_arch_support_pdl is a cached classmethod, which Dynamo refuses: make it a constant."""
    platform = type(attribute("vllm.platforms", "current_platform"))
    answer = bool(platform.is_arch_support_pdl())
    platform.is_arch_support_pdl = classmethod(lambda cls: answer)


def _locked_property() -> None:
    """A cached property holds a lock on Python 3.11 while it is read first: read it now."""
    kernel = attribute("vllm.models.common.ops.fused_qk_rmsnorm", "_FUSED_Q_KV_RMSNORM_KERNEL")
    getattr(kernel, "_kernel_arg_names", None)


def prepare_layer(layer: Any) -> None:
    """Give one decoder layer its references and take capture-only branches out of its trace.

    Raises Refusal for a layer of another build: quantised linears, sequence parallelism.
    """
    ref = layer_ref()
    attention, experts = layer.self_attn, getattr(layer, "block_sparse_moe", None)
    attention.k3fuse_ref = ref(getattr(attention, "prefix", "") or attention.layer_name)
    if hasattr(attention, "_projection_overlap_max_tokens"):
        # The overlapped projection asks whether a capture is on, which a trace cannot.
        attention._projection_overlap_max_tokens = 0
    if experts is not None:
        runner = experts.experts
        runner.k3fuse_ref = ref(runner.layer_name)
    if layer.use_sequence_parallel:
        raise Refusal(Reason(Code.ENGINE_UNSUPPORTED, "sequence parallelism is not covered"))
    for name, module in layer.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(module, "input_size"):
            continue
        if "Unquantized" not in type(method).__name__ and "LowLatency" not in type(method).__name__:
            raise Refusal(
                Reason(
                    Code.DTYPE_MISMATCH,
                    f"linear {name} is quantised ({type(method).__name__})",
                    expected="BF16 linears; only the experts may be MXFP4",
                    actual=type(method).__name__,
                    hint="serve a checkpoint whose linears are BF16",
                )
            )

"""vLLM's own Kimi K3 modules on the meta device, ready to be traced as one decode step.

Dimensions are those of the published Kimi K3 text config. Weights have shapes only. The forward
context holds the metadata of a plain decode step: M requests of one token each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from k3fuse.patterns.sources.vllm_k3.environment import CaptureError, CudaToMeta

HIDDEN = 7168
BLOCK_SLOTS = 8
LAYERS = 93
_MODEL_LENGTH = 4096
_CACHE_SLOTS = 64
_CACHE_BLOCK = 128
_NVIDIA = "vllm.models.kimi_k3.nvidia"
_CORES = {
    "kda_core": "(Tensor mixed_qkv, Tensor g1, Tensor g2, Tensor beta, "
    "Tensor(a!) core_attn_out, str layer_name) -> ()",
    "mla_core": "(Tensor positions, Tensor q, Tensor kv_c_normed, Tensor k_pe, "
    "Tensor(a!) attn_out, str layer_name) -> ()",
}
_library: list[torch.library.Library] = []


def text_config(layers: int = LAYERS) -> dict[str, Any]:
    """The published text config (moonshotai/Kimi-K3 config.json), cut to `layers` layers.

    Layer numbers in linear_attn_config count from 1; every fourth layer and the last of 93 are MLA.
    """
    full = [n for n in (*range(4, LAYERS, 4), LAYERS) if n <= layers]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": HIDDEN,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "latent_moe_use_norm": True,
        "routed_expert_hidden_size": 3584,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, layers + 1) if n not in full],
            "full_attn_layers": full,
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    }


@dataclass
class Modules:
    """What was built: decoder layers by number, and the whole model where it was asked for."""

    config: Any
    layers: dict[int, Any] = field(default_factory=dict)
    model: Any = None

    def decode_context(self, layers: list[int], m: int) -> contextlib.AbstractContextManager[Any]:
        """Forward context of a decode step of `m` requests through `layers`."""
        set_context = _module("vllm.forward_context").set_forward_context
        metadata, slots = {}, {}
        for index in layers:
            name, data = _metadata(self.layers[index].self_attn, m)
            metadata[name] = data
            slots[name] = _meta(m, dtype=torch.int64)
        context: contextlib.AbstractContextManager[Any] = set_context(
            metadata, self.config, num_tokens=m, slot_mapping=slots
        )
        return context


def _module(name: str) -> Any:
    """A module of vLLM, of which no types are known here."""
    return importlib.import_module(name)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def engine(
    tp: int,
    layers: int = LAYERS,
    moe_backend: str = "",
    changes: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """vLLM's config for the model at `tp`-way tensor parallelism, current while the block runs.

    moe_backend: "" keeps the experts in BF16; else they are MXFP4, as published, for that backend
    of vLLM ("auto" for its own choice). changes: other values of the text config.
    """
    arguments = _module("vllm.engine.arg_utils").EngineArgs
    torch.set_default_dtype(torch.bfloat16)
    text = {**text_config(layers), **(changes or {})}
    if moe_backend:
        text["quantization_config"] = {"quant_method": "mxfp4"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(text), encoding="utf-8")
        config = arguments(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            max_model_len=_MODEL_LENGTH,
            max_num_seqs=16,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            attention_backend="CUTLASS_MLA",
            moe_backend=moe_backend or "auto",
        ).create_engine_config()
    with _module("vllm.config").set_current_vllm_config(config):
        yield config


def init_groups(tp: int) -> None:
    """vLLM's tensor-parallel group over the fake process group."""
    state = _module("vllm.distributed.parallel_state")
    make_group = state.init_model_parallel_group

    def without_broadcaster(*args: Any, **kwargs: Any) -> Any:
        # It would wait for ranks that do not exist.
        kwargs["use_message_queue_broadcaster"] = False
        return make_group(*args, **kwargs)

    state.init_model_parallel_group = without_broadcaster
    state.in_the_same_node_as = lambda *args, **kwargs: [True] * tp
    state.init_distributed_environment(tp, 0, "env://", 0, backend="fake")
    state.initialize_model_parallel(tp)


def make_traceable() -> None:
    """Take out of vLLM what Dynamo cannot trace or what needs CuTe; decode math is not touched.

    Each item: two-stream overlap runs in sequence; the fused latent tail (CuTe) falls back to
    vLLM's next tier; a `torch.bmm(out=)` into a transposed view becomes bmm and copy; the workspace
    of the CUTLASS decode core keeps its size; a cached property with a lock is read beforehand.
    """
    model = _module(f"{_NVIDIA}.model")
    mla = _module(f"{_NVIDIA}.mla")
    runner = _module(f"{_NVIDIA}.latent_moe_runner")
    gemm = _module(f"{_NVIDIA}.low_latency_gemm")
    streams = _module("vllm.utils.multi_stream_utils")

    def in_sequence(first: Any, second: Any, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        return first(), second()

    for module in (model, mla, runner, gemm, streams):
        module.maybe_execute_in_parallel = in_sequence
    _take_second_tail_tier(runner.LatentMoERunner)

    def v_up_proj(self: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        heads = x.view(-1, self.num_local_heads, self.kv_lora_rank).transpose(0, 1)
        values = torch.bmm(heads, self.W_UV).transpose(0, 1)
        out.view(-1, self.num_local_heads, self.v_head_dim).copy_(values)

    mla.MultiHeadLatentAttention._v_up_proj = v_up_proj
    with CudaToMeta():
        cutlass = _module("vllm.v1.attention.backends.mla.cutlass_mla")
    cutlass.SM100Workspace.ensure_size = lambda self, *args, **kwargs: None
    norms = _module("vllm.models.common.ops.fused_qk_rmsnorm")
    _ = norms._FUSED_Q_KV_RMSNORM_KERNEL._kernel_arg_names


def _take_second_tail_tier(runner: Any) -> None:
    original = runner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # The tail operator is built (and CuTe imported) where the constructor sees the fused path.
        with mock.patch.object(runner, "_use_fused_path", return_value=False):
            original(self, *args, **kwargs)
        self.enable_k3_latent_moe_tail_fusion = False

    runner.__init__ = init


@contextlib.contextmanager
def attention_core(core: str) -> Iterator[None]:
    """Core "plain" leaves the attention bodies in the graph, "opaque" hides each in one operator.

    The operators are ours (k3fuse_vllm::kda_core, k3fuse_vllm::mla_core): they take the layer's
    name and read forward context and caches when they run, so that the graph keeps a symbolic M.
    """
    if core == "plain":
        yield
        return
    if core != "opaque":
        raise CaptureError(f"core {core!r}: choose plain or opaque")
    _define_cores()
    kda = _module(f"{_NVIDIA}.kda").KimiK3DeltaAttention
    mla = _module(f"{_NVIDIA}.mla").MultiHeadLatentAttention
    ops = torch.ops.k3fuse_vllm

    def kda_forward(
        self: Any, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any
    ) -> None:
        ops.kda_core(mixed_qkv, g1, g2, beta, core_attn_out, self.prefix)

    def mla_attention(
        self: Any, positions: Any, q: Any, kv_c_normed: Any, k_pe: Any, attn_out: Any
    ) -> None:
        ops.mla_core(positions, q, kv_c_normed, k_pe, attn_out, self.layer_name)

    with (
        mock.patch.object(kda, "_forward", kda_forward),
        mock.patch.object(mla, "_attention", mla_attention),
    ):
        yield


def _define_cores() -> None:
    if _library:
        return
    library = torch.library.Library(  # type: ignore[no-untyped-call]
        "k3fuse_vllm", "FRAGMENT"
    )
    for name, signature in _CORES.items():
        if not hasattr(torch.ops.k3fuse_vllm, name):
            library.define(name + signature)  # type: ignore[no-untyped-call]
            torch.library.register_fake(f"k3fuse_vllm::{name}", lambda *a: None, lib=library)
    _library.append(library)


def build_layers(config: Any, indices: list[int]) -> Modules:
    """The decoder layers `indices` of the model (0 to 92)."""
    decoder = _module(f"{_NVIDIA}.model").KimiDecoderLayer
    text = config.model_config.hf_text_config
    built = Modules(config)
    cuda: Any = torch.cuda
    for index in indices:
        with torch.device("meta"), CudaToMeta():
            built.layers[index] = decoder(
                text, config, f"model.layers.{index}", aux_stream=cuda.Stream()
            )
        _finish(built.layers[index].self_attn)
    return built


def build_model(config: Any) -> Modules:
    """The whole KimiLinearForCausalLM of the config."""
    causal_lm = _module(f"{_NVIDIA}.model").KimiLinearForCausalLM
    with torch.device("meta"), CudaToMeta():
        model = causal_lm(vllm_config=config)
    built = Modules(config, dict(enumerate(model.model.layers)), model)
    for layer in built.layers.values():
        _finish(layer.self_attn)
    return built


def build_tail(config: Any) -> Any:
    """vLLM's KimiLinearModel as after its last layer: real tail modules, one stub for all layers.

    The stub's `state` is what it returns: (delta, prefix, blocks) of the last layer.
    """
    module = _module(f"{_NVIDIA}.model")
    text = config.model_config.hf_text_config

    class Tail(module.KimiLinearModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.use_attn_res, self.use_sequence_parallel = True, False
            self.num_attn_res_blocks = BLOCK_SLOTS
            self.start_layer, self.end_layer = 0, 1
            self.aux_hidden_state_layers = ()
            self.output_attn_res_norm = module.RMSNorm(HIDDEN, eps=text.rms_norm_eps)
            self.output_attn_res_proj = module.ReplicatedLinear(
                HIDDEN, 1, bias=False, quant_config=None, prefix="model.output_attn_res_proj"
            )
            self.state: Any = None
            self.layers = [lambda **kwargs: self.state]

    with torch.device("meta"), CudaToMeta():
        return Tail()


def _finish(attention: Any) -> None:
    """Caches, and the weights that are derived after loading."""
    with torch.device("meta"), CudaToMeta():
        if _is_kda(attention):
            conv = 3 * attention.local_projection_size
            heads, dim = attention.local_num_heads, attention.head_dim
            attention.kv_cache = (
                _meta(_CACHE_SLOTS, attention.conv_size - 1, conv),
                _meta(_CACHE_SLOTS, heads, dim, dim, dtype=torch.float32),
            )
        else:
            attention.process_weights_after_loading(torch.bfloat16)
            attention.kv_cache = _meta(_CACHE_SLOTS, _CACHE_BLOCK, attention.head_size)


def _is_kda(attention: Any) -> bool:
    return type(attention).__name__ == "KimiK3DeltaAttention"


def _metadata(attention: Any, m: int) -> tuple[str, Any]:
    if _is_kda(attention):
        kda = _module(f"{_NVIDIA}.kda_metadata").KimiK3KDAMetadata
        counts: Mapping[str, int] = {
            "num_prefills": 0,
            "num_prefill_tokens": 0,
            "num_decodes": m,
            "num_decode_tokens": m,
            "num_spec_decodes": 0,
            "num_spec_decode_tokens": 0,
            "num_actual_tokens": m,
        }
        return attention.prefix, kda(
            **counts,
            non_spec_query_start_loc=_meta(m + 1, dtype=torch.int32),
            non_spec_state_indices_tensor=_meta(m, dtype=torch.int32),
        )
    mla = _module("vllm.model_executor.layers.attention.mla_attention")
    decode = mla.MLACommonDecodeMetadata(
        block_table=_meta(m, _MODEL_LENGTH // _CACHE_BLOCK, dtype=torch.int32),
        seq_lens=_meta(m, dtype=torch.int32),
        dcp_tot_seq_lens=None,
    )
    return attention.layer_name, mla.MLACommonMetadata(
        num_reqs=m,
        max_query_len=1,
        max_seq_len=_MODEL_LENGTH,
        num_actual_tokens=m,
        query_start_loc=_meta(m + 1, dtype=torch.int32),
        slot_mapping=_meta(m, dtype=torch.int64),
        num_decodes=m,
        num_decode_tokens=m,
        num_prefills=0,
        decode=decode,
    )

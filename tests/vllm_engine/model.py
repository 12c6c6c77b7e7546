"""A DeepSeek-V3-like model with random weights, small enough for a CPU engine.

MLA with a query latent, sigmoid-routed experts with a correction bias, one shared expert. The sizes
that vLLM fixes stay: a latent of 512 and 64 rotary dimensions.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = 3
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> Path:
    """Write config and weights; the same bits every time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: _random(shape, generator) if len(shape) > 1 else torch.ones(shape)
        for name, shape in _shapes().items()
    }
    save_file(
        {n: w.to(_dtype(n)).contiguous() for n, w in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16


def _shapes() -> dict[str, tuple[int, ...]]:
    h, heads, q, kv, rope = 256, 4, 96, 512, 64
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, h),
        "lm_head.weight": (512, h),
        "model.norm.weight": (h,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        attention = layer + "self_attn."
        shapes |= {
            layer + "input_layernorm.weight": (h,),
            layer + "post_attention_layernorm.weight": (h,),
            attention + "q_a_proj.weight": (q, h),
            attention + "q_a_layernorm.weight": (q,),
            attention + "q_b_proj.weight": (heads * (128 + rope), q),
            attention + "kv_a_proj_with_mqa.weight": (kv + rope, h),
            attention + "kv_a_layernorm.weight": (kv,),
            attention + "kv_b_proj.weight": (heads * (128 + 128), kv),
            attention + "o_proj.weight": (h, heads * 128),
        }
        if i == 0:
            shapes |= _mlp(layer + "mlp.", h, 512)
            continue
        shapes |= _mlp(layer + "mlp.shared_experts.", h, 128)
        shapes[layer + "mlp.gate.weight"] = (16, h)
        shapes[layer + "mlp.gate.e_score_correction_bias"] = (16,)
        for expert in range(16):
            shapes |= _mlp(f"{layer}mlp.experts.{expert}.", h, 128)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }

"""Graph source: transformers' unmodified `kimi_linear`, a tiny random model, one decode step.

It is a relative of Kimi K3, not K3: no AttnRes, no latent experts, no SiTU. It spells the shared
parts (projections, add + RMSNorm, sigmoid router, routed and shared experts) as Hugging Face does.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from k3fuse.rewriter.sources import SourceError, SourceGraph, SourceRequest, capture

EXPERTS = ("batched_mm", "grouped_mm")
_PROMPT = 4
_CACHE_LENGTH = 32
_TOKENS = 500


class DecodeStep(torch.nn.Module):
    """One decode step of a causal language model on its own static cache.

    forward: ids int64 [M, 1] -> logits [M, 1, vocabulary]. The caches are written in place, so that
    calling it again is the next step, with the same graph.
    """

    def __init__(self, model: torch.nn.Module, cache: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token of every request."""
        step = self.model(ids, past_key_values=self.cache, use_cache=True)
        logits: torch.Tensor = step.logits
        return logits


def config(layers: int = 2, experts_implementation: str = "batched_mm") -> Any:
    """A `KimiLinearConfig` with all layer forms that fit into `layers`.

    Layer 0 is linear attention with a dense MLP; every fourth and the last layer is full attention;
    all layers but the first have routed and shared experts.
    """
    if layers < 2:
        raise ValueError(
            f"layers={layers}: give at least 2; the static cache needs a full-attention layer"
        )
    if experts_implementation not in EXPERTS:
        raise ValueError(
            f"experts_implementation={experts_implementation!r}: choose one of "
            f"{', '.join(EXPERTS)}; others break the graph at every expert"
        )
    full = [i for i in range(1, layers) if i % 4 == 3 or i == layers - 1]
    made = _transformers("configuration_kimi_linear").KimiLinearConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_shared_experts=1,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
        num_experts=8,
        num_experts_per_token=2,
        model_max_length=256,
        layer_types=["full_attention" if i in full else "linear_attention" for i in range(layers)],
        mlp_layer_types=["sparse" if i else "dense" for i in range(layers)],
        linear_head_dim=32,
        linear_num_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    made._attn_implementation = "sdpa"
    made._experts_implementation = experts_implementation
    return made


def module(
    m: int = 1,
    layers: int = 2,
    *,
    experts_implementation: str = "batched_mm",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A `DecodeStep` after a short prompt, with the arguments of one step of `m` requests.

    `torch.compile(step, fullgraph=True)` gives one graph. Weights come from a fixed seed. Raises
    ImportError naming the package when transformers is missing.
    """
    if m < 1:
        raise ValueError(f"m={m}: a step has at least one token")
    settings = config(layers, experts_implementation)
    model_class = _transformers("modeling_kimi_linear").KimiLinearForCausalLM
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(settings).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Vectors (norm weights, gates' offsets) keep their meaning: around their first value.
            noise = torch.randn(weight.shape, generator=generator).mul(0.05).to(weight.dtype)
            weight.copy_(noise if weight.dim() > 1 else weight + noise)
    cache = importlib.import_module("transformers").StaticCache(
        config=settings, max_cache_len=_CACHE_LENGTH
    )
    step = DecodeStep(model, cache)
    prompt = torch.randint(3, _TOKENS, (m, _PROMPT), generator=generator)
    with torch.no_grad():
        ids = step(prompt)[:, -1:].argmax(-1)
    return step, (ids,), {}


def build(request: SourceRequest) -> list[SourceGraph]:
    """The built-in source `kimi-linear`: one decode step as one graph.

    form: the experts implementation, "batched_mm" (default) or "grouped_mm". A symbolic M is traced
    as one token. Raises SourceError where the form is unknown or transformers is missing.
    """
    form = request.form or EXPERTS[0]
    layers = request.layers or 4
    try:
        step, args, kwargs = module(request.m or 1, layers, experts_implementation=form)
    except (ValueError, ImportError) as error:
        raise SourceError(f"source kimi-linear: {error}") from error
    request.progress("trace")
    return capture(step, args, kwargs, name=f"kimi-linear {layers} layers {form}", fullgraph=True)


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module(f"transformers.models.kimi_linear.{name}")
    except ImportError as err:
        raise ImportError(
            "the kimi-linear source needs transformers with kimi_linear: "
            f"pip install 'transformers>=5.23' ({err})"
        ) from err

"""The published text configuration of Kimi K3, checked as a whole when it is built."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

MX_GROUP = 32
"""Elements that share one E8M0 scale in MXFP4 and MXFP8."""

ROW_PAD = 16
"""The merged KDA projection is padded to a multiple of this many rows."""


def _published_full_attention(num_layers: int) -> tuple[int, ...]:
    """1-based full-attention layers: every fourth layer, and the last one."""
    every_fourth = tuple(range(4, num_layers + 1, 4))
    return every_fourth if num_layers in every_fourth else (*every_fourth, num_layers)


@dataclass(frozen=True)
class KimiK3Config:
    """Geometry of the decoder; defaults are the published text config of moonshotai/Kimi-K3.

    Widths are in elements, layer lists are 1-based as published, properties are 0-based.
    Raises ValueError (argument, value, fix) where a value is impossible.
    """

    vocab_size: int = 163_840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    linear_num_heads: int = 96
    linear_head_dim: int = 128
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = True
    gate_lower_bound: float = -5.0
    full_attn_layers: tuple[int, ...] = _published_full_attention(93)
    intermediate_size: int = 33_792
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    latent_moe_use_norm: bool = True
    num_shared_experts: int = 2
    moe_router_activation_func: str = "sigmoid"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int = 12
    rms_norm_eps: float = 1e-5
    l2_norm_eps: float = 1e-6
    max_position_embeddings: int = 1_048_576
    tie_word_embeddings: bool = False
    bos_token_id: int = 163_584
    eos_token_id: int = 163_586
    pad_token_id: int = 163_839

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _bad(name, value, "use an integer of at least 1")
        for name in _MULTIPLES_OF_GROUP:
            value = getattr(self, name)
            if value % MX_GROUP:
                raise _bad(name, value, f"use a multiple of {MX_GROUP}, the MX scale group")
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                raise _bad(name, getattr(self, name), f"use {only!r}, the only published form")
        for name in (
            "rms_norm_eps",
            "l2_norm_eps",
            "routed_scaling_factor",
            "activation_situ_beta",
        ):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise _bad(name, getattr(self, name), "use a finite number above 0")
        self._check_relations()

    def _check_relations(self) -> None:
        """Raise ValueError where two values contradict each other."""
        if not self.activation_situ_linear_beta > 0:
            value = self.activation_situ_linear_beta
            raise _bad("activation_situ_linear_beta", value, "use a number above 0")
        if not -87.0 < self.gate_lower_bound < 0:
            value = self.gate_lower_bound
            raise _bad("gate_lower_bound", value, "use a negative number above -87 (FP32 exp)")
        if self.num_experts_per_token > self.num_experts:
            value = self.num_experts_per_token
            raise _bad(
                "num_experts_per_token", value, f"use at most num_experts={self.num_experts}"
            )
        layers = self.full_attn_layers
        if any(not 1 <= layer <= self.num_hidden_layers for layer in layers):
            fix = f"use 1-based layers up to num_hidden_layers={self.num_hidden_layers}"
            raise _bad("full_attn_layers", layers, fix)
        if tuple(sorted(set(layers))) != layers:
            raise _bad("full_attn_layers", layers, "list each layer once, in rising order")
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            fix = f"use 0 to num_hidden_layers={self.num_hidden_layers}"
            raise _bad("first_k_dense_replace", self.first_k_dense_replace, fix)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based layers with latent full attention."""
        return tuple(layer - 1 for layer in self.full_attn_layers)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers with Kimi delta attention."""
        full = set(self.mla_layers)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in full)

    @property
    def block_write_layers(self) -> tuple[int, ...]:
        """0-based layers that write the running prefix into the AttnRes bank."""
        return tuple(range(0, self.num_hidden_layers, self.attn_res_block_size))

    @property
    def num_blocks(self) -> int:
        """Slots of the AttnRes bank."""
        return len(self.block_write_layers)

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def kda_width(self) -> int:
        """Width of each of q, k, v and g of a KDA layer over all ranks."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def latent_row(self) -> int:
        """Width of one MLA cache row: normalised latent, then the unrotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` is a KDA layer. Raises ValueError outside the model."""
        return self._checked(layer) + 1 not in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts. Raises ValueError outside the model."""
        dense = self._checked(layer) < self.first_k_dense_replace
        return not dense and layer % self.moe_layer_freq == 0

    def is_block_write(self, layer: int) -> bool:
        """Whether 0-based `layer` writes an AttnRes block. Raises ValueError outside the model."""
        return self._checked(layer) % self.attn_res_block_size == 0

    def blocks_before(self, layer: int) -> int:
        """Blocks written by the layers below `layer`: ceil(layer / block size).

        `layer` may be the number of layers, for the final AttnRes.
        """
        if not 0 <= layer <= self.num_hidden_layers:
            raise _bad("layer", layer, f"use 0 to {self.num_hidden_layers}")
        return math.ceil(layer / self.attn_res_block_size)

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.num_hidden_layers:
            raise _bad("layer", layer, f"use 0 to {self.num_hidden_layers - 1}")
        return layer

    def kda_projection_rows(self, tp_size: int) -> int:
        """Rows of the merged KDA projection on one of `tp_size` ranks, padding included."""
        self.check_tp(tp_size)
        heads = self.linear_num_heads // tp_size
        rows = 4 * heads * self.linear_head_dim + self.linear_head_dim + heads
        return math.ceil(rows / ROW_PAD) * ROW_PAD

    def mla_projection_rows(self, tp_size: int) -> int:
        """Rows of the merged MLA projection on one of `tp_size` ranks."""
        self.check_tp(tp_size)
        gate = self.num_attention_heads // tp_size * self.v_head_dim
        return self.q_lora_rank + self.latent_row + gate

    def expected_sites(self, num_layers: int | None = None) -> dict[str, int]:
        """Pattern sites of the first `num_layers` layers (all of them for None), by formula.

        Every layer has one attention projection, one output projection and one AttnRes before
        attention; the final AttnRes is one more; every MoE layer has one router and one expert
        group. Raises ValueError for a count outside 1..num_hidden_layers.
        """
        layers = self.layer_count(num_layers)
        moe = sum(self.is_moe(layer) for layer in range(layers))
        return {
            "attention_projection": layers,
            "output_projection": layers,
            "router": moe,
            "experts": moe,
            "attn_res": layers + 1,
        }

    def layer_count(self, num_layers: int | None) -> int:
        """`num_layers`, or all layers for None. Raises ValueError outside 1..num_hidden_layers."""
        if num_layers is None:
            return self.num_hidden_layers
        if not 1 <= num_layers <= self.num_hidden_layers:
            raise _bad("num_layers", num_layers, f"use 1 to {self.num_hidden_layers}, or None")
        return num_layers

    def check_tp(self, tp_size: int) -> None:
        """Raise ValueError where the model cannot be split over `tp_size` ranks."""
        if tp_size < 1:
            raise _bad("tp_size", tp_size, "use an integer of at least 1")
        for name in _SPLIT_OVER_RANKS:
            if getattr(self, name) % tp_size:
                fix = f"use a divisor of {name}={getattr(self, name)}"
                raise _bad("tp_size", tp_size, fix)
        if self.moe_intermediate_size // tp_size % MX_GROUP:
            width = self.moe_intermediate_size
            fix = f"moe_intermediate_size={width} must leave a multiple of {MX_GROUP} per rank"
            raise _bad("tp_size", tp_size, fix)

    @classmethod
    def small(cls, num_layers: int = 4, **overrides: Any) -> KimiK3Config:
        """A model of a few million weights with every kind of layer, divisible by TP 1, 2 and 4.

        `overrides` replaces single fields. Raises ValueError as the constructor does.
        """
        tiny = cls(
            vocab_size=256,
            hidden_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            linear_num_heads=4,
            linear_head_dim=32,
            full_attn_layers=_published_full_attention(num_layers),
            intermediate_size=256,
            num_experts=16,
            num_experts_per_token=4,
            moe_intermediate_size=128,
            routed_expert_hidden_size=64,
            attn_res_block_size=2,
            max_position_embeddings=64,
            bos_token_id=253,
            eos_token_id=254,
            pad_token_id=255,
        )
        return dataclasses.replace(tiny, **overrides)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_num_heads",
    "linear_head_dim",
    "intermediate_size",
    "moe_layer_freq",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "num_shared_experts",
    "attn_res_block_size",
    "max_position_embeddings",
)
_MULTIPLES_OF_GROUP = ("moe_intermediate_size", "routed_expert_hidden_size")
_SPLIT_OVER_RANKS = (
    "num_attention_heads",
    "linear_num_heads",
    "intermediate_size",
    "moe_intermediate_size",
)
# Switches of the published config whose other settings belong to other models.
_ONLY: dict[str, object] = {
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "hidden_act": "situ",
    "tie_word_embeddings": False,
}


def _bad(name: str, value: object, fix: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not usable: {fix}")

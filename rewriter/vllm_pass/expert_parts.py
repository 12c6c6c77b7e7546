"""Parts of vLLM's MoE layers beside the routed experts: the shared expert, features by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Routers that choose by score and correction bias alone, from the layer's own parameters.
ROUTERS = ("CPURouter", "FusedTopKBiasRouter", "FusedTopKRouter", "GroupedTopKRouter")
# Modules that vLLM makes of a gated activation -> its name.
_ACTIVATIONS = {"SituAndMul": "situ", "SiluAndMul": "silu"}


@dataclass(frozen=True)
class SharedExpert:
    """The shared expert of a rank: gate and up weights (merged or apart), down weight, activation.

    down is None, and gate_up empty, where the module holds no such weights.
    """

    gate_up: tuple[Tensor, ...]
    down: Tensor | None
    activation: str
    beta: float | None
    linear_beta: float | None

    def tensors(self) -> dict[str, Tensor]:
        """Weights by name."""
        found = {f"shared gate and up {i}": w for i, w in enumerate(self.gate_up)}
        return found | ({"shared down": self.down} if self.down is not None else {})

    def facts(self) -> list[Any]:
        """Plain values of its activation."""
        return [self.activation, self.beta, self.linear_beta]


def shared_of(runner: Any) -> SharedExpert | None:
    """Return the shared expert that one of vLLM's MoE runners calls, None where there is none."""
    module = getattr(getattr(runner, "_shared_experts", None), "_layer", None)
    if module is None:
        return None
    merged = _weight(module, "gate_up_proj")
    apart = [_weight(module, name) for name in ("gate_proj", "up_proj")]
    gate_up = (merged,) if merged is not None else tuple(w for w in apart if w is not None)
    act = getattr(module, "act_fn", None)
    kind = type(act).__name__
    return SharedExpert(
        gate_up,
        _weight(module, "down_proj"),
        _ACTIVATIONS.get(kind, kind),
        getattr(act, "beta", None),
        getattr(act, "linear_beta", None),
    )


def _weight(module: Any, name: str) -> Tensor | None:
    found = getattr(getattr(module, name, None), "weight", None)
    return found if isinstance(found, Tensor) else None


def extras_of(runner: Any, held: Any, config: Any) -> list[str]:
    """Name every feature that changes a layer's result and that no kernel of ours computes."""
    parallel, router = config.moe_parallel_config, runner.router
    found = [
        ("expert parallelism", bool(parallel.use_ep)),
        ("data parallelism", int(parallel.dp_size) > 1),
        ("prefill context parallelism", int(getattr(config, "pcp_size", 1)) > 1),
        ("sequence parallelism", bool(config.is_sequence_parallel)),
        ("expert load balancing", bool(parallel.enable_eplb)),
        ("dual batch overlap", bool(getattr(runner, "enable_dbo", False))),
        ("an expert map", held.expert_map is not None),
        ("LoRA", bool(config.is_lora_enabled)),
        ("biases", bool(config.has_bias)),
        ("a SwiGLU limit", held.swiglu_limit is not None),
        ("router weights on the input", bool(held.apply_router_weight_on_input)),
        ("zero experts", type(router).__name__ == "ZeroExpertRouter"),
        ("routing by token id", getattr(held, "hash_indices_table", None) is not None),
        ("a second correction bias", getattr(router, "bias_vl", None) is not None),
        ("a padded latent", config.hidden_dim != config.hidden_dim_unpadded),
        # The op's logits are the row itself then, and it multiplies by the gate.
        ("a gate inside", getattr(runner, "gate", None) is not None),
        ("shared experts among the routed", bool(getattr(router, "num_fused_shared_experts", 0))),
        # The op's partials are not this rank's alone, or not summed over the slots yet.
        ("a reduced result", _reduces(held.quant_method)),
        ("a deferred sum", bool(getattr(config, "use_deferred_moe_finalize", False))),
        # Somebody wants the chosen ids, which ours do not hand over.
        ("captured ids", _captures(router, held)),
        *_shared_extras(getattr(getattr(runner, "_shared_experts", None), "_layer", None), config),
    ]
    return [name for name, there in found if there]


def _reduces(method: Any) -> bool:
    kernel = getattr(method, "moe_kernel", None)
    try:
        return kernel is not None and bool(kernel.output_is_reduced())
    except NotImplementedError:
        return True  # a kernel that does not say is not taken


def _captures(router: Any, held: Any) -> bool:
    places = ((router, "capture_fn"), (router, "_routing_replay_out"), (held, "routing_sink"))
    return any(getattr(owner, name, None) is not None for owner, name in places)


def _shared_extras(module: Any, config: Any) -> list[tuple[str, bool]]:
    if module is None:
        return []
    names = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    linears = [getattr(module, name, None) for name in names]
    down = linears[-1]
    reduced = bool(getattr(down, "reduce_results", False)) and int(config.tp_size) > 1
    return [
        ("a bias of the shared expert", any(getattr(m, "bias", None) is not None for m in linears)),
        ("a gate of the shared expert", getattr(module, "expert_gate", None) is not None),
        ("a reduced shared expert", reduced or getattr(module, "gemm_rs_ar", None) is not None),
        ("a sharded shared expert", bool(getattr(module, "shard_sequence_parallel", False))),
    ]

"""Expert weights, scales and routing of vLLM's MoE layers, found by name and read where they lie.

vLLM hides a layer's experts behind one operator, `moe_forward_shared(..., layer, ...)`: the graph
has a layer name and no weights. vLLM keeps every such layer under its name in
`compilation_config.static_forward_context`; while a step runs, the forward context carries the same
table as `no_compile_layers`. This module reads a layer there. Nothing is copied: tensors are the
layer's own parameters, in the layout of the MoE backend that the engine chose.

What keeps a layer from our kernels is said by the guards of the pattern `experts_partials`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse_vllm.expert_layout import Layout, of_method
from k3fuse_vllm.expert_parts import SharedExpert, extras_of, shared_of
from k3fuse_vllm.layer_ref import name_of


@dataclass(frozen=True)
class Routing:
    """How a layer chooses experts from its logits.

    bias: [experts] added before the choice alone, None where there is none. scale: on the chosen
    weights. groups, kept: expert groups, and how many of them a token may use. router: class.
    """

    top_k: int
    scoring: str
    renormalise: bool
    scale: float
    groups: int
    kept: int
    bias: Tensor | None
    custom: str = ""
    router: str = ""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer of a rank, read in place.

    w13: [local, 2 * width, latent], w2: [local, latent, width] in values; MXFP4 packs two values a
    byte (uint8) and has one scale byte per 32. None where the backend freed the layer's tensors.
    width: of one expert on this rank as stored, width_used without the padding behind it.
    experts: of all ranks; local: of this rank. shared: the shared expert, None where there is none.
    dtype: of the rows. extras: features of the layer that change its result.
    """

    name: str
    w13: Tensor | None
    w2: Tensor | None
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    routing: Routing
    activation: str
    beta: float | None
    linear_beta: float | None
    experts: int
    local: int
    latent: int
    width: int
    width_used: int
    tp: int
    dtype: torch.dtype
    layout: Layout
    shared: SharedExpert | None = None
    extras: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether the weights are MXFP4: two values a byte, with scales."""
        return self.w13_scale is not None

    @property
    def weights(self) -> dict[str, Tensor | None]:
        """Weights and scales by name."""
        return {
            "w13": self.w13, "w13_scale": self.w13_scale, "w2": self.w2, "w2_scale": self.w2_scale,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a kernel would read in place, by name."""
        found = {**self.weights, "correction bias": self.routing.bias}
        if self.shared is not None:
            found |= self.shared.tensors()
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def loaded(self) -> bool:
        """Whether the tensors have memory: an inspection builds layers without it."""
        return all(tensor.device.type != "meta" for tensor in self.tensors().values())

    def describe(self) -> dict[str, Any]:
        """Return plain values for a report; layers of one kind describe themselves alike."""
        return {
            "experts": self.experts,
            "top_k": self.routing.top_k,
            "latent": self.latent,
            "width": self.width,
            "activation": self.activation,
            "weights": "MXFP4"
            if self.packed
            else _dtype(self.w13.dtype)
            if self.w13 is not None
            else "",
            "backend": self.layout.backend,
            "layout": self.layout.name,
            "rows": self.layout.rows,
        }

    def facts(self) -> str:
        """Everything but name and addresses, as text: layers with one text compute alike.

        It goes into the graph, and so into every cache key that holds the graph.
        """
        plain = {
            "tensors": {
                name: [_dtype(t.dtype), list(t.shape), list(t.stride())]
                for name, t in self.tensors().items()
            },
            "routing": {k: v for k, v in vars(self.routing).items() if k != "bias"},
            "activation": [self.activation, self.beta, self.linear_beta],
            "shared": self.shared.facts() if self.shared is not None else None,
            "experts": [self.experts, self.local],
            "width": [self.width, self.width_used],
            "latent": self.latent,
            "tp": self.tp,
            "dtype": _dtype(self.dtype),
            "layout": asdict(self.layout),
            "extras": list(self.extras),
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))


_ENGINE: list[Any] = []


def use_engine(config: Any) -> None:
    """Remember the VllmConfig of this process's engine: its registry is there outside of a step."""
    _ENGINE[:] = [config]


def find(name: str) -> ExpertLayer:
    """Return a layer by name, from the running step or from this process's engine.

    Raises Refusal (ENGINE_UNSUPPORTED) where there is neither, no such MoE layer, or one without
    loaded weights.
    """
    table = _table()
    if table is None:
        raise Refusal(_not_loaded(name, "no engine runs here"))
    layer = read(name, _runner(name, table))
    if not layer.loaded:
        raise Refusal(_not_loaded(name, "the layer's tensors have no memory"))
    return layer


def digest() -> str:
    """Digest of the kinds of MoE layers that this process's engine has loaded; "" for none.

    A changed layout, beta or routing is another one: caches that hold rewritten graphs key on it.
    """
    try:
        layers = survey(_ENGINE[0]) if _ENGINE else {}
    except Refusal as refusal:
        return refusal.reason.code.value
    kinds = sorted({layer.facts() for layer in layers.values() if layer.loaded})
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:16] if kinds else ""


def _table() -> Mapping[str, Any] | None:
    # Whoever has no engine has not imported this module of vLLM, and need not.
    context = sys.modules.get("vllm.forward_context")
    if context is not None and context.is_forward_context_available():
        running: Mapping[str, Any] = context.get_forward_context().no_compile_layers
        return running
    if not _ENGINE:
        return None
    held: Mapping[str, Any] = _ENGINE[0].compilation_config.static_forward_context
    return held


def _not_loaded(name: str, why: str) -> Reason:
    return Reason(
        Code.ENGINE_UNSUPPORTED,
        f"the experts of {name} are not loaded: {why}",
        expected="a layer of vLLM's registry with its weights",
        actual=why,
        hint="nothing is lost: vLLM's own experts run; an engine decides when it starts",
    )


def lookup(layer: Any) -> ExpertLayer:
    """Return the layer that a running step names (a LayerName or a plain name).

    Raises Refusal where the forward context has no such MoE layer.
    """
    from vllm.forward_context import get_forward_context

    name = name_of(layer)
    table = get_forward_context().no_compile_layers
    return read(name, _runner(name, table))


def survey(config: Any) -> dict[str, ExpertLayer]:
    """Return every MoE layer of an engine, from the registry of its VllmConfig, after loading."""
    table = config.compilation_config.static_forward_context
    names = getattr(config.compilation_config, "static_all_moe_layers", ())
    return {name: read(name, _runner(name, table)) for name in names}


def _runner(name: str, table: Mapping[str, Any]) -> Any:
    runner = table.get(name)
    if runner is None or not hasattr(runner, "routed_experts"):
        raise Refusal(
            Reason(
                Code.ENGINE_UNSUPPORTED,
                f"vLLM's layer registry has no MoE layer {name!r}",
                expected="a MoE runner with routed_experts",
                actual="nothing" if runner is None else type(runner).__name__,
                hint="use vLLM 0.32 or 0.33",
            )
        )
    return runner


def read(name: str, runner: Any) -> ExpertLayer:
    """Read one of vLLM's MoE runners.

    Raises Refusal where this vLLM's layer has not the fields that 0.32 and 0.33 have.
    """
    try:
        return _read(name, runner)
    except (AttributeError, TypeError, ValueError) as error:
        raise Refusal(
            Reason(
                Code.ENGINE_UNSUPPORTED,
                f"{name}: this vLLM's MoE layer has another form ({error})",
                expected="the fields of vLLM 0.32 and 0.33",
                actual=type(runner).__name__,
                hint="use vLLM 0.32 or 0.33",
            )
        ) from error


def _read(name: str, runner: Any) -> ExpertLayer:
    held, config = runner.routed_experts, runner.moe_config
    return ExpertLayer(
        name,
        _tensor(held, "w13_weight"),
        _tensor(held, "w2_weight"),
        _tensor(held, "w13_weight_scale"),
        _tensor(held, "w2_weight_scale"),
        Routing(
            top_k=int(held.top_k),
            scoring=str(held.scoring_func),
            renormalise=bool(held.renormalize),
            # Where vLLM scales the summed rows instead, it does so behind the op, and this is 1.
            scale=float(held.routed_scaling_factor),
            groups=int((held.num_expert_group or 1) if held.use_grouped_topk else 1),
            kept=int((held.topk_group or 1) if held.use_grouped_topk else 1),
            bias=held.e_score_correction_bias,
            custom="" if held.custom_routing_function is None else "a routing function of its own",
            router=type(runner.router).__name__,
        ),
        activation=str(getattr(held.activation, "value", held.activation)),
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
        experts=int(held.global_num_experts),
        local=int(held.local_num_experts),
        latent=int(config.hidden_dim),
        width=int(config.intermediate_size_per_partition),
        width_used=int(config.intermediate_size_per_partition_unpadded),
        tp=int(config.tp_size),
        dtype=config.in_dtype,
        layout=of_method(held.quant_method),
        shared=shared_of(runner),
        extras=tuple(extras_of(runner, held, config)),
    )


def _tensor(owner: Any, name: str) -> Tensor | None:
    found = getattr(owner, name, None)
    return found if isinstance(found, Tensor) else None


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def report(config: Any, *, reference: bool = False) -> dict[str, Any]:
    """Return what the engine's MoE layers hold and what keeps kernels from them, as plain values.

    {"layers": count, "kinds": [description with its count], "reasons": [one of each]}; a layer that
    cannot be read is a reason. reference: what the reference implementations take.
    """
    from k3fuse.patterns.experts_partials import objections

    try:
        layers: dict[str, Any] = dict(survey(config))
    except Refusal as refusal:
        return {"layers": 0, "kinds": [], "reasons": [refusal.reason.to_json()]}
    kinds: dict[str, dict[str, Any]] = {}
    reasons: dict[str, dict[str, Any]] = {}
    for layer in layers.values():
        described = layer.describe()
        kind = kinds.setdefault(repr(described), {**described, "layers": 0})
        kind["layers"] += 1
        for reason in objections(layer, reference=reference):
            reasons.setdefault(reason.sentence.removeprefix(layer.name), reason.to_json())
    return {
        "layers": len(layers),
        "kinds": list(kinds.values()),
        "reasons": list(reasons.values()),
    }

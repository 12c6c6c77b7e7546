"""Expert weights, scales and routing of vLLM's MoE layers, found by name and read where they lie.

vLLM hides a layer's experts behind one operator, `moe_forward_shared(..., layer, ...)`: the graph
has a layer name and no weights. vLLM keeps every such layer under its name in
`compilation_config.static_forward_context`; while a step runs, the forward context carries the same
table as `no_compile_layers`. This module reads a layer there. Nothing is copied: tensors are the
layer's own parameters, in the layout of the MoE backend that the engine chose.

`objections` says what keeps a layer from a kernel that reads Kimi K3's experts; an experts op for
`moe_forward_shared` may run where it is empty, and the layer stays vLLM's where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse_vllm.expert_layout import ROWS, Layout, of_method
from k3fuse_vllm.layer_ref import name_of

# Bytes of one TMA or 128-bit load; expert rows have to start on it.
ALIGNMENT = 16


@dataclass(frozen=True)
class Routing:
    """How a layer chooses experts from its logits.

    bias: [experts] added before the choice alone, None where there is none. scale: on the chosen
    weights. groups, kept: expert groups, and how many of them a token may use.
    """

    top_k: int
    scoring: str
    renormalise: bool
    scale: float
    groups: int
    kept: int
    bias: Tensor | None
    custom: str = ""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer of a rank, read in place.

    w13: [local, 2 * width, latent], w2: [local, latent, width] in values; MXFP4 packs two values a
    byte (uint8) and has one scale byte per 32. None where the backend freed the layer's tensors.
    width: of one expert on this rank as stored, width_used without the padding behind it.
    experts: of all ranks; local: of this rank. shared_*: the shared expert's weights, () and None
    where there is none. dtype: of the rows. extras: features of the layer that change its result.
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
    shared_gate_up: tuple[Tensor, ...] = ()
    shared_down: Tensor | None = None
    extras: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether the weights are MXFP4: two values a byte, with scales."""
        return self.w13_scale is not None

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


@dataclass(frozen=True)
class Wanted:
    """What a kernel of the experts covers; the defaults are Kimi K3's published text config."""

    experts: int = 896
    top_k: int = 16
    latent: int = 3584
    width: int = 3072
    activation: str = "situ"
    beta: float = 4.0
    linear_beta: float = 25.0
    scoring: str = "sigmoid"
    renormalise: bool = True
    scale: float = 1.0
    packed: bool = True
    layouts: Sequence[str] = (ROWS,)


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
    except AttributeError as error:
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
    gate_up, down = _shared(runner)
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
            # One of the two is 1.0: vLLM scales the weights, or the summed rows.
            scale=float(held.routed_scaling_factor) * float(runner.routed_scaling_factor),
            groups=int((held.num_expert_group or 1) if held.use_grouped_topk else 1),
            kept=int((held.topk_group or 1) if held.use_grouped_topk else 1),
            bias=held.e_score_correction_bias,
            custom="" if held.custom_routing_function is None else "a routing function of its own",
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
        shared_gate_up=gate_up,
        shared_down=down,
        extras=tuple(_extras(runner, held, config)),
    )


def _tensor(owner: Any, name: str) -> Tensor | None:
    found = getattr(owner, name, None)
    return found if isinstance(found, Tensor) else None


def _shared(runner: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the shared expert's gate and up weights (merged or apart) and its down weight."""
    shared = getattr(runner, "_shared_experts", None)
    module = getattr(shared, "_layer", None)
    if module is None:
        return (), None
    merged = _tensor(getattr(module, "gate_up_proj", None), "weight")
    apart = [_tensor(getattr(module, f"{part}_proj", None), "weight") for part in ("gate", "up")]
    found = (merged,) if merged is not None else tuple(w for w in apart if w is not None)
    return found, _tensor(getattr(module, "down_proj", None), "weight")


def _extras(runner: Any, held: Any, config: Any) -> list[str]:
    """Name every feature that changes a layer's result and that no kernel of ours computes."""
    parallel = config.moe_parallel_config
    found = [
        ("expert parallelism", bool(parallel.use_ep)),
        ("data parallelism", int(parallel.dp_size) > 1),
        ("sequence parallelism", bool(config.is_sequence_parallel)),
        ("expert load balancing", bool(parallel.enable_eplb)),
        ("an expert map", held.expert_map is not None),
        ("LoRA", bool(config.is_lora_enabled)),
        ("biases", bool(config.has_bias)),
        ("a SwiGLU limit", held.swiglu_limit is not None),
        ("router weights on the input", bool(held.apply_router_weight_on_input)),
        ("zero experts", type(runner.router).__name__ == "ZeroExpertRouter"),
        ("routing by token id", getattr(held, "hash_indices_table", None) is not None),
        ("a padded latent", config.hidden_dim != config.hidden_dim_unpadded),
    ]
    return [name for name, there in found if there]


def objections(layer: ExpertLayer, wanted: Wanted | None = None) -> list[Reason]:
    """Return everything that keeps `layer` from a kernel that covers `wanted`; empty = covered."""
    want = wanted or Wanted()
    routing, width = layer.routing, want.width // max(layer.tp, 1)
    checks: list[tuple[Code, str, Any, Any]] = [
        (Code.ATTR_MISMATCH, "activation", want.activation, layer.activation),
        (Code.ATTR_MISMATCH, "activation's beta", want.beta, layer.beta),
        (Code.ATTR_MISMATCH, "activation's linear beta", want.linear_beta, layer.linear_beta),
        (Code.SHAPE_MISMATCH, "count of experts", want.experts, layer.experts),
        (Code.SHAPE_MISMATCH, "experts of this rank", want.experts, layer.local),
        (Code.SHAPE_MISMATCH, "experts a token", want.top_k, routing.top_k),
        (Code.SHAPE_MISMATCH, "latent width", want.latent, layer.latent),
        (Code.SHAPE_MISMATCH, "width of one expert on this rank", width, layer.width_used),
        # Between gate and up rows there may be no rows of padding: vLLM pads 192 to 256 at TP16.
        (Code.SHAPE_MISMATCH, "stored width of one expert", layer.width_used, layer.width),
        (Code.ATTR_MISMATCH, "scoring", want.scoring, routing.scoring),
        (Code.ATTR_MISMATCH, "renormalised weights", want.renormalise, routing.renormalise),
        (Code.ATTR_MISMATCH, "scale of the weights", want.scale, routing.scale),
        (Code.ATTR_MISMATCH, "expert groups", 1, routing.groups),
        (Code.ATTR_MISMATCH, "routing", "by score", routing.custom or "by score"),
        (Code.DTYPE_MISMATCH, "dtype of the rows", "bfloat16", _dtype(layer.dtype)),
        (Code.OP_MISMATCH, "features", "none", ", ".join(layer.extras) or "none"),
    ]
    found = [
        _reason(layer, code, what, expected, actual)
        for code, what, expected, actual in checks
        if expected != actual
    ]
    return [*found, *_weight_objections(layer, want)]


def _weight_objections(layer: ExpertLayer, want: Wanted) -> list[Reason]:
    if layer.layout.name not in want.layouts:
        sentence = f"layout of the weights ({layer.layout.backend}: {layer.layout.rows})"
        expected = " or ".join(want.layouts)
        # Sizes and strides of another layout say nothing more.
        return [_reason(layer, Code.STRIDE_OR_ALIGN, sentence, expected, layer.layout.name)]
    stored = "uint8" if want.packed else _dtype(layer.dtype)
    per_item = 2 if want.packed else 1
    shapes = {
        "w13": (layer.w13, stored, (layer.local, 2 * layer.width, layer.latent // per_item)),
        "w2": (layer.w2, stored, (layer.local, layer.latent, layer.width // per_item)),
    }
    if want.packed:
        shapes["w13_scale"] = (
            layer.w13_scale, "uint8", (layer.local, 2 * layer.width, layer.latent // 32),
        )  # fmt: skip
        shapes["w2_scale"] = (
            layer.w2_scale, "uint8", (layer.local, layer.latent, layer.width // 32),
        )  # fmt: skip
    found = []
    for name, (tensor, dtype, shape) in shapes.items():
        found += _tensor_objections(layer, name, tensor, dtype, shape)
    if layer.packed and not want.packed:
        found.append(_reason(layer, Code.DTYPE_MISMATCH, "weights", "not packed", "MXFP4"))
    bias = layer.routing.bias
    if bias is not None:
        name, dtype = "correction bias", _dtype(torch.float32)
        found += _tensor_objections(layer, name, bias, dtype, (layer.experts,))
    for weight in (*layer.shared_gate_up, layer.shared_down):
        if weight is not None and _dtype(weight.dtype) != _dtype(layer.dtype):
            what, actual = "dtype of the shared expert", _dtype(weight.dtype)
            found.append(_reason(layer, Code.DTYPE_MISMATCH, what, _dtype(layer.dtype), actual))
    return found


def _tensor_objections(
    layer: ExpertLayer, name: str, tensor: Tensor | None, dtype: str, shape: tuple[int, ...]
) -> list[Reason]:
    if tensor is None:
        return [_reason(layer, Code.DTYPE_MISMATCH, name, dtype, "no tensor")]
    found = []
    if _dtype(tensor.dtype) != dtype:
        what = f"dtype of {name}"
        found.append(_reason(layer, Code.DTYPE_MISMATCH, what, dtype, _dtype(tensor.dtype)))
    if tuple(tensor.shape) != shape:
        what = f"shape of {name}"
        found.append(_reason(layer, Code.SHAPE_MISMATCH, what, shape, tuple(tensor.shape)))
    elif not tensor.is_contiguous():
        what = f"strides of {name}"
        found.append(_reason(layer, Code.STRIDE_OR_ALIGN, what, "contiguous", tensor.stride()))
    if tensor.device.type != "meta" and tensor.data_ptr() % ALIGNMENT:
        what, actual = f"address of {name}", f"{tensor.data_ptr() % ALIGNMENT} bytes beyond"
        expected = f"a multiple of {ALIGNMENT} bytes"
        found.append(_reason(layer, Code.STRIDE_OR_ALIGN, what, expected, actual))
    return found


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(layer: ExpertLayer, code: Code, what: str, expected: Any, actual: Any) -> Reason:
    return Reason(
        code,
        f"{layer.name}: {what} is {actual}",
        expected=str(expected),
        actual=str(actual),
        hint="nothing is lost: vLLM's own experts run",
    )


def report(config: Any) -> dict[str, Any]:
    """Return what the engine's MoE layers hold and what keeps kernels from them, as plain values.

    {"layers": count, "kinds": [description with its count], "reasons": [one of each]}; a layer that
    cannot be read is a reason.
    """
    try:
        layers = survey(config)
    except Refusal as refusal:
        return {"layers": 0, "kinds": [], "reasons": [refusal.reason.to_json()]}
    kinds: dict[str, dict[str, Any]] = {}
    reasons: dict[str, dict[str, Any]] = {}
    for layer in layers.values():
        described = layer.describe()
        kind = kinds.setdefault(repr(described), {**described, "layers": 0})
        kind["layers"] += 1
        for reason in objections(layer):
            reasons.setdefault(reason.sentence.removeprefix(layer.name), reason.to_json())
    return {
        "layers": len(layers),
        "kinds": list(kinds.values()),
        "reasons": list(reasons.values()),
    }

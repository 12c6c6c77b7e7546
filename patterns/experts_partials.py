"""The experts behind vLLM's opaque op, found through its layer registry: routing, both partials."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import sympy
from sympy import Eq, Or
from torch import fx

from k3fuse.kernels.common.operands import ALIGNMENT
from k3fuse.kernels.experts.config import stored_width
from k3fuse.kernels.experts_partials import op as _registered  # noqa: F401 - what the op calls
from k3fuse.kernels.experts_partials.policy import TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.moe import OpaqueExperts, opaque_experts
from k3fuse.patterns.policy import pick
from k3fuse.rewriter.canonical import dtype_of
from k3fuse.rewriter.guards import Guard, Value, failures
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Replacement, Site, in_order
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, bound_args, op_of, shape_of
from k3fuse_vllm import experts as registry
from k3fuse_vllm.expert_layout import ROWS, TRTLLM
from k3fuse_vllm.expert_parts import ROUTERS
from k3fuse_vllm.experts import ExpertLayer

_E, _LOCAL, _TOP_K, _L, _I, _GROUPS = sympy.symbols(
    "E E_rank top_k L I expert_groups", integer=True, nonnegative=True
)
_ROW = sympy.Symbol("row", integer=True, nonnegative=True)
_ACTIVATION, _BETAS, _SHARED, _SCORING, _RENORMALISED, _SCALE = sympy.symbols(
    "activation betas shared_activation scoring renormalised scale"
)
_ROUTING, _BIAS_DTYPE, _WEIGHTS, _ROUNDED_TO, _LAYOUT, _PLACED = sympy.symbols(
    "routing bias_dtype weights activations layout placed"
)
_FEATURES, _SHARED_DTYPE, _LOGITS, _IDS = sympy.symbols(
    "features shared_dtype logits_dtype input_ids"
)
_NONE = s.name("none")
_STOCK = "nothing is lost: vLLM's own experts run"

# Asked of a layer, whatever graph it stands in.
LAYER_GUARDS: tuple[Guard, ...] = (
    Guard(
        Or(Eq(_LAYOUT, s.name(ROWS)), Eq(_LAYOUT, s.name(TRTLLM))),
        Code.STRIDE_OR_ALIGN,
        "the orders that the kernels read",
        hint="leave vLLM's --moe-backend at auto, or set flashinfer_trtllm_afp8 where it offers it",
    ),
    Guard(Eq(_WEIGHTS, s.name("mxfp4")), Code.DTYPE_MISMATCH, "experts are MXFP4", hint=_STOCK),
    Guard(
        Eq(_ROUNDED_TO, s.name("mxfp8")),
        Code.DTYPE_MISMATCH,
        "the kernel rounds an expert's rows to MXFP8, and the engine's backend has to, too",
        hint=_STOCK,
    ),
    Guard(
        Eq(_PLACED, s.YES),
        Code.STRIDE_OR_ALIGN,
        "weights are read where they lie: shapes of the layout, contiguous, 16-byte aligned",
        hint=_STOCK,
    ),
    Guard(Eq(_ACTIVATION, s.name("situ")), Code.ATTR_MISMATCH, "the kernels compute SiTU"),
    Guard(
        Eq(_BETAS, s.name("4, 25")), Code.ATTR_MISMATCH, "Kimi K3's beta and linear beta",
        scope="kernel",
    ),
    Guard(
        Eq(_SHARED, s.name("same")),
        Code.ATTR_MISMATCH,
        "there is a shared expert, with the routed experts' activation and betas",
    ),
    Guard(Eq(_SCORING, s.name("sigmoid")), Code.ATTR_MISMATCH, "K3 scores with a sigmoid"),
    Guard(
        Eq(_RENORMALISED, s.YES), Code.ATTR_MISMATCH, "K3's weights are renormalised",
        scope="kernel",
    ),
    Guard(Eq(_SCALE, s.name("1")), Code.ATTR_MISMATCH, "K3 scales weights by 1", scope="kernel"),
    Guard(Eq(_GROUPS, 1), Code.ATTR_MISMATCH, "experts are chosen from one group"),
    Guard(
        Eq(_ROUTING, s.name("by score")),
        Code.ATTR_MISMATCH,
        "one of vLLM's routers that choose by score and correction bias",
        hint=_STOCK,
    ),
    Guard(
        Or(Eq(_BIAS_DTYPE, s.FP32), Eq(_BIAS_DTYPE, _NONE)),
        Code.DTYPE_MISMATCH,
        "the correction bias is FP32",
    ),
    Guard(
        Eq(_FEATURES, _NONE),
        Code.OP_MISMATCH,
        "nothing else changes the result: biases, LoRA, an expert map, a gate inside",
        hint=_STOCK,
    ),
    Guard(Eq(_SHARED_DTYPE, s.BF16), Code.DTYPE_MISMATCH, "the shared expert is BF16"),
    Guard(Eq(_LOCAL, _E), Code.SHAPE_MISMATCH, "every rank has a share of every expert"),
    Guard(Eq(_E, 896), Code.SHAPE_MISMATCH, "Kimi K3's experts", scope="kernel"),
    Guard(Eq(_TOP_K, 16), Code.SHAPE_MISMATCH, "16 experts a token", scope="kernel"),
    Guard(Eq(_L, 3584), Code.SHAPE_MISMATCH, "Kimi K3's latent width", scope="kernel"),
    Guard(
        Eq(_I * s.TP, 3072), Code.SHAPE_MISMATCH, "width of one expert over all ranks",
        scope="kernel",
    ),
    s.TP_SIZE,
)  # fmt: skip


def layer_values(layer: ExpertLayer) -> dict[sympy.Symbol, Value]:
    """What LAYER_GUARDS are evaluated on."""
    routing, shared = layer.routing, layer.shared
    by_score = not routing.custom and routing.router in ROUTERS
    same = shared is not None and (shared.activation, shared.beta, shared.linear_beta) == (
        (layer.activation, layer.beta, layer.linear_beta)
        if layer.activation == "situ"
        else (layer.activation, None, None)
    )
    dtypes = {t.dtype for t in shared.tensors().values()} if shared is not None else set()
    return {
        _LAYOUT: s.name(layer.layout.name),
        _WEIGHTS: s.name("mxfp4" if layer.packed else "not packed"),
        _ROUNDED_TO: s.name(layer.layout.activations or "not known"),
        _PLACED: s.name(misplaced(layer) or "yes"),
        _ACTIVATION: s.name(_activation(layer)),
        _BETAS: s.name(f"{_number(layer.beta)}, {_number(layer.linear_beta)}"),
        _SHARED: s.name("same" if same else "other" if shared is not None else "none"),
        _SCORING: s.name(routing.scoring),
        _RENORMALISED: s.yes(routing.renormalise),
        _SCALE: s.name(_number(routing.scale)),
        _GROUPS: s.value(routing.groups),
        _ROUTING: s.name("by score" if by_score else routing.custom or routing.router),
        _BIAS_DTYPE: s.value(routing.bias.dtype) if routing.bias is not None else _NONE,
        _FEATURES: s.name(", ".join(layer.extras) or "none"),
        _SHARED_DTYPE: s.value(dtypes.pop()) if len(dtypes) == 1 else s.name("mixed"),
        _E: s.value(layer.experts),
        _LOCAL: s.value(layer.local),
        _TOP_K: s.value(routing.top_k),
        _L: s.value(layer.latent),
        _I: s.value(layer.width_used),
        s.TP: s.value(layer.tp),
    }


def _activation(layer: ExpertLayer) -> str:
    """The activation's name; SiTU without a linear beta does not squash the up row."""
    if layer.activation == "situ" and not ((layer.beta or 0) > 0 and (layer.linear_beta or 0) > 0):
        return "situ without positive betas"
    return layer.activation


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def misplaced(layer: ExpertLayer) -> str:
    """What is not where a kernel would read it, "" where all of it is."""
    stored = stored_width(layer.width_used) if layer.layout.name == TRTLLM else layer.width_used
    if layer.width != stored:
        return f"experts of {layer.width_used} columns are stored with {layer.width}"
    experts, latent = layer.local, layer.latent
    shapes: dict[str, tuple[int, ...]] = {
        "w13": (experts, 2 * stored, latent // 2),
        "w13_scale": (experts, 2 * stored, latent // 32),
        "w2": (experts, latent, stored // 2),
        "w2_scale": (experts, latent, stored // 32),
        "correction bias": (layer.experts,),
    }
    if layer.shared is None or layer.shared.down is None or not layer.shared.gate_up:
        return "the shared expert has no weights of a known form"
    for name, tensor in layer.weights.items():
        if tensor is None:
            return f"{name} is not there"
        # What is a byte a scale there is typed as FP8, for vLLM's kernel.
        if tensor.element_size() != 1:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
    for name, tensor in layer.tensors().items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            return f"{name} is {tuple(tensor.shape)}, not {shapes[name]}"
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}"
        if tensor.device.type != "meta" and tensor.data_ptr() % ALIGNMENT:
            return f"{name} starts {tensor.data_ptr() % ALIGNMENT} bytes beyond a multiple of 16"
    return ""


def objections(layer: ExpertLayer, *, reference: bool = False) -> list[Reason]:
    """Return what keeps `layer` from the kernels, or from the reference; empty = covered."""
    _, reasons = failures(
        LAYER_GUARDS, layer_values(layer), None, (layer.name,), kernel_scope=not reference
    )
    return reasons


class ExpertsPartials(Pattern):
    """One site an opaque experts op whose layer an engine has loaded."""

    name: ClassVar[str] = "experts_partials"
    summary: ClassVar[str] = (
        "vLLM's opaque experts, found in its layer registry: routing, routed and shared partials"
    )
    priority: ClassVar[int] = 5
    optional: ClassVar[bool] = True
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        *LAYER_GUARDS,
        s.HIDDEN_SIZE,
        Guard(Eq(_ROW, _L), Code.SHAPE_MISMATCH, "the row is as wide as the layer's latent"),
        Guard(Eq(_LOGITS, s.FP32), Code.DTYPE_MISMATCH, "the choice reads FP32 logits"),
        Guard(Eq(_IDS, _NONE), Code.OP_MISMATCH, "no expert is chosen by a token's id"),
        Guard(Eq(s.X_DTYPE, s.BF16), Code.DTYPE_MISMATCH, "rows are BF16"),
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """Every opaque op; one whose layer cannot be read is near."""
        for opaque in opaque_experts(view):
            try:
                yield self._site(view, opaque)
            except Refusal as refusal:
                yield NearMiss(self.name, opaque.node, refusal.reason)

    def _site(self, view: GraphView, opaque: OpaqueExperts) -> Site:
        arguments = list(bound_args(opaque.node).values())
        if not op_of(opaque.node).endswith("moe_forward_shared") or len(arguments) != 6:
            sentence = f"{opaque.node.name}: there is no shared expert behind this op"
            raise Refusal(
                Reason(
                    Code.OP_MISMATCH, sentence, (opaque.node.name,), "vllm.moe_forward_shared",
                    op_of(opaque.node), _STOCK,
                )
            )  # fmt: skip
        hidden, logits, shared_x, ids, ref, _ = arguments
        layer = registry.find(_layer_name(opaque.node, ref))
        row = shared_x if isinstance(shared_x, fx.Node) else hidden
        values = {
            **layer_values(layer),
            s.M: s.value(shape_of(hidden)[0]),
            s.H: s.value(shape_of(row)[-1]),
            _ROW: s.value(shape_of(hidden)[-1]),
            _LOGITS: s.value(dtype_of(logits)),
            _IDS: _NONE if ids is None else s.name("given"),
            s.X_DTYPE: s.common_dtype(hidden, row),
        }
        made = tuple(n for n in (opaque.shared, opaque.routed) if n is not None)
        return Site(
            self.name,
            f"{layer.layout.name} {'mxfp4' if layer.packed else 'plain'}",
            opaque.node,
            in_order([opaque.node, *made], view.index),
            {"hidden": hidden, "logits": logits, "shared_x": shared_x},
            made,
            values,
            (f"layer {layer.name}, {layer.layout.backend}",),
            facts=(opaque, arguments, layer),
        )

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """vLLM's call with two more arguments: the facts of its layer, and the target."""
        from k3fuse_vllm.experts_op import experts_op

        opaque: OpaqueExperts
        arguments: list[Any]
        layer: ExpertLayer
        opaque, arguments, layer = site.facts
        outputs = [
            Output(node, i)
            for i, node in enumerate((opaque.shared, opaque.routed))
            if node is not None
        ]
        args = (*arguments, layer.facts(), target.name)
        return Replacement(experts_op(), args, {}, tuple(outputs))

    def factors(self) -> Mapping[str, str]:
        """Digest of the layers that this process's engine has loaded."""
        return {"layers": registry.digest()}

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M."""
        return pick(TABLE, site, target)


_QUOTED = re.compile(r"^\w+\('([^']+)'\)$")


def _layer_name(node: fx.Node, ref: Any) -> str:
    """The name that an opaque op's layer argument stands for; Refusal where it says none."""
    if isinstance(ref, str):
        return ref
    if isinstance(ref, fx.Node):
        value = ref.meta.get("val")
        name = getattr(getattr(value, "real_obj", value), "value", None)
        if isinstance(name, str):
            return name
        if found := _QUOTED.match(str(ref.meta.get("opaque", ""))):
            return found[1]
    raise Refusal(
        Reason(
            Code.ENGINE_UNSUPPORTED,
            f"{node.name}: the layer argument names no layer",
            (node.name,),
            expected="vLLM's LayerName",
            actual=type(ref).__name__,
            hint=_STOCK,
        )
    )

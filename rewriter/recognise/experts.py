"""Routed experts: gathered, batched or grouped products of the chosen ones, weighted and summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional as F

from k3fuse.rewriter.reasons import Refusal
from k3fuse.rewriter.recognise.activation import situ_wide_kept
from k3fuse.rewriter.template import Captured, Like, Mismatch, Template, match_template, tokens_of
from k3fuse.rewriter.view import GraphView, dtype_of, op_of, shape_of

Tensor = torch.Tensor
MX_GROUP = 32

# --- reference spellings ------------------------------------------------------------------------


def e2m1(codes: Tensor) -> Tensor:
    """FP32 value of each 4-bit code: sign, two exponent bits, one mantissa bit."""
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).float()
    normal = (mantissa + 2.0) * torch.exp2(exponent.float() - 2.0)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return magnitude * (1.0 - 2.0 * (codes >> 3).float())


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Dequantise packed e2m1 (low nibble first) with one E8M0 scale per 32."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    values = e2m1(codes.view(*scale.shape, MX_GROUP))
    return (values * torch.exp2(scale.float() - 127.0).unsqueeze(-1)).flatten(-2)


def mxfp8(x: Tensor) -> Tensor:
    """Round to MXFP8 and read back: e4m3 values, E8M0 scale per 32 by the round-up rule."""
    groups: Tensor = x.float().unflatten(-1, (-1, MX_GROUP))  # type: ignore[no-untyped-call]
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 135
    scale = torch.exp2(exponent.clamp(min=-126).float())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def mx_gathered(
    hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, *, beta: float, linear_beta: float,
) -> Tensor:  # fmt: skip
    """MXFP4 weights of the chosen experts, MXFP8 rows, SiTU, FP32 weighted sum."""
    tokens, slots = ids.shape
    width = w13.shape[1] // 2
    first = mxfp4(w13[ids], w13_scale[ids])
    second = mxfp4(w2[ids], w2_scale[ids])
    both = torch.bmm(first.flatten(1, 2), mxfp8(hidden).unsqueeze(-1)).view(tokens, slots, -1)
    inner = mxfp8(
        situ_wide_kept(both[..., :width], both[..., width:], beta=beta, linear_beta=linear_beta)
    )
    rows = torch.bmm(second.flatten(0, 1), inner.view(-1, width, 1)).view(tokens, slots, -1)
    rows = rows.to(hidden.dtype)
    return (rows.float() * weights.float().unsqueeze(-1)).sum(1).to(hidden.dtype)


def mx_einsum(
    hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, *, beta: float, linear_beta: float,
) -> Tensor:  # fmt: skip
    """The same with einsum."""
    width = w13.shape[1] // 2
    first, second = mxfp4(w13[ids], w13_scale[ids]), mxfp4(w2[ids], w2_scale[ids])
    both = torch.einsum("tkil,tl->tki", first, mxfp8(hidden))
    inner = mxfp8(
        situ_wide_kept(both[..., :width], both[..., width:], beta=beta, linear_beta=linear_beta)
    )
    rows = torch.einsum("tkli,tki->tkl", second, inner).to(hidden.dtype)
    return (rows.float() * weights.float().unsqueeze(-1)).sum(1).to(hidden.dtype)


def silu_batched(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One batched product a slot, SiLU pairs, weights in their own dtype."""
    tokens, slots = ids.shape
    flat = ids.reshape(-1)
    rows = hidden.unsqueeze(1).expand(tokens, slots, hidden.shape[-1]).reshape(tokens * slots, -1)
    gate, up = torch.bmm(w13[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    weighted = out * weights.reshape(-1).unsqueeze(-1)
    return weighted.view(tokens, slots, -1).sum(dim=1).to(hidden.dtype)


def silu_grouped(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Slots sorted by expert, two grouped products, order restored."""
    tokens, slots = ids.shape
    experts = w13.shape[0]
    chosen, order = torch.sort(ids.reshape(-1))
    rows, scale = hidden[order // slots], weights.reshape(-1)[order]
    counts = torch.histc(chosen.float(), bins=experts, min=0, max=experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate, up = torch._grouped_mm(rows, w13.transpose(-2, -1), offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends)
    weighted = out * scale.unsqueeze(-1)
    back = torch.empty_like(order).index_put((order,), torch.arange(tokens * slots))
    return weighted[back].view(tokens, slots, -1).sum(dim=1).to(hidden.dtype)


def silu_einsum(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Gathered weights and einsum."""
    gate, up = torch.einsum("tkil,tl->tki", w13[ids], hidden).chunk(2, -1)
    rows = torch.einsum("tkli,tki->tkl", w2[ids], F.silu(gate) * up)
    return (rows * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


_BETAS = (Captured("beta", 4.0009765625), Captured("linear_beta", 25.0009765625))
_PLAIN = ("hidden", "weights", "ids", "w13", "w2")
_MX = ("hidden", "weights", "ids", "w13", "w13_scale", "w2", "w2_scale")


def _forms(*functions: Callable[..., Tensor], mx: bool) -> tuple[Template, ...]:
    arguments, captures = (_MX, _BETAS) if mx else (_PLAIN, ())
    return tuple(Template(f.__name__, f, arguments, captures) for f in functions)


MX_FORMS = _forms(mx_gathered, mx_einsum, mx=True)
PLAIN_FORMS = _forms(silu_batched, silu_grouped, silu_einsum, mx=False)

# --- concept --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoutedExperts:
    """Rank partial of the routed experts, before any reduction.

    hidden [M, L]; weights, ids [M, k]; w13 [E, 2I, L] or packed; w2 [E, L, I] or packed.
    """

    anchors: ClassVar[tuple[str, ...]] = ("aten.sum",)

    hidden: fx.Node
    weights: fx.Node
    ids: fx.Node
    w13: fx.Node
    w13_scale: fx.Node | None
    w2: fx.Node
    w2_scale: fx.Node | None
    activation: str
    beta: float
    linear_beta: float
    form: str
    out: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> RoutedExperts | None:
        """Read the experts off the sum over their slots."""
        if op_of(node) != "aten.sum" or view.canon(node).attr("dim") != (-2,):
            return None
        # Narrow weights make a narrow sum: nothing is left to round, and a cast of it is the next
        # norm's.
        casts = [u for u in view.users(node) if view.canon(u).op == "cast"]
        out = casts[0] if casts and dtype_of(node) == torch.float32 else node
        tensors = _expert_tensors(view, node)
        if tensors is None:
            return None
        product = view.strip(view.canon(node).inputs[0])
        slots = _slots(view, node)
        if slots is None or not isinstance(product, fx.Node):
            return None
        tokens, width = shape_of(out)[0], shape_of(out)[-1]
        symbol = tokens_of((tokens,))
        dtype = dtype_of(out)
        if dtype is None:
            return None
        worst: Mismatch | None = None
        operands: dict[str, Any] = {
            "hidden": Like((tokens, width), dtype),
            "weights": Like((tokens, slots), _weights_dtype(view, product, slots)),
            "ids": Like((tokens, slots), torch.int64),
            **tensors,
        }
        for form in MX_FORMS if "w13_scale" in tensors else PLAIN_FORMS:
            found = match_template(view, form, out, operands, tokens=symbol)
            if isinstance(found, Mismatch):
                if worst is None or found.depth > worst.depth:
                    worst = found
                continue
            b, n = found.bindings, found.numbers
            return cls(
                b["hidden"], b["weights"], b["ids"], b["w13"], b.get("w13_scale"), b["w2"],
                b.get("w2_scale"), "situ" if n else "silu", n.get("beta", 0.0),
                n.get("linear_beta", 0.0), form.name, out, found.nodes(view),
            )  # fmt: skip
        _report(worst)
        return None


def _report(worst: Mismatch | None) -> None:
    # Sums over an axis of expert-indexed weights are experts; say what differed.
    if worst is not None:
        raise Refusal(worst.reason, progress=worst.depth)


def _weights_dtype(view: GraphView, product: fx.Node, slots: int) -> torch.dtype:
    """Dtype of the routing weights in memory: the operand of the product that is one per slot."""
    current: Any = product
    while isinstance(current, fx.Node) and view.canon(current).op not in ("aten.mul", "aten.index"):
        current = view.strip(view.canon(current).inputs[0]) if view.canon(current).inputs else None
    if isinstance(current, fx.Node) and view.canon(current).op == "aten.index":
        current = view.strip(current.args[0])
    for operand in view.canon(current).inputs if isinstance(current, fx.Node) else ():
        node = view.strip(operand)
        if (
            isinstance(operand, fx.Node)
            and shape_of(operand)[-1] == 1
            and isinstance(node, fx.Node)
        ):
            while view.canon(node).op == "cast":
                node = view.strip(view.canon(node).inputs[0])
            return dtype_of(node) or torch.float32
    return torch.float32


def _slots(view: GraphView, total: fx.Node) -> int | None:
    shape = shape_of(total.args[0])  # type: ignore[arg-type]
    return shape[1] if len(shape) == 3 and isinstance(shape[1], int) else None


def _expert_tensors(view: GraphView, total: fx.Node) -> dict[str, fx.Node] | None:
    """Expert weights above a sum, told apart by shape: L is the summed row's width."""
    row = shape_of(total)
    width = row[-1]
    found: list[fx.Node] = []
    stack, seen = [total], set[fx.Node]()
    while stack and len(seen) < 400:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        name = op_of(node)
        if name in ("aten.mm", "aten.addmm", "aten.topk"):
            continue  # above the experts: the router
        if shape_of(node) == row and node is not total:
            continue  # the row they read; above it is the layer before
        if name in ("aten.index", "aten._grouped_mm"):
            base = node.args[0] if name == "aten.index" else node.args[1]
            weight = _stored(view, base)
            if weight is not None and len(shape_of(weight)) == 3 and weight not in found:
                found.append(weight)
        stack.extend(node.all_input_nodes)
    return _roles(found, width)


def _stored(view: GraphView, base: Any) -> fx.Node | None:
    node = view.strip(base)
    while isinstance(node, fx.Node) and view.canon(node).op == "permute":
        node = view.strip(view.canon(node).inputs[0])
    return node if isinstance(node, fx.Node) and view.is_weight(node) else None


def _roles(found: list[fx.Node], width: Any) -> dict[str, fx.Node] | None:
    packed = [w for w in found if dtype_of(w) == torch.uint8]
    if packed:
        if len(packed) != 4:
            return None
        for order in permutations(packed):
            w13, w13_scale, w2, w2_scale = (shape_of(w)[1:] for w in order)
            single = w13[0] // 2
            fits = w13 == (2 * single, width // 2) and w13_scale == (2 * single, width // MX_GROUP)
            if fits and w2 == (width, single // 2) and w2_scale == (width, single // MX_GROUP):
                return dict(zip(("w13", "w13_scale", "w2", "w2_scale"), order, strict=True))
        return None
    if len(found) != 2:
        return None
    for first, second in (found, found[::-1]):
        (_, both, inner), (_, outer, single) = shape_of(first), shape_of(second)
        if inner == width and outer == width and both == 2 * single:
            return {"w13": first, "w2": second}
    return None

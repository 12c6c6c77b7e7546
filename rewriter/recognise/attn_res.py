"""AttnRes: the softmax mix of earlier block rows and the running prefix, then RMSNorm.

score_j = sum_d v_j[d] w_norm[d] w_proj[d] * rsqrt(mean(v_j^2) + eps), softmax over the sources,
FP32 mix of the un-normalised sources, RMSNorm with the next layer's weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.recognise.functionalized import FunctionalizedCall
from k3fuse.rewriter.recognise.rms_norm import RmsNorm
from k3fuse.rewriter.template import Captured, Mismatch, Template, match_template, tokens_of
from k3fuse.rewriter.view import GraphView, dtype_of, op_of, shape_of


def _scores_dot(
    wide: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, eps: float
) -> torch.Tensor:
    scale = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    return (wide * (norm.float() * proj.float())).sum(-1) * scale


def mix_dot(
    sources: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Scores by product and sum, mix by product and sum."""
    wide = sources.float()
    weights = torch.softmax(_scores_dot(wide, norm, proj, eps), -1)
    return (weights.unsqueeze(-1) * wide).sum(1)


def mix_normalised_first(
    sources: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Scores from the normalised rows."""
    wide = sources.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    score = ((wide * scale) * (norm.float() * proj.float())).sum(-1)
    return (torch.softmax(score, -1).unsqueeze(-1) * wide).sum(1)


def mix_norm_weight_first(
    sources: torch.Tensor, norm: torch.Tensor, proj: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Scores as RMSNorm(v) . proj, all in FP32."""
    wide = sources.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    score = (wide * scale * norm.float() * proj.float()).sum(-1)
    return (torch.softmax(score, -1).unsqueeze(-1) * wide).sum(1)


_EPS = (Captured("eps", 1.0000001e-05),)
_ARGS = ("sources", "norm", "proj")
FORMS = (
    Template("AttnRes mix", mix_dot, _ARGS, _EPS),
    Template("AttnRes mix, normalised first", mix_normalised_first, _ARGS, _EPS),
    Template("AttnRes mix, norm weight first", mix_norm_weight_first, _ARGS, _EPS),
)


@dataclass(frozen=True)
class AttnRes:
    """One mix. Rows are [M, H]; blocks are `num_blocks` rows, or one bank [M, S, H].

    prefix: the running sum before `delta` is added (the row itself where delta is None).
    new_prefix: the node that holds prefix + delta; None where nothing reads it or delta is None.
    blocks_out, block_write: the custom op's bank after its write, and the slot written (-1: none).
    """

    anchors: ClassVar[tuple[str, ...]] = (
        "aten.sum",
        "auto_functionalized",
        "auto_functionalized_v2",
    )

    prefix: fx.Node
    delta: fx.Node | None
    blocks: tuple[fx.Node, ...]
    num_blocks: int
    score_norm_weight: fx.Node
    score_proj_weight: fx.Node
    out_norm_weight: fx.Node | None
    eps: float
    out_eps: float
    round_mix: bool
    out: fx.Node
    new_prefix: fx.Node | None
    blocks_out: fx.Node | None
    block_write: int
    custom: bool
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> AttnRes | None:
        """Read AttnRes off the custom op, or off the sum that mixes the sources."""
        if op_of(node) in ("auto_functionalized", "auto_functionalized_v2"):
            call = view.find(FunctionalizedCall, node)
            if call is None or not call.name.endswith("kimi_k3_attn_res"):
                return None
            return _custom(call)
        if op_of(node) == "aten.sum":
            return _plain(view, node)
        return None


def _custom(call: FunctionalizedCall) -> AttnRes | None:
    args, results = call.args, call.results
    out = results["output"]
    if out is None:
        return None
    write = int(args["block_write_idx"])
    return AttnRes(
        prefix=args["prefix"],
        delta=args["delta"],
        blocks=(args["blocks"],),
        num_blocks=int(args["num_blocks"]),
        score_norm_weight=args["norm_weight"],
        score_proj_weight=args["qk_weight"],
        out_norm_weight=args["output_norm_weight"],
        eps=float(args["eps"]),
        out_eps=float(args["output_norm_eps"]),
        round_mix=False,
        out=out,
        new_prefix=results["prefix"],
        blocks_out=results["blocks"],
        block_write=write,
        custom=True,
        nodes=call.nodes,
    )


def _plain(view: GraphView, total: fx.Node) -> AttnRes | None:
    spelled = view.canon(total)
    if (
        spelled.attr("dim") != (-2,)
        or spelled.attr("keepdim", False)
        or dtype_of(total) != torch.float32
    ):
        return None
    product = view.strip(spelled.inputs[0])
    if not isinstance(product, fx.Node) or view.canon(product).op != "aten.mul":
        return None
    wide = next(
        (w for w in map(view.strip, view.canon(product).inputs) if _is_sources(view, w)), None
    )
    if wide is None:
        return None
    sources = view.canon(wide).inputs[0]
    match, worst = None, None
    row = _row_weight_like(view, total, wide)
    if row is None:
        return None
    for form in FORMS:
        found = match_template(
            view, form, total, {"sources": sources, "norm": row, "proj": row},
            tokens=tokens_of(shape_of(total)),
        )  # fmt: skip
        if not isinstance(found, Mismatch):
            match = found
            break
        if worst is None or found.depth > worst.depth:
            worst = found
    if match is None:
        # Softmax over sources of rows is AttnRes's mark: anything less is another sum.
        wrong_axis = worst is not None and worst.reason.code is Code.ATTR_MISMATCH
        if worst is not None and worst.depth >= (2 if wrong_axis else 4):
            raise Refusal(worst.reason, progress=worst.depth)
        return None
    return _assemble(view, total, match.bindings, match.numbers["eps"], match.nodes(view))


def _is_sources(view: GraphView, node: Any) -> bool:
    if not isinstance(node, fx.Node) or len(shape_of(node)) != 3:
        return False
    spelled = view.canon(node)
    return spelled.op == "cast" and dtype_of(node) == torch.float32


def _row_weight_like(view: GraphView, total: fx.Node, wide: fx.Node) -> fx.Node | None:
    """Any [H] weight multiplied into the sources: only its shape and dtype are used to trace."""
    width = shape_of(total)[-1]
    frontier, seen = view.users(wide), 0
    while frontier and seen < 24:
        user, seen = frontier.pop(0), seen + 1
        for operand in view.canon(user).inputs:
            current, depth = view.strip(operand), 0
            while isinstance(current, fx.Node) and view.is_weight(current) is False and depth < 3:
                inner = view.canon(current)
                if inner.op not in ("aten.mul", "cast") or shape_of(current) != (width,):
                    break
                current, depth = view.strip(inner.inputs[0]), depth + 1
            if isinstance(current, fx.Node) and view.is_weight(current):
                while view.canon(current).op in ("cast", "reshape"):
                    current = view.canon(current).inputs[0]
                shape = shape_of(current)
                if shape and shape[-1] == width and all(s == 1 for s in shape[:-1]):
                    return view.with_shape(current, (width,)) or current
        if view.canon(user).op == "aten.mul":
            frontier += view.users(user)
    return None


def _assemble(
    view: GraphView,
    total: fx.Node,
    bound: dict[str, fx.Node],
    eps: float,
    nodes: tuple[fx.Node, ...],
) -> AttnRes:
    rows, bank, made = _sources(view, bound["sources"])
    prefix = rows[-1]
    delta, new_prefix = None, None
    add = view.strip(prefix)
    adds: tuple[fx.Node, ...] = ()
    if (
        isinstance(add, fx.Node)
        and view.canon(add).op == "aten.add"
        and dtype_of(add) == dtype_of(prefix)
    ):
        a, b = view.canon(add).inputs
        if (
            isinstance(a, fx.Node)
            and isinstance(b, fx.Node)
            and shape_of(a) == shape_of(b) == shape_of(add)
        ):
            prefix, delta, new_prefix, adds = a, b, add, (add,)
    out, norm, rounded = _output(view, total)
    cover = {*nodes, *made, *adds, *(norm.nodes if norm is not None else ()), *rounded}
    blocks = (bank,) if bank is not None else tuple(rows[:-1])
    count = shape_of(bound["sources"])[1]
    return AttnRes(
        prefix=prefix,
        delta=delta,
        blocks=blocks,
        num_blocks=int(count) - 1,
        score_norm_weight=bound["norm"],
        score_proj_weight=bound["proj"],
        out_norm_weight=norm.weight if norm is not None else None,
        eps=eps,
        out_eps=norm.eps if norm is not None else 0.0,
        round_mix=norm is not None and bool(rounded),
        out=out,
        new_prefix=new_prefix,
        blocks_out=None,
        block_write=-1,
        custom=False,
        nodes=tuple(sorted(cover, key=view.index.__getitem__)),
    )


def _output(view: GraphView, total: fx.Node) -> tuple[fx.Node, RmsNorm | None, tuple[fx.Node, ...]]:
    """The normalised row, or the mix rounded to the model's dtype where no norm follows."""
    for value, rounded in (
        (total, ()),
        *((u, (u,)) for u in view.users(total) if view.canon(u).op == "cast"),
    ):
        for node in _reach(view, value):
            norm = view.find(RmsNorm, node)
            if norm is not None and view.same(norm.x, value) and _fits(norm, value):
                return norm.out, norm, rounded
    cast = next((u for u in view.users(total) if view.canon(u).op == "cast"), None)
    if cast is None:
        raise Refusal(
            Reason(
                Code.OP_MISMATCH,
                f"{total.name}: the mix is neither normalised nor rounded",
                (total.name,),
                expected="RMSNorm or a cast",
                actual=", ".join(u.name for u in view.users(total)),
            )
        )
    return cast, None, (cast,)


def _fits(norm: RmsNorm, value: fx.Node) -> bool:
    """Whether the op can say this norm: of whole rows, with a weight, rounded once behind it."""
    whole = shape_of(norm.out)[-1:] == shape_of(value)[-1:]
    return whole and norm.weight is not None and not norm.round_before_weight


def _reach(view: GraphView, value: fx.Node) -> list[fx.Node]:
    """Norm anchors (rsqrt, whole-norm ops) that can be fed by a value: at most five steps away."""
    found, frontier = [], [value]
    for _ in range(5):
        step = []
        for node in frontier:
            for user in view.users(node):
                if op_of(user) in RmsNorm.anchors:
                    found.append(user)
                elif view.canon(user).op in ("cast", "aten.square", "aten.mean", "aten.add"):
                    step.append(user)
        frontier = step
    return found


def _sources(
    view: GraphView, sources: fx.Node
) -> tuple[list[fx.Node], fx.Node | None, tuple[fx.Node, ...]]:
    """Rows of the stacked sources, the bank where the blocks are one tensor, the nodes passed."""
    root = view.strip(sources)
    passed = view.path(sources, root)
    spelled = view.canon(root)
    tokens, _, width = shape_of(sources)
    if spelled.op in ("aten.stack", "aten.cat"):
        # Inductor spells a stack of rows as cat([rows], -1) and a view of [M, S H].
        how = "rows" if len(shape_of(root)) == 2 else spelled.op
        side_by_side = spelled.attr("dim") == ((-1,) if how == "rows" else (-2,))
        whole = shape_of(root)[0] == tokens and (how == "rows" or shape_of(root)[-1] == width)
        if not (side_by_side and whole):
            raise _bad_sources(root, "the sources do not lie side by side in each row")
        rows: list[fx.Node] = []
        bank: fx.Node | None = None
        made = [root]
        for i, item in enumerate(spelled.inputs[0]):
            row = view.with_shape(item, (tokens, width)) if _may_be_row(view, how, item) else None
            if row is not None:
                made += view.path(item, row) if row is not item else []
                rows.append(row)
            elif i == 0 and how == "aten.cat" and len(spelled.inputs[0]) == 2:
                bank, made = _bank(view, item, made)
            else:
                raise _bad_sources(
                    item, "a source is no [M, H] row, and only the first may be a bank"
                )
        return rows, bank, (*passed, *made)
    row = view.with_shape(sources, (tokens, width))
    if row is None:
        raise _bad_sources(sources, "the only source is no [M, H] row")
    return [row], None, tuple(n for n in passed if n is not row)


def _may_be_row(view: GraphView, how: str, item: fx.Node) -> bool:
    """One row, not one slot of a bank (the op reads a bank's first slots in place)."""
    return how != "aten.cat" or (
        shape_of(item)[1] == 1 and view.canon(view.strip(item)).op != "slice"
    )


def _bank(view: GraphView, item: fx.Node, made: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    root = view.strip(item)
    spelled = view.canon(root)
    if spelled.op != "slice":
        return item, made
    if spelled.attr("dim") != -2 or spelled.attr("start") != 0:
        raise _bad_sources(root, "the bank is not read from its first slot")
    return spelled.inputs[0], [*made, *view.path(item, root), root]


def _bad_sources(node: fx.Node, what: str) -> Refusal:
    return Refusal(Reason(Code.OP_MISMATCH, f"{node.name}: {what}", (node.name,)))

"""Routing: expert scores, correction bias, top-k, gathered and renormalised weights."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.rms_norm import widens
from k3fuse.rewriter.recognise.softmax import Softmax
from k3fuse.rewriter.template import Mismatch, Template, match_template, tokens_of
from k3fuse.rewriter.view import GraphView, bound_args, dtype_of, op_of, shape_of


def one_group_key(scores: torch.Tensor) -> torch.Tensor:
    """Group-limited selection with a single group: the mask keeps every expert."""
    experts = scores.shape[1]
    grouped = scores.view(-1, 1, experts)
    best = grouped.topk(2, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, chosen, 1)
    kept = mask.unsqueeze(-1).expand(-1, 1, experts).reshape(-1, experts)
    return scores.masked_fill(~kept.bool(), float("-inf"))


def one_group_key_functional(scores: torch.Tensor) -> torch.Tensor:
    """The same after functionalisation of the scatter."""
    experts = scores.shape[-1]
    best = scores.view(-1, 1, experts).topk(2, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter(1, chosen, 1)
    kept = mask.unsqueeze(-1).expand(-1, 1, experts).reshape(-1, experts)
    return scores.masked_fill(~kept.bool(), float("-inf"))


ONE_GROUP = (
    Template("one-group mask", one_group_key_functional, ("scores",)),
    Template("one-group mask, in place", one_group_key, ("scores",)),
)


@dataclass(frozen=True)
class Routing:
    """top-k of score(logits) + bias; weights from the unbiased score.

    logits: FP32 [M, E]; ids: int64 [M, k]; weights: [M, k]; scoring: "sigmoid" or "softmax".
    """

    anchors: ClassVar[tuple[str, ...]] = ("aten.topk", "aten.sort")

    linear: Linear
    logits: fx.Node
    bias: fx.Node | None
    top_k: int
    scoring: str
    renormalize: bool
    renorm_eps: float
    scale: float
    ids: fx.Node
    weights: fx.Node
    nodes: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: GraphView, node: fx.Node) -> Routing | None:
        """Read routing off its top-k (or full stable sort and slice)."""
        if op_of(node) not in cls.anchors:
            return None
        picked = _selection(view, node)
        if picked is None:
            return None
        key, top_k, values, ids, cover = picked
        key_node, masked = _unmask(view, key)
        score, bias, biased = _score_and_bias(view, key_node)
        if score is None:
            return None
        scored = _scored(view, score)
        if scored is None:
            return None
        scoring, read, score_nodes = scored
        narrow = next((n for n in (score, key_node) if dtype_of(n) != torch.float32), None)
        if narrow is not None:
            what = "the scores are not selected in FP32"
            raise _refuse(narrow, Code.DTYPE_MISMATCH, what, torch.float32, dtype_of(narrow))
        logits = view.strip(read)
        linear = view.producer(logits, Linear)
        wide_cast: tuple[fx.Node, ...] = ()
        if linear is None and view.canon(logits).op == "cast":
            wide_cast = (logits,)
            linear = view.producer(view.canon(logits).inputs[0], Linear)
        if linear is None:
            return None
        for grouped in (read, score, bound_args(node)["self"]):
            if shape_of(grouped) != shape_of(linear.out):
                what = "the logits are read in another grouping"
                raise _refuse(
                    grouped, Code.SHAPE_MISMATCH, what, shape_of(linear.out), shape_of(grouped)
                )
        if bias is not None:
            bias = _one_an_expert(view, bias, linear)
        _check_flags(view, node)
        raw, gathered = _raw_weights(view, score, ids, values, biased=bias is not None)
        tail = _tail(view, raw)
        nodes = {
            *linear.nodes, *view.path(read, logits), *wide_cast, *score_nodes, *biased, *masked,
            *cover, *gathered, *tail["nodes"],
        }  # fmt: skip
        return cls(
            linear, read, bias, top_k, scoring, tail["renormalize"], tail["eps"],
            tail["scale"], ids, tail["out"], tuple(sorted(nodes, key=view.index.__getitem__)),
        )  # fmt: skip


def _refuse(node: fx.Node, code: Code, what: str, expected: object, actual: object) -> Refusal:
    return Refusal(Reason(code, f"{node.name}: {what}", (node.name,), str(expected), str(actual)))


def _scored(view: GraphView, score: fx.Node) -> tuple[str, fx.Node, tuple[fx.Node, ...]] | None:
    """(scoring, what it reads, nodes) of a score; None for something else.

    Scores that were rounded on the way are seen through: what is refused then has a reason.
    """
    made: Any = score
    while isinstance(made, fx.Node) and view.canon(made).op == "cast":
        made = view.strip(view.canon(made).inputs[0])
    if not isinstance(made, fx.Node):
        return None
    found: tuple[str, fx.Node, tuple[fx.Node, ...]]
    if view.canon(made).op == "aten.sigmoid":
        found = "sigmoid", view.canon(made).inputs[0], (made,)
    else:
        softmax = view.find(Softmax, made)
        if softmax is None:
            if (refusal := view.miss(Softmax, made)) is not None:
                raise refusal
            return None
        found = "softmax", softmax.x, softmax.nodes
    if made is not score:
        what = "the scores are rounded before the selection"
        raise _refuse(score, Code.DTYPE_MISMATCH, what, torch.float32, dtype_of(score))
    return found


def _check_flags(view: GraphView, node: fx.Node) -> None:
    args = bound_args(node)
    dim, rank = args.get("dim", -1), len(shape_of(node.args[0])) or 2  # type: ignore[arg-type]
    if dim not in (-1, rank - 1):
        raise _refuse(
            node, Code.ATTR_MISMATCH, "selects along another axis than the experts", -1, dim
        )
    descending = args.get("largest", args.get("descending"))
    if not descending:
        raise _refuse(
            node, Code.ATTR_MISMATCH, "selects the smallest scores", "largest", "smallest"
        )
    if op_of(node) == "aten.sort" and not args.get("stable"):
        raise _refuse(
            node, Code.ATTR_MISMATCH, "the sort is not stable, ties are open", "stable", "unstable"
        )


def _parts(node: fx.Node) -> dict[int, fx.Node]:
    return {
        int(u.args[1]): u  # type: ignore[arg-type]
        for u in node.users
        if u.op == "call_function" and u.target is operator.getitem
    }


def _selection(
    view: GraphView, node: fx.Node
) -> tuple[Any, int, fx.Node | None, fx.Node, tuple[fx.Node, ...]] | None:
    """(key, k, values, ids, nodes) of a top-k, or of a stable descending sort cut to k."""
    args, parts = bound_args(node), _parts(node)
    if 1 not in parts:
        return None
    if op_of(node) == "aten.topk":
        k = args["k"]
        cover = (node, *parts.values())
        return (args["self"], int(k), parts.get(0), parts[1], cover) if isinstance(k, int) else None
    cut = next((u for u in view.users(parts[1]) if view.canon(u).op == "slice"), None)
    if cut is None or view.canon(cut).attr("start") != 0 or view.canon(cut).attr("dim") != -1:
        return None
    return args["self"], int(view.canon(cut).attr("stop")), None, cut, (node, *parts.values(), cut)


def _unmask(view: GraphView, key: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Look through a group mask that masks nothing; a real group limit is refused."""
    node = view.strip(key)
    masks = {"aten.masked_fill": 0, "aten.where": 2}  # Inductor spells the first by the second
    if not isinstance(node, fx.Node) or view.canon(node).op not in masks:
        return key, tuple(view.path(key, node)) if isinstance(node, fx.Node) else ()
    inner = view.canon(node).inputs[masks[view.canon(node).op]]
    worst: Mismatch | None = None
    for form in ONE_GROUP:
        found = match_template(
            view, form, node, {"scores": inner}, tokens=tokens_of(shape_of(node)),
            prebound={"scores": inner},
        )  # fmt: skip
        if not isinstance(found, Mismatch):
            return inner, (*view.path(key, node), *found.nodes(view))
        if worst is None or found.depth > worst.depth:
            worst = found
    what = f": {worst.reason.sentence}" if worst is not None else ""
    raise _refuse(
        node,
        Code.ATTR_MISMATCH,
        "the selection is masked by expert groups" + what,
        "one group",
        "mask",
    )


def _score_and_bias(
    view: GraphView, key: Any
) -> tuple[fx.Node | None, fx.Node | None, tuple[fx.Node, ...]]:
    node = view.strip(key)
    if not isinstance(node, fx.Node):
        return None, None, ()
    if view.canon(node).op != "aten.add":
        return node, None, ()
    a, b = view.canon(node).inputs
    for score, bias in ((a, b), (b, a)):
        if isinstance(bias, fx.Node) and view.is_weight(bias) and isinstance(score, fx.Node):
            passed = (*view.path(key, node), node)
            stripped = view.strip(bias)
            if widens(view, stripped):
                source = view.canon(stripped).inputs[0]
                return view.strip(score), source, (*passed, *view.path(bias, stripped), stripped)
            return view.strip(score), bias, passed
    return None, None, ()


def _one_an_expert(view: GraphView, bias: fx.Node, linear: Linear) -> fx.Node:
    """The bias as a vector of one number an expert; a bias of each token is refused."""
    wanted = shape_of(linear.out)[-1:]
    vector = bias if shape_of(bias) == wanted else view.with_shape(bias, wanted)
    if vector is None:
        what = "the correction bias is no vector of one number an expert"
        raise _refuse(bias, Code.SHAPE_MISMATCH, what, wanted, shape_of(bias))
    return vector


def _raw_weights(
    view: GraphView, score: fx.Node, ids: fx.Node, values: fx.Node | None, *, biased: bool
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The chosen scores: gathered from the unbiased ones, or top-k's own values without a bias."""
    for user in view.users(score):
        if op_of(user) == "aten.gather" and view.same(bound_args(user)["index"], ids):
            if shape_of(bound_args(user)["self"]) != shape_of(score):
                continue  # another grouping of the scores: the ids mean other elements there
            if shape_of(user) != shape_of(ids):
                continue
            dim = bound_args(user)["dim"]
            if dim not in (-1, len(shape_of(user)) - 1):
                raise _refuse(user, Code.ATTR_MISMATCH, "gathers along another axis", -1, dim)
            return user, (user,)
    if values is not None and not biased:
        return values, (values,)
    if values is not None and values.users:
        raise _refuse(
            values,
            Code.OPERAND_ORDER,
            "the weights are the biased scores",
            "gather(score, ids)",
            values.name,
        )
    raise _refuse(
        ids, Code.ANCHOR_ABSENT, "no weight is gathered with these ids", "gather", "nothing"
    )


def _tail(view: GraphView, raw: fx.Node) -> dict[str, Any]:
    """Renormalise, scale and round the chosen scores, each step optional, in this order."""
    out: dict[str, Any] = {"renormalize": False, "eps": 0.0, "scale": 1.0, "nodes": [], "out": raw}
    total = next(
        (
            u
            for u in view.users(raw)
            if op_of(u) == "aten.sum"
            and view.canon(u).attr("dim") == (-1,)
            and shape_of(view.canon(u).inputs[0]) == shape_of(raw)
            and dtype_of(u) == dtype_of(raw)
        ),
        None,
    )
    if total is not None and view.canon(total).attr("keepdim"):
        divisor, nodes = total, [total]
        shifted = next((u for u in view.users(total) if view.canon(u).op == "aten.add"), None)
        if shifted is not None:
            numbers = [i for i in view.canon(shifted).inputs if isinstance(i, (int, float))]
            if len(numbers) == 1:
                out["eps"], divisor = float(numbers[0]), shifted
                nodes.append(shifted)
        divided = next(
            (
                u for u in view.users(raw)
                if view.canon(u).op == "aten.div"
                and view.same(view.canon(u).inputs[0], raw)
                and view.same(view.canon(u).inputs[1], divisor)
                and shape_of(u) == shape_of(view.canon(u).inputs[0]) == shape_of(raw)
                and shape_of(view.canon(u).inputs[1]) == shape_of(total)
            ),
            None,
        )  # fmt: skip
        if divided is not None:
            out.update(renormalize=True, out=divided, nodes=[*nodes, divided])
    _scale_and_round(view, out)
    return out


def _scale_and_round(view: GraphView, out: dict[str, Any]) -> None:
    scaled = next((u for u in view.users(out["out"]) if _number_product(view, u) is not None), None)
    if scaled is not None and len(view.users(out["out"])) == 1:
        out.update(scale=_number_product(view, scaled), out=scaled, nodes=[*out["nodes"], scaled])
    users = view.users(out["out"])
    if (
        len(users) == 1
        and view.canon(users[0]).op == "cast"
        and dtype_of(users[0]) == torch.bfloat16
    ):
        out.update(out=users[0], nodes=[*out["nodes"], users[0]])


def _number_product(view: GraphView, node: fx.Node) -> float | None:
    spelled = view.canon(node)
    if spelled.op != "aten.mul":
        return None
    numbers = [i for i in spelled.inputs if isinstance(i, (int, float)) and not isinstance(i, bool)]
    return float(numbers[0]) if len(numbers) == 1 else None

"""All linears that read one normalised row on its way into attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import sympy
from sympy import And, Eq, Or
from torch import fx

from k3fuse.kernels.attention_projection.op import attention_projection
from k3fuse.kernels.attention_projection.policy import SHARDED, TABLE
from k3fuse.patterns import symbols as s
from k3fuse.patterns.compose import replacement
from k3fuse.patterns.latent_rows import split_rows
from k3fuse.patterns.moe import equal_on_all_ranks, tp_group
from k3fuse.patterns.output_projection import Projected, projected
from k3fuse.patterns.policy import others_share, pick, read
from k3fuse.rewriter.guards import Guard
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.recognise.all_reduce import AllReduce
from k3fuse.rewriter.recognise.attn_res import AttnRes
from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.recognise.rms_norm import AddRmsNorm, RmsNorm
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Read, Replacement, Site, in_order
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, op_of, shape_of

_KIND = sympy.Symbol("kind")
_KDA, _MLA = s.name("kda"), s.name("mla")
_SPLIT = sympy.Symbol("split_rows", integer=True, nonnegative=True)
_EQUAL, _GROUP = sympy.symbols("row_all_reduced group_named")


# Rows that the ranks split: q, k, v, g of 12288 and beta of 96; f_a's 128 are on every rank.
_KDA_SPLIT, _F_A = 4 * s.ATTENTION_WIDTH + 96, 128
_KDA_ROWS = sympy.Integer(_KDA_SPLIT) / s.TP + _F_A
# q_a 1536 and kv_a 512 + 64 are on every rank, the gate's 12288 are split.
_MLA_WHOLE = 1536 + 512 + 64


class AttentionProjection(Pattern):
    """One site a layer: KDA's q, k, v, g, f_a, beta or MLA's q_a, kv_a, gate; merged or apart."""

    name: ClassVar[str] = "attention_projection"
    summary: ClassVar[str] = "all linears of the row that enters attention, one launch"
    priority: ClassVar[int] = 50
    guards: ClassVar[tuple[Guard, ...]] = (
        s.TOKENS,
        Guard(Eq(s.K, s.HIDDEN), Code.SHAPE_MISMATCH, "Kimi K3's hidden size", scope="kernel"),
        s.TP_SIZE,
        Guard(
            Or(
                And(Eq(_KIND, _KDA), Eq(s.N, _KDA_ROWS)),
                And(Eq(_KIND, _KDA), Eq(s.N, 16 * sympy.ceiling(_KDA_ROWS / 16))),
                And(Eq(_KIND, _MLA), Eq(s.N, sympy.Integer(s.ATTENTION_WIDTH) / s.TP + _MLA_WHOLE)),
            ),
            Code.SHAPE_MISMATCH,
            "rows of all weights together, as published; the merged KDA weight pads to 16",
            scope="kernel",
        ),
        s.SAME_DTYPE,
        s.ROWS_BF16,
        s.NO_BIAS,
        s.IN_PLACE,
        Guard(
            Or(Eq(_KIND, _KDA), Eq(_SPLIT, _MLA_WHOLE)),
            Code.SHAPE_MISMATCH,
            "the rows that all ranks have, q_a and kv_a, lead their weights: all but the gate",
            scope="row_sharded",
            hint="leave row_sharded off for this model",
        ),
        Guard(
            Or(Eq(_KIND, _KDA), Eq(_GROUP, s.YES)),
            Code.GROUP_MISMATCH,
            "the ranks exchange rows over the group of the layer's all-reduce",
            scope="row_sharded",
            hint="leave row_sharded off, or keep the all-reduce in the graph",
        ),
        Guard(
            Or(Eq(_KIND, _KDA), Eq(_EQUAL, s.YES)),
            Code.GROUP_MISMATCH,
            "every rank multiplies a share of the rows, so all need the same x",
            scope="row_sharded",
            hint="the row has to come from an all-reduce over the group in the same graph",
        ),
    )

    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """From each output projection back to the residual row it came from; then cut graphs."""
        rows = residual_rows(view)
        taken: set[fx.Node] = set()
        for end in output_projections(view):
            inside, reached = _slice_back(view, end.linear.x, rows)
            if not reached:
                yield NearMiss(
                    self.name,
                    end.linear.out,
                    Reason(
                        Code.ANCHOR_ABSENT,
                        f"{end.linear.out.name}: no normalised residual row leads here",
                        (end.linear.out.name,),
                        expected="AttnRes or RMSNorm above the attention core",
                        actual="none in the graph",
                    ),
                )
                continue
            taken.update(reached)
            size = 1 if end.reduce is None else end.reduce.size
            group = end.reduce.group if end.reduce is not None else ""
            for row in reached:
                site = self._site(view, row, inside, size, group)
                if site is not None:
                    yield site
        for row in sorted(set(rows) - taken, key=view.index.__getitem__):
            ahead = _slice_to_output(view, row, rows)
            if ahead and _normalises_a_part(view, ahead, _linears_of(view, row, ahead)):
                group, size = tp_group(view)
                site = self._site(view, row, ahead, size, group)
                if site is not None:
                    yield site

    def _site(
        self, view: GraphView, row: fx.Node, inside: set[fx.Node], size: int | None, group: str
    ) -> Site | None:
        linears = _linears_of(view, row, inside)
        if not linears:
            return None
        kind = _kind(view, inside, linears)
        x = min((f.x for f in linears), key=view.index.__getitem__)
        total: Any = sum(f.n for f in linears)
        values = {
            s.M: s.value(shape_of(linears[0].out)[0]),
            s.K: s.value(linears[0].k),
            s.N: s.value(total),
            _KIND: s.name(kind),
            s.X_DTYPE: s.common_dtype(x),
            s.W_DTYPE: s.common_dtype(*(f.weight for f in linears)),
            s.BIAS: s.yes(any(f.bias is not None for f in linears)),
            s.WEIGHT_ROWS_CONTIGUOUS: s.rows_contiguous(*(f.weight for f in linears))
            if all(f.transposed for f in linears)
            else s.NO,
        }
        split = split_rows(view, linears, inside) if kind == "mla" else ()
        values[_SPLIT] = s.value(sum(split))
        values[_GROUP] = s.yes(bool(group))
        equal = kind == "mla" and equal_on_all_ranks(view, view.strip(x), group)
        values[_EQUAL] = s.yes(equal)
        if size is not None:
            values[s.TP] = s.value(size)
        return Site(
            self.name,
            f"{kind} {'merged' if len(linears) == 1 else 'separate'} x{len(linears)}",
            linears[0].out,
            in_order([n for f in linears for n in f.nodes], view.index),
            {"x": x, "weights": [f.weight for f in linears]},
            tuple(f.out for f in linears),
            values,
            facts=(linears, group, split),
        )

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """attention_projection(x, [weights])."""
        linears, group, _ = site.facts
        more: dict[str, Any] = {"batch_invariant": True} if target.batch_invariant else {}
        if split := _split(site, target):
            more["row_sharded"] = list(split)
        x = site.operands["x"]
        outs = [f.out for f in linears]
        shapes = [(shape_of(x)[0], f.n) for f in linears]
        return replacement(
            site, view, attention_projection, (x, site.operands["weights"]), results=outs,
            shapes=shapes, outputs=[Output(o, i) for i, o in enumerate(outs)], target=target,
            group=group, more=more,
        )  # fmt: skip

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """The policy's row for M, with the figures of the kernel for the site's own weights."""
        linears, _, _ = site.facts
        sizes = {f"n{i}": f.n for i, f in enumerate(linears) if isinstance(f.n, int)}
        split = _split(site, target)
        if not split:
            return pick(TABLE, site, target, sizes)
        sizes |= {"tp": target.tp, **{f"s{i}": rows for i, rows in enumerate(split)}}
        unread = others_share(split, linears[0].k, linears[0].dtype, target)
        return pick(SHARDED, site, target, sizes, op="attention_projection_sharded", unread=unread)

    def reads(self, site: Site, target: Target) -> list[Read]:
        """All weights, in order; of rows that the ranks split, this rank's."""
        linears, group, _ = site.facts
        split = _split(site, target) or (0,) * len(linears)
        return [read(f.weight, target, group, n) for f, n in zip(linears, split, strict=True)]


def _split(site: Site, target: Target) -> tuple[int, ...]:
    """Rows of each weight that the ranks split, where that is asked for; () for none."""
    _, _, split = site.facts
    asked = target.row_sharded and not target.is_reference
    return split if asked and any(split) else ()


def output_projections(view: GraphView) -> list[Projected]:
    """Every projected row that a residual reads, and every reduced projection."""
    found: dict[fx.Node, Projected] = {}
    for mix in view.each(AttnRes):
        for row in (mix.delta, mix.prefix):
            _add(found, projected(view, row) if row is not None else None)
    for norm in view.each(AddRmsNorm):
        _add(found, projected(view, norm.a))
        _add(found, projected(view, norm.b))
    for reduce in view.each(AllReduce):
        _add(found, projected(view, reduce.out))
    return sorted(found.values(), key=lambda p: view.index[p.linear.out])


def _add(found: dict[fx.Node, Projected], item: Projected | None) -> None:
    if item is not None:
        found.setdefault(item.linear.out, item)


def residual_rows(view: GraphView) -> dict[fx.Node, str]:
    """Normalised rows of the residual stream, by the value that holds them."""
    rows: dict[fx.Node, str] = {}
    for mix in view.each(AttnRes):
        rows[mix.out] = "attn_res"
    for added in view.each(AddRmsNorm):
        rows.setdefault(added.out, "add + rms_norm")
    for norm in view.each(RmsNorm):
        source = view.strip(norm.x)
        if isinstance(source, fx.Node) and op_of(source) in (
            "placeholder",
            "aten.embedding",
            "aten.add",
        ):
            rows.setdefault(norm.out, "rms_norm")
    return rows


def _slice_back(
    view: GraphView, start: fx.Node, rows: dict[fx.Node, str]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """Nodes between `start` and the nearest residual rows above it, and those rows."""
    inside: set[fx.Node] = set()
    reached: dict[fx.Node, None] = {}
    stack: list[Any] = [start]
    while stack:
        node = stack.pop()
        if node in inside:
            continue
        if node in rows:
            reached[node] = None
            continue
        inside.add(node)
        stack.extend(node.all_input_nodes)
    return inside, sorted(reached, key=view.index.__getitem__)


def _slice_to_output(view: GraphView, row: fx.Node, rows: dict[fx.Node, str]) -> set[fx.Node]:
    """Nodes between a residual row and the graph's end; empty where another residual row follows.

    An engine that splits its graph at attention has the projections in one graph and the output
    projection in the next. A row that reaches only the graph's end, without a residual row on the
    way, is such an entry; an MLP's row reaches the next residual row.
    """
    ahead: set[fx.Node] = set()
    stack = list(view.users(row))
    while stack:
        node = stack.pop()
        if node in ahead or node.op == "output":
            continue
        if node in rows or view.find(AllReduce, node) is not None:
            return set()
        ahead.add(node)
        stack.extend(node.users)
    return ahead


def _linears_of(view: GraphView, row: fx.Node, inside: set[fx.Node]) -> list[Linear]:
    """Return the linears among `inside` that read `row`, in graph order."""
    found = (view.find(Linear, u) for u in view.users(row) if u in inside)
    unique = {f.out: f for f in found if f is not None and view.same(f.x, row)}
    return sorted(unique.values(), key=lambda f: view.index[f.out])


def _kind(view: GraphView, inside: set[fx.Node], linears: list[Linear]) -> str:
    """KDA or MLA, read off the attention core's structure.

    A latent attention normalises a part of what it projects (q_a, kv_a) and projects it again; KDA
    projects one narrow part again (f_b) without a norm. Opaque cores name themselves.
    """
    names = " ".join(
        str(n.args[0]) for n in inside if op_of(n).startswith("auto_functionalized") and n.args
    )
    if "kda" in names:
        return "kda"
    return "mla" if "mla" in names or _normalises_a_part(view, inside, linears) else "kda"


def _normalises_a_part(view: GraphView, inside: set[fx.Node], linears: list[Linear]) -> bool:
    """Whether a norm among `inside` reads a projected row or a slice of one."""
    outs = {f.out for f in linears}
    norms = [n for n in inside if op_of(n) in RmsNorm.anchors]
    for norm in (found for n in norms if (found := view.find(RmsNorm, n)) is not None):
        source = view.strip(norm.x)
        if norm.out not in inside or not isinstance(source, fx.Node):
            continue
        if source in outs or (
            view.canon(source).op == "slice" and view.strip(view.canon(source).inputs[0]) in outs
        ):
            return True
    return False

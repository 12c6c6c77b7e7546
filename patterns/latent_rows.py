"""Rows of latent attention's weights that all ranks have: q_a and kv_a, all but the gate's.

A norm may be hidden in an engine's own kernel, and at eight ranks the gate is as wide as q_a. But
the gate alone goes through a sigmoid, so what is left of the published widths is q_a and kv_a.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from k3fuse.rewriter.recognise.linear import Linear
from k3fuse.rewriter.view import GraphView

# Published widths of Kimi K3: q_a 1536, kv_a 512 + 64; merged or apart.
_Q_A, _KV_A = 1536, 512 + 64
_LEADING = ([_Q_A + _KV_A], [_KV_A, _Q_A])


def split_rows(
    view: GraphView, linears: Sequence[Linear], inside: Collection[fx.Node]
) -> tuple[int, ...]:
    """The leading rows of each linear's weight that all ranks have; () where it is not certain.

    inside: nodes between the row and the end of the attention; a sigmoid elsewhere says nothing.
    """
    outs = {f.out: i for i, f in enumerate(linears)}
    gates = set()
    for node in (n for n in view.by_op.get("aten.sigmoid", ()) if n in inside):
        found = _columns(view, node.args[0], outs)
        if found is not None:
            gates.add((outs[found[0]], *found[1:]))
    if len(gates) != 1:
        return ()
    ((gate, first, end),) = gates
    rows = [f.n for f in linears if isinstance(f.n, int)]
    if len(rows) < len(linears) or rows[gate] != end:
        return ()  # the kernel takes leading rows
    rows[gate] = first
    return tuple(rows) if sorted(n for n in rows if n != 0) in _LEADING else ()


def _columns(
    view: GraphView, value: Any, roots: Collection[fx.Node]
) -> tuple[fx.Node, int, int] | None:
    """The result that a value is neighbouring columns of, and which; None for anything else."""
    steps: list[tuple[Any, Any]] = []
    node = view.strip(value)
    while isinstance(node, fx.Node) and node not in roots:
        spelled = view.canon(node)
        if spelled.op == "slice" and spelled.attr("dim") == -1:
            steps.append((spelled.attr("start"), spelled.attr("stop")))
        elif spelled.op != "cast":
            return None
        node = view.strip(spelled.inputs[0])
    if not isinstance(node, fx.Node):
        return None
    low, high = 0, node.meta["val"].shape[-1]
    for start, stop in reversed(steps):
        if not isinstance(start, int) or not isinstance(stop, int):
            return None
        low, high = low + start, low + stop
    return (node, low, high) if isinstance(high, int) else None

"""Counts and bytes of a layer before and after a rewrite, computed from shapes; nothing is timed.

Before: every operation that is no view reads its operands and writes its results once, as if each
were one kernel (a compiler may fuse some). After: a fused op reads what its site reads from outside
once and writes what is read outside once; the policy says in how many launches. A site whose work
another one's op does has no launch and reads nothing of that op's results. Floor: what the whole
layer reads from outside and leaves behind, each byte once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from k3fuse.rewriter.canonical import op_of, overload
from k3fuse.rewriter.site import Site

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Pick rows of their first operand: what they read is what they give.
_PICKS = frozenset({"aten.index", "aten.embedding", "aten.index_select", "aten.gather"})
# Write rows into their first operand, in place once the graph is compiled.
_PUTS = frozenset(
    {"aten.index_put", "aten.slice_scatter", "aten.scatter", "aten.index_copy", "aten.copy"}
)
_FREE = ("getitem", "wait_tensor", "aten.sym_size")


class _UnknownSizeError(Exception):
    """A size that is symbolic and was never traced with a number."""


@dataclass
class Row:
    """One part of a layer, in graph order: a site, or what stands between two sites.

    operations, read, written: before, each operation by itself; bytes. launches, read_after,
    written_after: after. hops, hops_after: collectives before; after, with the exchanges that a
    kernel adds.
    """

    part: str
    outcome: str
    operations: int = 0
    read: int = 0
    written: int = 0
    hops: int = 0
    launches: int = 0
    hops_after: int = 0
    read_after: int = 0
    written_after: int = 0


def layer_costs(
    nodes: Sequence[fx.Node], layers: dict[fx.Node, int], sites: Sequence[Site]
) -> list[dict[str, Any]]:
    """One entry a kind of layer: layers with the same sites, costed on the one in the middle.

    layers: nodes whose layer is known; the rest belongs to the last known one before it. Keys:
    layer, layers, sites ("pattern form"), rows, floor (bytes). Empty where a size is unknown.
    """
    members = _members(nodes, layers, sites)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in sorted(members):
        mine = tuple(f"{s.pattern} {s.form}" for s in sites if s.layer == layer)
        if mine:
            kinds.setdefault(mine, []).append(layer)
    try:
        return [_entry(names, same, members, sites) for names, same in kinds.items()]
    except _UnknownSizeError:
        return []


def _members(
    nodes: Sequence[fx.Node], layers: dict[fx.Node, int], sites: Sequence[Site]
) -> dict[int, list[fx.Node]]:
    fixed: dict[fx.Node, int | None] = dict(layers)
    fixed.update((node, site.layer) for site in sites for node in site.nodes)
    found: dict[int, list[fx.Node]] = {}
    current: int | None = None
    for node in nodes:
        if node.op != "call_function":
            continue
        current = fixed.get(node, current)
        if current is not None:
            found.setdefault(current, []).append(node)
    return found


def _entry(
    names: tuple[str, ...], same: list[int],
    members: dict[int, list[fx.Node]], sites: Sequence[Site],
) -> dict[str, Any]:  # fmt: skip
    layer = same[len(same) // 2]
    mine = [s for s in sites if s.layer == layer]
    owner = {node: site for site in reversed(mine) for node in site.nodes}
    groups: dict[int, tuple[Row, Site | None, list[fx.Node]]] = {}
    gap = 0
    last: Site | None = None
    for node in members[layer]:
        site = owner.get(node)
        gap += site is not None and site is not last
        last = site or last
        key = id(site) if site is not None else gap
        part = site.pattern if site is not None else ""
        outcome = site.outcome if site is not None else ""
        groups.setdefault(key, (Row(part, outcome), site, []))[2].append(node)
    rows = []
    for row, site, inside in groups.values():
        _fill(row, site, inside)
        if row.operations:
            rows.append(asdict(row))
    read, written = _boundary(members[layer])
    return {
        "layer": layer,
        "layers": same,
        "sites": list(names),
        "rows": rows,
        "floor": read + written,
    }


def _fill(row: Row, site: Site | None, inside: list[fx.Node]) -> None:
    for node in inside:
        name = op_of(node)
        row.hops += any(part in name for part in _COLLECTIVES)
        if _is_free(node):
            continue
        row.operations += 1
        read, written = _alone(node, name)
        row.read += read
        row.written += written
    if site is not None and site.outcome == "found" and site.kernel is not None:
        row.launches = site.kernel.launches
        own = site.within.nodes if site.within is not None else ()
        row.read_after, row.written_after = _boundary(inside, own)
        row.read_after -= site.kernel.unread
        row.hops_after = row.hops + site.kernel.hops
    else:
        row.hops_after = row.hops
        row.launches, row.read_after, row.written_after = row.operations, row.read, row.written


def _is_free(node: fx.Node) -> bool:
    """Whether a node moves no bytes: a view, a part of a tuple, the end of a collective."""
    name = op_of(node)
    if any(part in name for part in _FREE) or not isinstance(_first(node), torch.Tensor):
        return True
    schema = getattr(overload(node), "_schema", None)
    if schema is None or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _first(node: fx.Node) -> Any:
    value = node.meta.get("val")
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value


def _alone(node: fx.Node, name: str) -> tuple[int, int]:
    """Bytes that one operation reads and writes by itself."""
    operands = list(dict.fromkeys(node.all_input_nodes))
    written = _bytes(node)
    if name in _PUTS:
        rows = sum(_bytes(n) for n in operands[1:])
        return rows, min(rows, written)
    if name in _PICKS:
        return _picked(node) + sum(_bytes(n) for n in operands[1:]), written
    return sum(_bytes(n) for n in operands), written


def _picked(node: fx.Node) -> int:
    """Bytes of the different rows that an index over the first dimension is expected to touch.

    k of E rows a token without repeats, every row equally likely: E * (1 - (1 - k / E) ** M).
    """
    source, given = node.all_input_nodes[0], _bytes(node)
    shape = _shape(source.meta.get("val"))
    index = node.all_input_nodes[-1].meta.get("val")
    picks = _shape(index) if isinstance(index, torch.Tensor) else ()
    if len(picks) != 2 or not shape or picks[1] > shape[0]:
        return min(given, _bytes(source))
    different = shape[0] * (1.0 - (1.0 - picks[1] / shape[0]) ** picks[0])
    return min(given, round(_bytes(source) / shape[0] * different))


def _boundary(inside: Iterable[fx.Node], own: Iterable[fx.Node] = ()) -> tuple[int, int]:
    """Bytes read from outside and left for outside, each once, rows that are picked by row.

    own: what the op that these nodes are a part of makes itself, so that nothing has to be read.
    """
    member, made = set(inside), set(own)
    read = 0
    for root, readers in _roots(member).items():
        if root in made:
            continue
        # Rows of a table are picked, or written: the rest of it is not read.
        names = {op_of(n) if v is n.all_input_nodes[0] else "" for n, v in readers}
        if names <= _PICKS:
            read += max(_picked(n) for n, _ in readers)
        elif not names <= _PUTS:
            read += min(_bytes(root), sum({v: _bytes(v) for _, v in readers}.values()))
    written = 0
    for node in member:
        if _is_free(node) and op_of(node) != "getitem":
            continue
        if any(user not in member for user in _readers(node)):
            written += _alone(node, op_of(node))[1] if op_of(node) in _PUTS else _bytes(node)
    return read, written


def _roots(member: set[fx.Node]) -> dict[fx.Node, list[tuple[fx.Node, fx.Node]]]:
    """What is read from outside, views looked through: source -> (reader, view it reads)."""
    found: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for node in member:
        if _is_free(node):
            continue
        for operand in dict.fromkeys(node.all_input_nodes):
            root = operand
            while root.op == "call_function" and _is_free(root) and root.all_input_nodes:
                root = root.all_input_nodes[0]
            if root not in member and isinstance(_first(root), torch.Tensor):
                found.setdefault(root, []).append((node, operand))
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """Computing readers, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if user.op == "call_function" and _is_free(user) else [user]
    return found


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_number(s) for s in value.shape) if isinstance(value, torch.Tensor) else ()


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "_hint", None)
    if hint is None:
        raise _UnknownSizeError
    return int(hint)


def _bytes(node: fx.Node) -> int:
    """Bytes of a node's value; an expanded dimension counts once."""
    total = 0
    todo = [node.meta.get("val")]
    while todo:
        value = todo.pop()
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, torch.Tensor):
            sizes = [
                _number(n)
                for n, s in zip(value.shape, value.stride(), strict=True)
                if not (isinstance(s, int) and s == 0)
            ]
            total += math.prod(sizes) * value.element_size()
    return total

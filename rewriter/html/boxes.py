"""A graph piece as boxes and edges, folded until it can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# More boxes than this are no picture; runs of small operations are folded, views first.
MOST_BOXES = 40
WIDEST = 38  # characters of a line in a box

_VIEWS = frozenset(
    [
        "t", "view", "reshape", "_unsafe_view", "getitem", "unsqueeze", "squeeze", "slice",
        "permute", "transpose", "select", "expand", "split", "split_with_sizes", "chunk",
        "detach", "alias", "clone", "wait_tensor", "empty", "empty_like",
    ]
)  # fmt: skip
_REDUCTIONS = frozenset(
    [
        "mean", "sum", "amax", "amin", "max", "min", "_softmax", "softmax", "cumsum", "stack",
        "cat",
    ]
)  # fmt: skip
_HEAVY = frozenset(
    [
        "mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "index", "index_put", "embedding",
        "gather", "scatter", "topk", "sort", "convolution", "all_reduce",
        "all_gather_into_tensor", "reduce_scatter_tensor",
    ]
)  # fmt: skip


@dataclass
class Box:
    """One box. title: the op, or how many are folded; lines: below it; kind: op, folded or input.

    ops: names of the operations inside, in graph order. out: read outside the site.
    """

    title: str
    lines: list[str]
    kind: str
    changed: bool = False
    out: bool = False
    ops: list[str] = field(default_factory=list)


@dataclass
class Drawing:
    """Boxes in graph order and edges between them, (from, to) by position."""

    boxes: list[Box]
    edges: list[tuple[int, int]]


def draw(piece: dict[str, Any], most: int = MOST_BOXES) -> Drawing:
    """Boxes of a piece: inputs with one reader stand inside it, small operations are folded."""
    nodes = [n for n in piece["nodes"] if n["op"] != "input"]
    drawing = Drawing([], [])
    for light in (_none, _small, _small_or_reduction):
        drawing = _folded(piece["nodes"], nodes, light)
        if len(drawing.boxes) <= most:
            break
    return drawing


def _short(op: str) -> str:
    return op.rpartition(".")[2]


def _none(op: str) -> bool:
    return False


def _view(op: str) -> bool:
    return _short(op) in _VIEWS


def _quiet(op: str) -> bool:
    """Views and casts: not worth a name where they stand beside another operation."""
    return _view(op) or _short(op) in ("_to_copy", "to", "convert_element_type")


def _small(op: str) -> bool:
    short = _short(op)
    ours = op.startswith(("aten.", "prims.", "_c10d")) or "." not in op
    return short in _VIEWS or (ours and short not in _HEAVY and short not in _REDUCTIONS)


def _small_or_reduction(op: str) -> bool:
    return _small(op) or _short(op) in _REDUCTIONS


def _folded(
    every: Sequence[dict[str, Any]], nodes: Sequence[dict[str, Any]], light: Callable[[str], bool]
) -> Drawing:
    home = _homes(nodes, light)
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for name in dict.fromkeys(node["inputs"]):
            readers.setdefault(name, []).append(home[node["name"]])
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault(home[node["name"]], []).append(node)
    boxes: list[Box] = []
    place: dict[str, int] = {}
    inputs = [n for n in every if n["op"] == "input"]
    shared = [n for n in inputs if len(set(readers.get(n["name"], ()))) > 1]
    for node in shared:
        place[node["name"]] = len(boxes)
        boxes.append(Box(cut(_path(node["text"])), [cut(node["value"])], "input"))
    for key, members in groups.items():
        own = [
            cut(f"{_path(n['text'])} {n['value']}")
            for n in inputs
            if n not in shared and set(readers.get(n["name"], ())) == {key}
        ]
        place.update((n["name"], len(boxes)) for n in members)
        boxes.append(_box(members, own))
    edges = {
        (place[name], place[node["name"]]): None
        for node in nodes
        for name in node["inputs"]
        if name in place and place[name] != place[node["name"]]
    }
    return Drawing(boxes, list(edges))


def _path(label: str) -> str:
    """A parameter's path without the part that all of a layer share."""
    return label.rpartition("layers.N.")[2]


def _box(members: list[dict[str, Any]], own: list[str]) -> Box:
    ops = [n["op"] for n in members]
    last = members[-1]
    small = sum(1 for op in ops if not _view(op)) > 1
    main = next((n for n in members if not _quiet(n["op"])), last)
    lines = [cut(last["value"])] if "?" not in last["value"] else []
    if any(not _quiet(n["op"]) for n in members if n is not main):
        title = f"{len(members)} small operations"
        lines += _wrapped(dict.fromkeys(_short(op) for op in ops))
    else:
        title = cut(main["op"])
    return Box(
        title,
        [*lines, *_inputs(own)],
        "folded" if small else "op",
        any(n.get("changed") for n in members),
        any(n.get("readers") for n in members),
        ops,
    )


def _inputs(own: list[str], most: int = 10) -> list[str]:
    lines = [f"< {line}" for line in own[:most]]
    return lines if len(own) <= most else [*lines, f"< and {len(own) - most} more"]


def _wrapped(words: dict[str, None], most: int = 3) -> list[str]:
    """Words in a few lines, the rest as "..."."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 2 > WIDEST:
            if len(lines) == most:
                lines[-1] = cut(lines[-1] + ", ...")
                break
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + word
    return lines


def cut(text: str, most: int = WIDEST) -> str:
    """A text that fits a box."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _homes(nodes: Sequence[dict[str, Any]], light: Callable[[str], bool]) -> dict[str, str]:
    """Name of the box of each node; ways out of a box and back into it cannot exist.

    A view stands in its operand's box. Neighbouring light nodes of one level share a box, where the
    level is the number of other nodes on the longest way to a node. A cast or view of an input
    stands in its only reader's box.
    """
    level: dict[str, int] = {}
    is_light: dict[str, bool] = {}
    home = {n["name"]: n["name"] for n in nodes}

    def root(name: str) -> str:
        while home[name] != name:
            name = home[name]
        return name

    readers: dict[str, set[str]] = {}
    for node in nodes:
        name = node["name"]
        known = list(dict.fromkeys(i for i in node["inputs"] if i in level))
        for other in known:
            readers.setdefault(other, set()).add(name)
        if _view(node["op"]) and len(known) == 1:
            level[name], is_light[name] = level[known[0]], is_light[known[0]]
            home[name] = root(known[0])
            continue
        is_light[name] = light(node["op"])
        level[name] = max((level[i] + (not is_light[i]) for i in known), default=0)
        for other in known:
            if is_light[name] and is_light[other] and level[other] == level[name]:
                home[root(name)] = root(other)
    boxes: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        boxes.setdefault(root(node["name"]), []).append(node)
    for key, members in boxes.items():
        names = {n["name"] for n in members}
        inputs = {i for n in members for i in n["inputs"]} & set(level) - names
        outside = {r for n in names for r in readers.get(n, ())} - names
        own = all(_quiet(n["op"]) and not n.get("readers") for n in members)
        if own and not inputs and len({root(r) for r in outside}) == 1:
            home[root(key)] = root(next(iter(outside)))
    return {n["name"]: root(n["name"]) for n in nodes}

"""Defects put into a traced graph at random: operands, literals, dtypes, writes, readers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from k3fuse.rewriter.canonical import op_of

aten = torch.ops.aten

Edit = Callable[[fx.GraphModule, random.Random], bool]


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            found.append(node)
    return found


def _revalue(module: fx.GraphModule, start: fx.Node) -> bool:
    """New fake values of `start` and of what they change; False where the graph cannot run."""
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in module.graph.nodes)
    mode = next(m for m in modes if m is not None)
    renewed: set[fx.Node] = set()
    reached = False
    with mode, torch.no_grad():
        for node in module.graph.nodes:
            reached |= node is start
            if not reached or node.op != "call_function":
                continue
            if node is not start and renewed.isdisjoint(node.all_input_nodes):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
            try:
                value = node.target(*args, **kwargs)
            except Exception:
                return False
            if node is start or not _same(value, node.meta.get("val"), node):
                node.meta["val"] = value
                renewed.add(node)
    return True


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _same(new: Any, old: Any, node: fx.Node) -> bool:
    """Whether readers see no difference: equal metadata, and no storage shared with an operand."""
    ours, theirs = (v if isinstance(v, (tuple, list)) else (v,) for v in (new, old))
    if list(map(_seen, ours)) != list(map(_seen, theirs)):
        return False
    given = [t for n in node.all_input_nodes for t in pytree.tree_leaves(n.meta["val"])]
    used = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
    return all(
        t.untyped_storage()._cdata not in used
        for t in (*ours, *theirs) if isinstance(t, Tensor)
    )  # fmt: skip


def _seen(value: Any) -> Any:
    """What a fake value tells its readers; symbolic sizes as expressions, which guards nothing."""
    if not isinstance(value, Tensor):
        return getattr(getattr(value, "node", None), "expr", value)
    sizes = [*value.shape, *value.stride(), value.storage_offset()]
    return (
        value.dtype, value.device, len(value.shape),
        [s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes],
    )  # fmt: skip


def _fake_call(module: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    node = module.graph.call_function(target, args)
    values = fx.map_arg(args, _value)
    mode = next(
        m for n in module.graph.nodes if (m := getattr(n.meta.get("val"), "fake_mode", None))
    )
    with mode, torch.no_grad():
        node.meta["val"] = target(*values)
    return node


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def swap_operands(module: fx.GraphModule, rng: random.Random) -> bool:
    """Two operands of one node change places."""
    nodes = [n for n in _calls(module) if sum(isinstance(a, fx.Node) for a in n.args) >= 2]
    if not nodes:
        return False
    node = rng.choice(nodes)
    places = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node)]
    i, j = rng.sample(places, 2)
    args = list(node.args)
    args[i], args[j] = args[j], args[i]
    node.args = tuple(args)
    return _revalue(module, node)


def change_number(module: fx.GraphModule, rng: random.Random) -> bool:
    """A literal becomes another one: a number, an axis, a flag."""
    nodes = [n for n in _calls(module) if any(map(_is_literal, n.args))]
    if not nodes:
        return False
    node = rng.choice(nodes)
    args = list(node.args)
    places = [i for i, a in enumerate(args) if _is_literal(a)]
    i = rng.choice(places)
    args[i] = _other(args[i], rng)
    node.args = tuple(args)
    return _revalue(module, node)


def _is_literal(value: Any) -> bool:
    """A number, a flag, or a list that is not empty."""
    return isinstance(value, (int, float)) or (isinstance(value, list) and bool(value))


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -1, 0, 1])
    if isinstance(value, float):
        return rng.choice([value * 2, value + 0.5, -value, 0.25])
    items = list(value)
    i = rng.randrange(len(items))
    if isinstance(items[i], (int, float)):
        items[i] = _other(items[i], rng)
    elif len(items) > 1:
        rng.shuffle(items)
    return items


def other_operand(module: fx.GraphModule, rng: random.Random) -> bool:
    """A node reads another value of the same shape and dtype."""
    rng_nodes = _calls(module)
    for node in rng.sample(rng_nodes, min(8, len(rng_nodes))):
        sources = [a for a in node.args if isinstance(a, fx.Node)]
        if not sources:
            continue
        old = rng.choice(sources)
        val = old.meta.get("val")
        if not isinstance(val, Tensor):
            continue
        order = list(module.graph.nodes)
        above = order[: order.index(node)]
        fits = [
            n
            for n in above
            if n is not old
            and isinstance(n.meta.get("val"), Tensor)
            and n.meta["val"].dtype == val.dtype
            and tuple(map(str, n.meta["val"].shape)) == tuple(map(str, val.shape))
        ]
        if fits:
            node.replace_input_with(old, rng.choice(fits))
            return _revalue(module, node)
    return False


_BETWEEN: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.neg.default, ()),
    (aten.mul.Tensor, (1.5,)),
    (aten.add.Tensor, (0.25,)),
    (aten.relu.default, ()),
    (aten.flip.default, ([0],)),
    (aten.flip.default, ([-1],)),
    (aten.clone.default, ()),
    (aten.alias.default, ()),
    (aten.roll.default, ([1], [-1])),
    (aten.sigmoid.default, ()),
    (aten.abs.default, ()),
)


def insert(module: fx.GraphModule, rng: random.Random) -> bool:
    """An operation between a value and one (or all) of its readers."""
    nodes = [n for n in _calls(module) if _is_float(n) and n.users]
    nodes += [n for n in module.graph.find_nodes(op="placeholder") if _is_float(n) and n.users]
    if not nodes:
        return False
    node, (target, rest) = rng.choice(nodes), rng.choice(_BETWEEN)
    readers = list(node.users)
    behind = node
    if node.op == "placeholder":
        behind = list(module.graph.find_nodes(op="placeholder"))[-1]
    try:
        with module.graph.inserting_after(behind):
            made = _fake_call(module, target, node, *rest)
    except (RuntimeError, IndexError):
        return False
    for reader in readers if rng.random() < 0.5 else [rng.choice(readers)]:
        reader.replace_input_with(node, made)
    return _revalue(module, made)


def extra_reader(module: fx.GraphModule, rng: random.Random) -> bool:
    """An inner value is also read outside: by a new output, directly or through a view."""
    node = rng.choice(_calls(module))
    output = next(iter(module.graph.find_nodes(op="output")))
    with module.graph.inserting_before(output):
        if rng.random() < 0.5 and _is_float(node):
            made = _fake_call(module, aten.relu.default, node)
        else:
            made = node
    output.args = ((*output.args[0], made),)
    return True


_WRITES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.add_.Tensor, (1,)),
    (aten.mul_.Tensor, (2,)),
    (aten.zero_.default, ()),
    (aten.neg_.default, ()),
)


def write(module: fx.GraphModule, rng: random.Random) -> bool:
    """An in-place write into an input or a value, anywhere behind it; sometimes through a view.

    Half of the time the value is first copied and some readers read the copy.
    """
    nodes = [n for n in _calls(module) if _is_float(n)]
    nodes += [n for n in module.graph.find_nodes(op="placeholder") if _is_float(n)]
    node = rng.choice(nodes)
    order = [n for n in module.graph.nodes if n.op == "call_function"]
    if not order:
        return False
    first = order.index(node) if node in order else -1
    if rng.random() < 0.5 and node.users:
        behind = node if node.op == "call_function" else order[0].prev
        with module.graph.inserting_after(behind):
            kept = _fake_call(module, aten.clone.default, node)
        readers = [u for u in node.users if u is not kept and u.op == "call_function"]
        for reader in rng.sample(readers, rng.randint(0, len(readers))):
            reader.replace_input_with(node, kept)
    below = order[first + 1 :]
    place = rng.choice(below) if below else order[-1]
    target, rest = rng.choice(_WRITES)
    after = not below or rng.random() < 0.5
    spot = module.graph.inserting_after(place) if after else module.graph.inserting_before(place)
    with spot:
        if rng.random() < 0.3 and node.meta["val"].dim() > 1:
            view = _fake_call(module, aten.slice.Tensor, node, 0, 0, 2)
            with module.graph.inserting_after(view):
                _fake_call(module, target, view, *rest)
        else:
            _fake_call(module, target, node, *rest)
    return True


def recast(module: fx.GraphModule, rng: random.Random) -> bool:
    """A cast goes to another dtype, or a value passes through a narrower one."""
    casts = [
        n for n in _calls(module) if op_of(n) in ("aten._to_copy", "prims.convert_element_type")
    ]
    if casts and rng.random() < 0.6:
        node = rng.choice(casts)
        dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64])
        if "dtype" in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": dtype}
        else:
            node.args = (node.args[0], dtype)
        return _revalue(module, node)
    nodes = [n for n in _calls(module) if n.meta["val"].dtype == torch.float32 and n.users]
    if not nodes:
        return False
    node = rng.choice(nodes)
    readers = list(node.users)
    with module.graph.inserting_after(node):
        narrow = module.graph.call_function(
            aten._to_copy.default, (node,), {"dtype": torch.bfloat16}
        )
    with module.graph.inserting_after(narrow):
        wide = module.graph.call_function(
            aten._to_copy.default, (narrow,), {"dtype": torch.float32}
        )
    for reader in readers:
        reader.replace_input_with(node, narrow if rng.random() < 0.2 else wide)
    return _revalue(module, narrow)


def restride(module: fx.GraphModule, rng: random.Random) -> bool:
    """A value is read in another memory layout, or an input is a part of a wider one."""
    nodes = [n for n in _calls(module) if n.meta["val"].dim() == 2 and n.users]
    if not nodes:
        return False
    node = rng.choice(nodes)
    readers = list(node.users)
    with module.graph.inserting_after(node):
        turned = _fake_call(module, aten.t.default, node)
    with module.graph.inserting_after(turned):
        kept = module.graph.call_function(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
    with module.graph.inserting_after(kept):
        back = module.graph.call_function(aten.t.default, (kept,))
    for reader in readers:
        reader.replace_input_with(node, back)
    return _revalue(module, kept)


def reshape(module: fx.GraphModule, rng: random.Random) -> bool:
    """A value is read in another grouping of its elements by one of its readers."""
    nodes = [n for n in _calls(module) if n.meta["val"].dim() == 2 and n.users]
    rng.shuffle(nodes)
    for node in nodes[:4]:
        rows, columns = node.meta["val"].shape
        if not (isinstance(rows, int) and isinstance(columns, int)):
            continue
        shapes = [[columns, rows], [rows // 2, 2 * columns], [2 * rows, columns // 2]]
        shapes += [[1, rows, columns], [rows, 2, columns // 2], [2, rows, columns // 2]]
        shape = rng.choice(shapes)
        readers = list(node.users)
        try:
            with module.graph.inserting_after(node):
                made = _fake_call(module, aten.reshape.default, node, shape)
        except RuntimeError:
            return False
        target = made
        if rng.random() < 0.4:
            with module.graph.inserting_after(made):
                target = _fake_call(module, aten.reshape.default, made, [rows, columns])
        rng.choice(readers).replace_input_with(node, target)
        return _revalue(module, made)
    return False


EDITS: dict[str, Edit] = {
    "graph: operands swapped": swap_operands,
    "graph: another literal": change_number,
    "graph: another operand": other_operand,
    "graph: operation inserted": insert,
    "graph: extra reader": extra_reader,
    "graph: write between": write,
    "graph: another dtype": recast,
    "graph: another stride": restride,
    "graph: another grouping": reshape,
}

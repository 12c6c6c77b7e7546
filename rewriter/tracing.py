"""Reference functions as graphs: traced with the shapes, dtypes and decompositions of a site.

So a concept's decomposed form follows torch's versions instead of being written down.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from k3fuse.rewriter.canonical import shape_of
from k3fuse.rewriter.view import GraphView

# A symbolic token count is traced as this prime; no dimension of a model is a multiple of it.
PRIME = 1_000_003

Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Captured:
    """A number the template reads from the graph: traced as `sentinel`, returned under its name."""

    name: str
    sentinel: float


@dataclass(frozen=True)
class Template:
    """A reference function and the numbers it captures.

    fn: called with fake tensors in `arguments` order (an argument may be a list of tensors), then
    `static` keyword values; captured numbers are passed by name as their sentinel. Returns one
    tensor or a tuple.
    """

    name: str
    fn: Callable[..., Any]
    arguments: tuple[str, ...]
    captures: tuple[Captured, ...] = ()


@dataclass(frozen=True)
class Like:
    """Stands for an operand that is not found yet: its shape and dtype are enough to trace."""

    shape: Shape
    dtype: torch.dtype


class _Tracing:
    """Traced forms, cached by function, shapes, dtypes, static values and level."""

    def __init__(self) -> None:
        self.cache: dict[Any, tuple[GraphView, fx.Node]] = {}


_TRACES = _Tracing()


def _concrete(shape: Shape, tokens: sympy.Basic | None) -> list[int]:
    sizes = []
    for size in shape:
        if isinstance(size, int):
            sizes.append(size)
        elif tokens is not None:
            ratio = sympy.simplify(size / tokens)
            if not ratio.is_Integer:
                raise ValueError(
                    f"shape {shape}: {size} is no multiple of the token count {tokens}"
                )
            sizes.append(int(ratio) * PRIME)
        else:
            raise ValueError(f"shape {shape} has a symbol and no token count was given")
    return sizes


def tokens_of(shape: Shape) -> sympy.Basic | None:
    """Return the symbolic leading size of a row shape, or None where it is static."""
    return shape[0] if shape and isinstance(shape[0], sympy.Basic) else None


@lru_cache(maxsize=1)
def _inductor_table() -> dict[Any, Any]:
    # Some decompositions read torch._inductor.lowering without importing it.
    importlib.import_module("torch._inductor.lowering")
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def _spec(value: Any, tokens: sympy.Basic | None) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_spec(v, tokens) for v in value)
    if isinstance(value, Like):
        return (tuple(_concrete(value.shape, tokens)), value.dtype)
    tensor = value.meta["val"]
    return (tuple(_concrete(shape_of(value), tokens)), tensor.dtype)


def _materialise(spec: Any) -> Any:
    if spec and isinstance(spec[-1], torch.dtype):
        shape, dtype = spec
        return torch.empty(shape, dtype=dtype)
    return [_materialise(s) for s in spec]


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Keep torch from logging what the caller catches and answers with a reason.

    A reference function that has no form at a site's shape raises; torch also logs the operator's
    error with its stack, which reads like a fault in a user's log.
    """
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def trace(
    template: Template,
    operands: Mapping[str, Any],
    tokens: sympy.Basic | None,
    static: Mapping[str, Any],
    level: str,
) -> tuple[GraphView, fx.Node]:
    """Trace the reference function for these operands; level "aot" or "inductor"."""
    specs = tuple(_spec(operands[name], tokens) for name in template.arguments)
    key = (template.name, template.fn, specs, tuple(sorted(static.items())), level)
    found = _TRACES.cache.get(key)
    if found is not None:
        return found
    table = _inductor_table() if level == "inductor" else {}
    numbers = {c.name: c.sentinel for c in template.captures}
    with _own_errors(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        examples = [_materialise(spec) for spec in specs]
        flat: list[torch.Tensor] = []
        layout: list[int] = []  # -1: one tensor; n: a list of n
        for example in examples:
            flat += example if isinstance(example, list) else [example]
            layout.append(len(example) if isinstance(example, list) else -1)

        def call(*tensors: torch.Tensor) -> Any:
            it = iter(tensors)
            args = [next(it) if n < 0 else [next(it) for _ in range(n)] for n in layout]
            return template.fn(*args, **numbers, **static)

        graph = make_fx(call, decomposition_table=table, tracing_mode="real")(*flat).graph
    names = []
    for name, n in zip(template.arguments, layout, strict=True):
        names += [name] if n < 0 else [f"{name}.{i}" for i in range(n)]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for placeholder, name in zip(placeholders, names, strict=True):
        placeholder.meta["argument"] = name
    output = next(n for n in graph.nodes if n.op == "output")
    graph.eliminate_dead_code()
    found = _TRACES.cache[key] = (GraphView(graph), output)
    return found


def levels_of(view: GraphView) -> tuple[str, ...]:
    """Levels of decomposition a graph may be at; both where it has no cast to tell them apart."""
    if "prims.convert_element_type" in view.by_op:
        return ("inductor",)
    return ("aot",) if "aten._to_copy" in view.by_op else ("aot", "inductor")

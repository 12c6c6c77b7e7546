"""Matching a traced reference function against a graph.

Matching is exact: every operation, attribute, dtype and shape, except that reshapes are looked
through, sums and products commute, and numbers named in `captures` are read instead of compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from k3fuse.rewriter.canonical import (
    COMMUTATIVE,
    Canonical,
    dtype_of,
    rank_of,
    shape_of,
    without_leading_ones,
)
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.tracing import (
    PRIME,
    Captured,
    Like,
    Shape,
    Template,
    levels_of,
    tokens_of,
    trace,
)
from k3fuse.rewriter.view import GraphView

__all__ = [
    "Captured",
    "Like",
    "Matcher",
    "Mismatch",
    "Template",
    "TemplateMatch",
    "match_template",
    "tokens_of",
]


@dataclass
class TemplateMatch:
    """bindings: argument name (`name.i` for list items) -> node; numbers: captured values."""

    bindings: dict[str, fx.Node] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    pairs: dict[fx.Node, fx.Node] = field(default_factory=dict)
    passed: dict[fx.Node, None] = field(default_factory=dict)

    def mark(self) -> tuple[int, ...]:
        """How much has matched so far: dicts keep their order, so sizes are enough to go back."""
        return (len(self.bindings), len(self.numbers), len(self.pairs), len(self.passed))

    def back_to(self, mark: tuple[int, ...]) -> None:
        """Forget what was added since `mark`."""
        tables: tuple[dict[Any, Any], ...] = (self.bindings, self.numbers, self.pairs, self.passed)
        for table, size in zip(tables, mark, strict=True):
            while len(table) > size:
                table.popitem()

    def nodes(self, view: GraphView) -> tuple[fx.Node, ...]:
        """Graph nodes covered, reshapes between them included, in graph order."""
        covered = set(self.pairs.values()) | set(self.passed)
        bound = {view.strip(n) for n in self.bindings.values()} | set(self.bindings.values())
        return tuple(sorted(covered - bound, key=view.index.__getitem__))


@dataclass
class Mismatch:
    """The deepest point a match reached: how many nodes fitted, and what differed."""

    depth: int
    reason: Reason


class Matcher:
    """Matches one traced template against a graph, from an output node backwards."""

    def __init__(
        self, view: GraphView, pattern: GraphView, template: Template, tokens: sympy.Basic | None
    ) -> None:
        self.view = view
        self.pattern = pattern
        self.tokens = tokens
        self.captures = {c.sentinel: c.name for c in template.captures}
        self.worst: Mismatch | None = None

    # --- bookkeeping --------------------------------------------------------------------------

    def _fail(
        self, state: TemplateMatch, code: Code, what: str, node: Any, expected: Any, actual: Any
    ) -> None:
        depth = len(state.pairs)
        if self.worst is not None and depth < self.worst.depth:
            return
        name = node.name if isinstance(node, fx.Node) else str(node)
        # The other order of a sum fails as deep, on what is another value; an attribute says more.
        telling = (Code.ATTR_MISMATCH, Code.DTYPE_MISMATCH)
        told = self.worst is not None and self.worst.reason.code in telling and code not in telling
        if self.worst is None or depth >= self.worst.depth + told:
            self.worst = Mismatch(
                depth, Reason(code, f"{name}: {what}", (name,), str(expected), str(actual))
            )

    def _expected_shape(self, node: fx.Node) -> Shape:
        if self.tokens is None:
            return shape_of(node)
        sizes: list[Any] = []
        for size in shape_of(node):
            if isinstance(size, int) and size and size % PRIME == 0:
                sizes.append(self.tokens * (size // PRIME))
            else:
                sizes.append(size)
        return tuple(sizes)

    def _same_shape(self, pattern_node: fx.Node, node: fx.Node) -> bool:
        expected, actual = self._expected_shape(pattern_node), shape_of(node)
        if expected == actual:
            return True
        return without_leading_ones(expected) == without_leading_ones(actual)

    # --- matching -----------------------------------------------------------------------------

    def match(self, pattern_node: Any, node: Any, state: TemplateMatch) -> TemplateMatch | None:
        """Match an operand of the pattern against one of the graph; None and `worst` on failure."""
        if isinstance(pattern_node, (tuple, list)):
            return self._match_list(pattern_node, node, state)
        if not isinstance(pattern_node, fx.Node):
            return self._match_number(pattern_node, node, state)
        if not isinstance(node, fx.Node):
            self._fail(
                state,
                Code.OP_MISMATCH,
                "a number where a tensor is expected",
                node,
                pattern_node,
                node,
            )
            return None
        # Broadcasting goes by the shape at the place of use, not by that of the value behind it.
        if rank_of(pattern_node) and not self._same_shape(pattern_node, node):
            self._fail(
                state,
                Code.SHAPE_MISMATCH,
                "is used in another shape",
                node,
                self._expected_shape(pattern_node),
                shape_of(node),
            )
            return None
        source, target = self.pattern.strip(pattern_node), self.view.strip(node)
        if source.op == "placeholder":
            return self._bind(source, node, target, state)
        if source in state.pairs:
            if state.pairs[source] is target:
                return state
            self._fail(
                state, Code.OP_MISMATCH, "not the value used elsewhere in the site", node,
                state.pairs[source].name, target.name,
            )  # fmt: skip
            return None
        want, have = self.pattern.canon(source), self.view.canon(target)
        if not self._same_head(want, have, source, target, state):
            return None
        state.pairs[source] = target
        state.passed.update(dict.fromkeys(self.view.path(node, target)))
        return self._match_inputs(want, have, state)

    def _same_head(
        self,
        want: Canonical,
        have: Canonical,
        source: fx.Node,
        target: fx.Node,
        state: TemplateMatch,
    ) -> bool:
        if want.op != have.op or len(want.inputs) != len(have.inputs):
            self._fail(
                state,
                Code.OP_MISMATCH,
                f"is {have.op}, expected {want.op}",
                target,
                want.op,
                have.op,
            )
            return False
        if dtype_of(source) != dtype_of(target):
            self._fail(
                state,
                Code.DTYPE_MISMATCH,
                "has another dtype",
                target,
                dtype_of(source),
                dtype_of(target),
            )
            return False
        if rank_of(source) and not self._same_shape(source, target):
            self._fail(
                state, Code.SHAPE_MISMATCH, "has another shape", target,
                self._expected_shape(source), shape_of(target),
            )  # fmt: skip
            return False
        if want.op == "aten.expand":
            return True  # its sizes are its shape
        if [k for k, _ in want.attrs] != [k for k, _ in have.attrs]:
            self._fail(state, Code.ATTR_MISMATCH, "has other attributes", target, want, have)
            return False
        for (key, expected), (_, actual) in zip(want.attrs, have.attrs, strict=False):
            if not self._same_attr(expected, actual, state):
                self._fail(state, Code.ATTR_MISMATCH, f"'{key}' differs", target, expected, actual)
                return False
        return True

    def _same_attr(self, expected: Any, actual: Any, state: TemplateMatch) -> bool:
        if (
            isinstance(expected, float)
            and expected in self.captures
            and isinstance(actual, (int, float))
        ):
            return self._capture(self.captures[expected], float(actual), state)
        if isinstance(expected, tuple) and isinstance(actual, tuple):
            return len(expected) == len(actual) and all(
                self._same_attr(e, a, state) for e, a in zip(expected, actual, strict=True)
            )
        if (
            isinstance(expected, int)
            and self.tokens is not None
            and expected
            and expected % PRIME == 0
        ):
            return bool(sympy.sympify(actual) == self.tokens * (expected // PRIME))
        return bool(expected == actual)

    def _capture(self, name: str, value: float, state: TemplateMatch) -> bool:
        return state.numbers.setdefault(name, value) == value

    def _match_inputs(
        self, want: Canonical, have: Canonical, state: TemplateMatch
    ) -> TemplateMatch | None:
        if want.op in COMMUTATIVE and len(want.inputs) == 2:
            mark = state.mark()
            if self._match_all(want.inputs, have.inputs, state) is not None:
                return state
            state.back_to(mark)
            return self._match_all(want.inputs, (have.inputs[1], have.inputs[0]), state)
        return self._match_all(want.inputs, have.inputs, state)

    def _match_all(
        self, wanted: Sequence[Any], have: Sequence[Any], state: TemplateMatch
    ) -> TemplateMatch | None:
        current: TemplateMatch | None = state
        for expected, actual in zip(wanted, have, strict=True):
            current = self.match(expected, actual, current) if current is not None else None
        return current

    def _match_list(self, expected: Any, actual: Any, state: TemplateMatch) -> TemplateMatch | None:
        if not isinstance(actual, (tuple, list)) or len(actual) != len(expected):
            self._fail(
                state, Code.OP_MISMATCH, "the list has another length", actual, len(expected),
                len(actual) if isinstance(actual, (tuple, list)) else actual,
            )  # fmt: skip
            return None
        return self._match_all(tuple(expected), tuple(actual), state)

    def _match_number(
        self, expected: Any, actual: Any, state: TemplateMatch
    ) -> TemplateMatch | None:
        if isinstance(actual, (int, float)) and not isinstance(actual, bool):
            if isinstance(expected, float) and expected in self.captures:
                if self._capture(self.captures[expected], float(actual), state):
                    return state
            elif expected == actual:
                return state
        self._fail(state, Code.ATTR_MISMATCH, "another number", actual, expected, actual)
        return None

    def _bind(
        self, source: fx.Node, node: fx.Node, target: fx.Node, state: TemplateMatch
    ) -> TemplateMatch | None:
        name = source.meta["argument"]
        bound = state.bindings.get(name)
        if bound is not None:
            if self.view.strip(bound) is target:
                return state
            self._fail(
                state,
                Code.OP_MISMATCH,
                f"'{name}' is not the one used before",
                node,
                bound.name,
                target.name,
            )
            return None
        if dtype_of(source) != dtype_of(target):
            self._fail(
                state,
                Code.DTYPE_MISMATCH,
                f"'{name}' has another dtype",
                node,
                dtype_of(source),
                dtype_of(target),
            )
            return None
        shape = self._expected_shape(source)
        shaped = self.view.with_shape(target, shape)
        if shaped is None and _numel(shape) != _numel(shape_of(target)):
            self._fail(
                state,
                Code.SHAPE_MISMATCH,
                f"'{name}' has another shape",
                node,
                shape,
                shape_of(target),
            )
            return None
        state.bindings[name] = shaped if shaped is not None else node
        return state


def _numel(shape: Shape) -> Any:
    total: Any = 1
    for size in shape:
        total = total * size
    return sympy.expand(total) if isinstance(total, sympy.Basic) else total


def match_template(
    view: GraphView,
    template: Template,
    node: fx.Node,
    operands: Mapping[str, Any],
    *,
    tokens: sympy.Basic | None = None,
    static: Mapping[str, Any] | None = None,
    prebound: Mapping[str, fx.Node] | None = None,
) -> TemplateMatch | Mismatch:
    """Match `template`, traced for these operands, with `node` as its first output.

    operands: argument name -> a node (or list of nodes) whose shape and dtype the trace uses; they
    need not be the bound ones, and may be `Like`. prebound: arguments that must be these very
    values.
    """
    worst: Mismatch | None = None
    for level in levels_of(view):
        try:
            graph, output = trace(template, operands, tokens, static or {}, level)
        except (ValueError, RuntimeError, IndexError) as error:
            reason = Reason(
                Code.SHAPE_MISMATCH, f"{template.name} has no form at this shape: {error}"
            )
            return Mismatch(0, reason)
        matcher = Matcher(view, graph, template, tokens)
        state = TemplateMatch(bindings=dict(prebound or {}))
        result = output.args[0]
        first = result[0] if isinstance(result, (tuple, list)) else result
        found = matcher.match(first, node, state)
        if found is not None:
            return found
        if matcher.worst is not None and (worst is None or matcher.worst.depth > worst.depth):
            worst = matcher.worst
    return worst or Mismatch(
        0, Reason(Code.OP_MISMATCH, f"{node.name} does not end {template.name}")
    )

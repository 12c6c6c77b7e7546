"""A read-only view of one FX graph: canonical nodes, values through reshapes, users, mutations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k3fuse.rewriter.canonical import (
    Canonical,
    Operand,
    bound_args,
    canonical,
    dtype_of,
    op_of,
    overload,
    shape_of,
    value_of,
)
from k3fuse.rewriter.reasons import Refusal

T = TypeVar("T")

_ALIASING = frozenset({"reshape", "permute", "slice"})
# Of the ops that keep every element in place: those that may give new storage.
_COPYING = frozenset(
    {
        "aten.clone",
        "aten.contiguous",
        "aten.copy",
        "aten.lift_fresh_copy",
        "aten._reshape_copy",
        "aten.view_copy",
        "aten.reshape",
        "aten.flatten",
        "aten._unsafe_view",
        "aten._to_copy",
        "aten.to",
        "prims.convert_element_type",
    }
)
_VIEW_OPS = frozenset(
    {"aten.select", "aten.expand", "aten.as_strided", "aten.slice", "aten.diagonal"}
)


@dataclass(frozen=True)
class Mutation:
    """One node that writes in place, and the storage roots it writes."""

    node: fx.Node
    index: int
    roots: frozenset[fx.Node]


class GraphView:
    """Reads a graph; never edits it. All answers are cached, so it is made anew after an edit.

    groups: process group name -> size, where it is known ({"tp:0": 8}).
    """

    def __init__(self, graph: fx.Graph, groups: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self.groups = dict(groups or {})
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.index: dict[fx.Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self._canonical: dict[fx.Node, Canonical] = {}
        self._found: dict[tuple[type, fx.Node], Any] = {}
        # What patterns work out once for a whole graph, by a key of theirs.
        self.notes: dict[str, Any] = {}
        self.by_op: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            self.by_op.setdefault(op_of(node), []).append(node)
        self.shape_env: ShapeEnv | None = self._find_shape_env()
        self.mutations: list[Mutation] = [m for n in self.nodes if (m := self._mutation(n))]
        self._mutations_of: dict[fx.Node, list[Mutation]] = {}
        for mutation in self.mutations:
            for root in mutation.roots:
                self._mutations_of.setdefault(root, []).append(mutation)
        inputs = [*self.by_op.get("placeholder", ()), *self.by_op.get("get_attr", ())]
        # Index of the last input; every op stands behind it.
        self.last_input: int = max((self.index[n] for n in inputs), default=-1)
        self._anchors: dict[type, list[fx.Node]] = {}

    def _find_shape_env(self) -> ShapeEnv | None:
        for node in self.nodes:
            mode = getattr(value_of(node), "fake_mode", None)
            if mode is not None and mode.shape_env is not None:
                return mode.shape_env  # type: ignore[no-any-return]
        return None

    # --- single nodes -------------------------------------------------------------------------

    def canon(self, node: fx.Node) -> Canonical:
        """Return the cached canonical spelling."""
        found = self._canonical.get(node)
        if found is None:
            found = self._canonical[node] = canonical(node)
        return found

    def strip(self, node: Operand) -> Operand:
        """Go up through reshapes, no-op casts and copies to the node that made the elements."""
        while isinstance(node, fx.Node):
            spelled = self.canon(node)
            if spelled.op != "reshape" or not isinstance(spelled.inputs[0], fx.Node):
                return node
            node = spelled.inputs[0]
        return node

    def path(self, node: fx.Node, root: fx.Node) -> list[fx.Node]:
        """Return the reshape nodes from `node` up to, not including, `root`."""
        passed = []
        while node is not root and self.canon(node).op == "reshape":
            passed.append(node)
            node = self.canon(node).inputs[0]
        return passed

    def same(self, a: Operand, b: Operand) -> bool:
        """Whether two operands hold the same elements in the same order.

        A value cast twice to one dtype is one value.
        """
        a, b = self.strip(a), self.strip(b)
        if a is b:
            return True
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return False
        first, second = self.canon(a), self.canon(b)
        if first.op != "cast" or second.op != "cast" or first.attrs != second.attrs:
            return False
        source = self.strip(first.inputs[0])
        if not isinstance(source, fx.Node) or self.mutations_of(self.root(source)):
            return False  # written between the two casts, perhaps
        return source is self.strip(second.inputs[0])

    def is_weight(self, node: Operand) -> bool:
        """Whether a value is (a view of) a graph input or constant, not computed in the graph."""
        while isinstance(node, fx.Node):
            if node.op in ("placeholder", "get_attr"):
                return True
            spelled = self.canon(node)
            if spelled.op not in _ALIASING and spelled.op != "cast":
                return False
            node = spelled.inputs[0]
        return False

    # --- users --------------------------------------------------------------------------------

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Users of a value, looking through reshapes; in graph order."""
        found: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if user.op == "call_function" and self.canon(user).op == "reshape":
                    stack.append(user)
                else:
                    found[user] = None
        return sorted(found, key=self.index.__getitem__)

    def reshapes(self, node: fx.Node) -> list[fx.Node]:
        """Return all reshapes of a value, in graph order (the value itself first)."""
        found = [node]
        for current in found:
            found += [
                u
                for u in current.users
                if u.op == "call_function" and self.canon(u).op == "reshape"
            ]
        return sorted(set(found), key=self.index.__getitem__)

    def with_shape(self, node: fx.Node, shape: tuple[Any, ...]) -> fx.Node | None:
        """Return the earliest reshape of a value that has this shape, or None."""
        root = self.strip(node)
        candidates = self.reshapes(root)
        return next((n for n in candidates if shape_of(n) == shape), None)

    # --- concepts -----------------------------------------------------------------------------

    def find(self, concept: type[T], node: Operand) -> T | None:
        """Read a concept off a node (see recognise/), cached; None where it is something else.

        A concept that starts to fit and then fails raises Refusal inside `at`; `find` answers None
        then, and `miss` returns the reason.
        """
        if not isinstance(node, fx.Node):
            return None
        key = (concept, node)
        if key not in self._found:
            try:
                self._found[key] = concept.at(self, node)  # type: ignore[attr-defined]
            except Refusal as refusal:
                self._found[key] = refusal
        found = self._found[key]
        return None if isinstance(found, Refusal) else found

    def miss(self, concept: type[T], node: Operand) -> Refusal | None:
        """Return why a node that looked like the concept is not it."""
        self.find(concept, node)
        found = self._found.get((concept, node)) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Refusal) else None

    def producer(self, value: Operand, concept: type[T]) -> T | None:
        """Return the concept that makes this value, looking through reshapes."""
        return self.find(concept, self.strip(value))

    def each(self, concept: type[T]) -> Iterator[T]:
        """Yield every instance of a concept in graph order; `concept.anchors` lists op names."""
        anchors = self._anchors.get(concept)
        if anchors is None:
            names: tuple[str, ...] = concept.anchors  # type: ignore[attr-defined]
            anchors = [n for op in names for n in self.by_op.get(op, ())]
            self._anchors[concept] = anchors = sorted(anchors, key=self.index.__getitem__)
        for node in anchors:
            found = self.find(concept, node)
            if found is not None:
                yield found

    def misses(self, concept: type[T]) -> Iterator[tuple[fx.Node, Refusal]]:
        """Yield anchors that started to fit the concept and failed, with the reason."""
        for op in concept.anchors:  # type: ignore[attr-defined]
            for node in self.by_op.get(op, ()):
                refusal = self.miss(concept, node)
                if refusal is not None:
                    yield node, refusal

    # --- aliasing and mutation -----------------------------------------------------------------

    def copied_at(self, node: fx.Node) -> int | None:
        """Index of the first copy between a value and the node that made its elements, or None.

        A reader of the copy does not see what is written into the original behind it.
        """
        copies = [n for n in self.path(node, self.strip(node)) if op_of(n) in _COPYING]
        return min((self.index[n] for n in copies), default=None)

    def root(self, node: Operand) -> Operand:
        """Return the node that owns the storage, through every aliasing view."""
        while isinstance(node, fx.Node) and node.op == "call_function":
            name = op_of(node)
            if name in ("aten.clone", "aten.contiguous", "aten.copy"):
                return node
            spelled = self.canon(node)
            if spelled.op not in _ALIASING and name not in _VIEW_OPS:
                return node
            if not spelled.inputs or not isinstance(spelled.inputs[0], fx.Node):
                return node
            node = spelled.inputs[0]
        return node

    def mutations_of(self, root: fx.Node) -> list[Mutation]:
        """Writes into the storage that a node owns, in graph order."""
        return self._mutations_of.get(root, [])

    def _mutation(self, node: fx.Node) -> Mutation | None:
        target = overload(node) if node.op == "call_function" else None
        if target is None or not target._schema.is_mutable:
            return None
        args = bound_args(node)
        written: set[fx.Node] = set()
        for argument in target._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args.get(argument.name)
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(item, fx.Node):
                        written.add(self.root(item))
        return Mutation(node, self.index[node], frozenset(written))


__all__ = [
    "Canonical",
    "GraphView",
    "Mutation",
    "bound_args",
    "dtype_of",
    "op_of",
    "shape_of",
    "value_of",
]

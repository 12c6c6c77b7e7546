"""Sites: places in a graph that a pattern found, with everything the editor and report need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import sympy
from torch import fx

from k3fuse.rewriter.guards import GuardResult, Value
from k3fuse.rewriter.reasons import Reason
from k3fuse.rewriter.view import GraphView, op_of

Outcome = Literal["found", "refused", "near"]

# Builds a node from the op's results; the last argument maps a node to the one that stands for it
# after earlier replacements.
Build = Callable[[fx.Graph, list[fx.Node], Callable[[fx.Node], fx.Node]], fx.Node]
# Where an output of the site comes from afterwards: the op's i-th result, a node that already
# exists, or a node built from the results.
Source = int | fx.Node | Build


@dataclass(frozen=True)
class Output:
    """One value the rest of the graph reads from the site."""

    node: fx.Node
    source: Source


@dataclass(frozen=True)
class Reshaped:
    """An operand in another shape of the same elements; the editor inserts the view.

    sizes: for a view op, -1 for one symbolic size.
    """

    node: fx.Node
    sizes: tuple[int, ...]


@dataclass
class Replacement:
    """What takes a site's place: one op call.

    args, kwargs: nodes, Reshaped nodes, lists of those and literals, by the op's schema.
    outputs: every value read outside, and where it comes from.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Kernel:
    """The kernel that a policy picked. available: compiled for the target and usable now.

    hops: exchanges between ranks in its launches that the graph did not have. unread: bytes of the
    site's operands that this rank leaves to the others. built: variant -> what the workbench knows
    of it, by the names that `k3fuse kernels list` gives (grid, block, cluster; registers,
    spill_bytes, smem_bytes where it was compiled here).
    """

    name: str
    available: bool
    launches: int
    policy: str = ""
    hops: int = 0
    unread: int = 0
    built: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Read:
    """A weight that the op in a site's place reads. split, group: the leading rows of which each
    rank of the group reads an equal share (0: none); ranges: runs of bytes that this rank reads.

    bytes: that this rank reads, 0 where the size is not fixed.
    """

    weight: fx.Node
    bytes: int
    split: int = 0
    group: str = ""
    ranges: int = 1


@dataclass(frozen=True)
class Ahead:
    """An op takes weights of later ops as keyword arguments, and asks for them early.

    `prefetch` holds them, `prefetch_split` the split of each. most_bytes, most_ranges: of one call;
    it leaves out what is beyond. launches: that it makes more for it. group: of its exchange.
    against: why the policy leaves this call out, "" where it does not.
    """

    most_bytes: int
    most_ranges: int
    launches: int
    group: str
    against: str = ""


@dataclass
class Site:
    """One match.

    nodes: covered graph nodes in graph order. values: what the guards are evaluated on.
    operands: named operands for the pattern's replacement (nodes, lists of nodes, None).
    outputs: covered nodes that the rest of the graph may read. facts: the pattern's own record.
    outside_layers: the site belongs to no layer (the mix behind the last one).
    prefetched: weight and bytes of it that the op asks for early, on one rank.
    before, after: texts; pieces: keys of the report's graph pieces, "before" and "after";
    frames: model lines of the anchor, innermost last; lines: those of all its nodes.
    links: with sites that it is better off together with; parted: notes on those that do not hold.
    """

    pattern: str
    form: str
    anchor: fx.Node
    nodes: tuple[fx.Node, ...]
    operands: Mapping[str, Any]
    outputs: tuple[fx.Node, ...]
    values: Mapping[sympy.Symbol, Value]
    notes: tuple[str, ...] = ()
    facts: Any = None
    outside_layers: bool = False
    layer: int | None = None
    outcome: Outcome = "found"
    reasons: list[Reason] = field(default_factory=list)
    guards: list[GuardResult] = field(default_factory=list)
    kernel: Kernel | None = None
    prefetched: tuple[tuple[str, int], ...] = ()
    new_node: str = ""
    before: str = ""
    after: str = ""
    source: str = ""
    frames: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    pieces: dict[str, str] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list, repr=False, compare=False)
    parted: list[str] = field(default_factory=list)

    @property
    def within(self) -> Site | None:
        """The site whose op does this one's work, too; then this one has no op of its own."""
        return next((k.giver for k in self.links if k.absorbs and k.taker is self), None)

    @property
    def absorbed(self) -> list[Site]:
        """Sites whose work this one's op does, too."""
        return [k.taker for k in self.links if k.absorbs and k.giver is self]

    @property
    def own(self) -> tuple[fx.Node, ...]:
        """Its nodes without those of the sites that it has absorbed."""
        others = {node for site in self.absorbed for node in site.nodes}
        return tuple(node for node in self.nodes if node not in others)

    @property
    def prefetched_bytes(self) -> int:
        """Bytes that the op asks for ahead of their readers, on one rank."""
        return sum(size for _, size in self.prefetched)

    def operand_nodes(self) -> list[fx.Node]:
        """All operand nodes, lists flattened, without repeats, in order."""
        return list(dict.fromkeys(flatten_nodes(self.operands.values())))

    def refuse(self, *reasons: Reason) -> None:
        """Mark the site refused and keep why."""
        self.outcome = "refused"
        self.reasons.extend(reasons)

    def become(self, other: Site) -> None:
        """Take another form of the same place: its nodes, operands, values and kernel."""
        for name in _FORM:
            setattr(self, name, getattr(other, name))


# What differs between two forms of a site; the rest says where it is and what became of it.
_FORM = (
    "form", "anchor", "nodes", "operands", "outputs", "values", "notes", "facts", "guards",
    "kernel",
)  # fmt: skip


@dataclass(eq=False)
class Link(ABC):
    """Two accepted sites that are better off together: the taker reads what the giver makes.

    Each is right without the other, and either may be in several links. absorbs: the giver's op
    does the taker's work, too.
    """

    giver: Site
    taker: Site
    absorbs: ClassVar[bool]

    @abstractmethod
    def forms(self) -> tuple[Site, Site]:
        """Return the giver and the taker with it, from the forms that they have now; no edit.

        Raises Refusal where they cannot have it.
        """

    def decline(self, reason: Reason) -> None:
        """Note at both sites why they are not together."""
        for site, other in ((self.giver, self.taker), (self.taker, self.giver)):
            site.parted.append(f"apart from {other.pattern}: {reason.sentence}")


@dataclass(eq=False)
class HandOver(Link):
    """The taker has an op of its own and reads more of the giver's.

    make: see `forms`. What is handed over is a value of the graph, so either form is right without
    the other; beside it the giver's op may make results that the graph does not have (`Made`), by
    the keyword arguments `only`: without their reader they are left out.
    """

    make: Callable[[], tuple[Site, Site]]
    only: Mapping[str, Any] = field(default_factory=dict)
    absorbs: ClassVar[bool] = False

    def forms(self) -> tuple[Site, Site]:
        """Both with the hand-over."""
        return self.make()


@dataclass(eq=False)
class Absorption(Link):
    """The giver's op does the taker's work, too, so the taker's op falls away.

    make: the giver's form with all nodes, operands and outputs of both.
    """

    make: Callable[[], Site]
    absorbs: ClassVar[bool] = True

    def forms(self) -> tuple[Site, Site]:
        """The giver with both places; the taker as a part of it."""
        where, taker = self.giver.pattern, self.taker
        notes = (*taker.notes, f"done by the launches of {where}")
        return self.make(), replace(taker, form=f"{taker.form} in {where}", notes=notes)


@dataclass(frozen=True, eq=False, repr=False)
class Made:
    """A result of the op in another site's place that the graph did not have; an op's argument.

    index: of that op's results.
    """

    site: Site
    index: int

    def __repr__(self) -> str:
        return f"{self.site.pattern} result {self.index}"


@dataclass
class NearMiss:
    """A place that looked like the pattern and was not it, with the reason."""

    pattern: str
    anchor: fx.Node
    reason: Reason
    layer: int | None = None
    frames: list[str] = field(default_factory=list)
    pieces: dict[str, str] = field(default_factory=dict)


def flatten_nodes(values: Any) -> list[fx.Node]:
    """Nodes in nested lists, tuples and dict values, in order."""
    found: list[fx.Node] = []
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += flatten_nodes(value)
    return found


def in_order(nodes: Iterable[fx.Node], index: Mapping[fx.Node, int]) -> tuple[fx.Node, ...]:
    """Unique nodes in graph order."""
    return tuple(sorted(set(nodes), key=index.__getitem__))


_BETWEEN = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "getitem"})


def absorb_views(view: GraphView, site: Site) -> tuple[fx.Node, ...]:
    """Covered nodes with the views between them, and the views and casts that feed only them.

    A view between covered nodes is read by nothing else; one above them is no operand itself.
    """
    covered = set(site.nodes)
    operands = set(site.operand_nodes())
    verdicts: dict[fx.Node, bool] = {}

    def inside(node: fx.Node) -> bool:
        if node in covered:
            return True
        if node not in verdicts:
            verdicts[node] = False
            name = op_of(node)
            is_view = name in _BETWEEN or view.canon(node).op in ("reshape", "slice", "permute")
            if node.op == "call_function" and is_view and node.users:
                verdicts[node] = all(inside(u) for u in node.users)
        return verdicts[node]

    for node in list(covered):
        for user in node.users:
            inside(user)
    covered.update(n for n, ok in verdicts.items() if ok)
    frontier = list(covered)
    while frontier:
        for source in frontier.pop().all_input_nodes:
            if source in covered or source in operands or source.op != "call_function":
                continue
            plain = view.canon(source).op in ("reshape", "slice", "permute", "cast")
            if plain and all(u in covered for u in source.users):
                covered.add(source)
                frontier.append(source)
    return in_order(covered, view.index)

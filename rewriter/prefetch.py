"""Weights that a planned op asks for ahead of the ops that read them (option `prefetch`).

An op that exchanges rows with other ranks waits for them; what the next ops read can come into the
second-level cache meanwhile. No value depends on it, so a weight that is left out costs nothing but
the chance: everything that is not certain is left out, and the site's notes say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.pieces import label
from k3fuse.rewriter.plan import Unit
from k3fuse.rewriter.site import Ahead, Read, Replacement, Site
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView, op_of


def with_prefetch(
    view: GraphView, patterns: Sequence[Pattern], target: Target, planned: list[Unit]
) -> list[Unit]:
    """The units, where an op that can ask ahead names what the sites behind it read.

    Up to and with the next site that can ask itself, or that with which a call is full. Sites get
    notes, `prefetched`, and their kernels the launches. Each weight is named once, before its first
    reader. No edit.
    """
    named = {p.name: p for p in patterns}
    sites = sorted((s for unit in planned for s, _ in unit), key=lambda s: view.index[s.anchor])
    able = {id(s): named[s.pattern].ahead(s, target) for s in sites}
    taken: set[fx.Node] = set()
    chosen: dict[int, _Choice] = {}
    for place, site in enumerate(sites):
        limits = able[id(site)]
        if limits is None:
            continue
        choice = chosen[id(site)] = _Choice(view, site, limits, taken)
        if limits.against:
            choice.refuse("all weights", limits.against)
            continue
        for other in sites[place + 1 :]:
            choice.pass_to(other)
            reads = named[other.pattern].reads(other, target)
            if reads and not choice.reaches(other):
                break
            for read in reads:
                choice.offer(read)
            if able[id(other)] is not None or choice.left <= 0:
                break
    return [[(s, _named(s, r, chosen.get(id(s)))) for s, r in unit] for unit in planned]


@dataclass
class _Choice:
    """What one site's op asks for. taken: weights that some op asks for already."""

    view: GraphView
    site: Site
    limits: Ahead
    taken: set[fx.Node]
    reads: list[tuple[Read, int]] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    _passed: int = 0

    def __post_init__(self) -> None:
        self._passed = self.view.index[self.site.anchor]
        self._inside: set[fx.Node] = set(self.site.nodes)
        self._between: set[fx.Node] = set()

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return self.limits.most_bytes - sum(size for _, size in self.reads)

    def refuse(self, name: str, why: str) -> None:
        """Leave a weight out."""
        self.refused.setdefault(why, []).append(name)

    def pass_to(self, other: Site) -> None:
        """Note what ops in between read that no site covers."""
        here, self._passed = self._passed, self.view.index[other.anchor]
        self._inside.update(other.nodes)
        for node in self.view.nodes[here + 1 : self._passed]:
            if node not in self._inside:
                self._between.update(n for n in node.all_input_nodes if _is_input(n))

    def reaches(self, other: Site) -> bool:
        """Whether what is asked for is still there when `other` reads it.

        It is not where the ops in between read more than one call asks for.
        """
        between = sum(_bytes(n) for n in self._between - self.taken)
        if between <= self.limits.most_bytes:
            return True
        text = f"ops before it read {between} bytes of the graph's inputs"
        self.refuse(f"what {other.pattern} reads", text)
        return False

    def offer(self, read: Read) -> None:
        """Take the weight, or a part of it, or say why not."""
        if read.weight in self.taken:
            return
        why = self._against(read)
        if why:
            self.refuse(label(read.weight), why)
            return
        self.taken.add(read.weight)
        self.reads.append((read, min(read.bytes, self.left)))

    def _against(self, read: Read) -> str:
        view, node = self.view, read.weight
        if not _is_input(node):
            return "it is no input of the graph, but computed or a view"
        writers = [m.node for m in view.mutations_of(node)]
        writers += [u for u in node.users if op_of(u).startswith("auto_functionalized")]
        if writers:
            return f"{writers[0].name} may write it"
        if not read.bytes or not node.meta["val"].is_contiguous():
            return "its size is not fixed, or it is not contiguous"
        if node.meta["val"].device != self.site.anchor.meta["val"].device:
            return "it is on another device"
        if view.index[node] > view.index[self.site.nodes[0]]:
            return "it stands behind the op in the graph"
        if _first_read(view, node) < view.index[self.site.anchor]:
            return "it has been read before"
        if read.split and read.group != self.limits.group:
            return f"its rows are split over {read.group!r}, not over {self.limits.group!r}"
        if self.left <= 0:
            return f"the {self.limits.most_bytes} bytes of one call are full"
        if sum(r.ranges for r, _ in self.reads) + read.ranges > self.limits.most_ranges:
            return f"the {self.limits.most_ranges} ranges of one call are full"
        return ""


def _named(site: Site, replacement: Replacement, choice: _Choice | None) -> Replacement:
    """The op's call with what it asks for, and the site's record of it."""
    if choice is None:
        return replacement
    reads = choice.reads
    site.prefetched = tuple((label(read.weight), size) for read, size in reads)
    notes = [f"no prefetch of {', '.join(names)}: {why}" for why, names in choice.refused.items()]
    if not reads:
        site.notes = (*site.notes, *notes)
        return replacement
    parts = [
        f"{name} ({size} of {read.bytes} bytes)" if size < read.bytes else name
        for (read, size), (name, _) in zip(reads, site.prefetched, strict=True)
    ]
    site.notes = (*site.notes, f"prefetches {', '.join(parts)}", *notes)
    if site.kernel is not None:
        launches = site.kernel.launches + choice.limits.launches
        site.kernel = replace(site.kernel, launches=launches)
    more: dict[str, object] = {"prefetch": [read.weight for read, _ in reads]}
    if any(read.split for read, _ in reads):
        more["prefetch_split"] = [read.split for read, _ in reads]
    return replace(replacement, kwargs={**replacement.kwargs, **more})


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _bytes(node: fx.Node) -> int:
    """Bytes of an input; 0 where its size is not fixed."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()


def _first_read(view: GraphView, node: fx.Node) -> int:
    """Index of the first op that reads a value's elements, through views of it."""
    first, todo = len(view.nodes), [node]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and view.canon(user).op in (
                "reshape",
                "permute",
                "slice",
            ):
                todo.append(user)
            else:
                first = min(first, view.index[user])
    return first

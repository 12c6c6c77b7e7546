"""What a pattern author writes: how sites are found, which guards hold, what replaces them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import ClassVar

from k3fuse.rewriter.guards import Guard
from k3fuse.rewriter.site import Ahead, Kernel, Link, NearMiss, Read, Replacement, Site
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView


class Pattern(ABC):
    """One family of sites.

    name: stable, used on the command line and in JSON. guards: all of them, in the order they are
    asked. priority: higher takes contested nodes first. summary: one line for docs. optional: a
    layer can be whole without a site of it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    guards: ClassVar[tuple[Guard, ...]]
    priority: ClassVar[int] = 0
    optional: ClassVar[bool] = False

    @abstractmethod
    def find(self, view: GraphView) -> Iterator[Site | NearMiss]:
        """Yield every site and near miss, in graph order. Must not edit the graph."""

    @abstractmethod
    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        """Return the op call that takes the site's place. Must not edit the graph."""

    def factors(self) -> Mapping[str, str]:
        """What decides beside the graph, the options and the sources, by name, for cache keys."""
        return {}

    @abstractmethod
    def kernel(self, site: Site, target: Target) -> Kernel | None:
        """Return the kernel the policy picks for the site, or None where no row covers it."""

    def links(self, view: GraphView, found: Sequence[Site]) -> Iterator[Link]:
        """Yield pairs of accepted sites, one of them this pattern's, that are better off together.

        Must not edit the graph or the sites: the engine judges the new forms, and takes both or
        neither. A site may be in several links; a link's forms start from those it has then.
        """
        return iter(())

    def reads(self, site: Site, target: Target) -> Sequence[Read]:
        """Weights that the site's op reads, in its order; none that depend on a value."""
        return ()

    def ahead(self, site: Site, target: Target) -> Ahead | None:
        """What the site's op can ask for ahead of later ops; None where it takes no weights."""
        return None


def load_patterns() -> tuple[Pattern, ...]:
    """Instantiate every pattern registered under the `k3fuse.patterns` entry point group.

    Raises RuntimeError where two patterns carry one name.
    """
    found: dict[str, Pattern] = {}
    # While an installation is replaced, pip keeps the old record beside the new one.
    entries = {(e.name, e.value): e for e in entry_points(group="k3fuse.patterns")}
    for _, entry in sorted(entries.items()):
        for pattern_class in entry.load():
            if pattern_class.name in found:
                raise RuntimeError(
                    f"pattern name {pattern_class.name!r} is registered twice "
                    f"(entry point {entry.name!r}); rename one"
                )
            found[pattern_class.name] = pattern_class()
    return tuple(found.values())

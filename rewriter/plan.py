"""What takes the place of every accepted site, and the edits; linked sites stay together.

A unit is a chain of linked sites, most often one site. Where one of them cannot be replaced in its
form with a link, that link is left out, and what is left of the chain is planned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from k3fuse.rewriter.edit import EditError, Editor
from k3fuse.rewriter.links import Chain, Linker, chain_of
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Reason, Refusal
from k3fuse.rewriter.record import new_nodes
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import HandOver, Replacement, Site
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView

# Sites that have an op of their own, givers first.
Unit = list[tuple[Site, Replacement]]


class Planner:
    """Makes units of accepted sites; all of them before the first edit."""

    def __init__(
        self,
        view: GraphView,
        patterns: Sequence[Pattern],
        target: Target,
        editor: Editor,
        linker: Linker,
    ) -> None:
        self.view, self.target, self.editor, self.linker = view, target, editor, linker
        self.patterns = {p.name: p for p in patterns}

    def units(self, sites: Iterable[Site]) -> list[Unit]:
        """The units of these sites, in order; a site that cannot be replaced is refused."""
        made: list[Unit] = []
        done: set[int] = set()
        for site in sites:
            if id(site) not in done:
                chain = chain_of(site)
                done |= {id(s) for s in chain}
                made += self._units_of(chain)
        return made

    def _units_of(self, chain: Chain) -> list[Unit]:
        try:
            return [self._unit(chain)]
        except (Refusal, EditError) as error:
            if len(chain) > 1:
                return self.parted(chain, self._objection)
            chain[0].refuse(error.reason)
            return []

    def parted(self, chain: Chain, objection: Callable[[Chain], Reason | None]) -> list[Unit]:
        """The units of a chain without the links that `objection` has something against."""
        self.linker.part(chain, objection)
        return self.units(chain)

    def with_values(
        self, wrong: Callable[[Unit], Reason | None]
    ) -> Callable[[Chain], Reason | None]:
        """What a chain has against it: it cannot be planned, or `wrong` says why not."""

        def objection(chain: Chain) -> Reason | None:
            return self._objection(chain) or wrong(self._unit(chain))

        return objection

    def _objection(self, chain: Chain) -> Reason | None:
        try:
            self._unit(chain)
        except (Refusal, EditError) as error:
            return error.reason
        return None

    def _unit(self, chain: Chain) -> Unit:
        """Raises Refusal or EditError where a site of it cannot be replaced."""
        unit = [(s, self._replacement(s)) for s in chain if s.within is None]
        for member, replacement in unit if len(chain) > 1 else ():
            self.editor.check(member, replacement)
        return unit

    def _replacement(self, site: Site) -> Replacement:
        return self.patterns[site.pattern].replacement(site, self.view, self.target)


def covered(unit: Unit) -> list[Site]:
    """The sites of a unit, with those whose work another one's op does."""
    return [s for site, _ in unit for s in (site, *site.absorbed)]


def same_values(planner: Planner, planned: list[Unit], report: Report) -> list[Unit]:
    """The units whose ops give the values of their nodes; the other sites are refused."""
    from k3fuse.rewriter.values import ValueCheck

    check, kept = ValueCheck(planner.view), []

    def wrong(unit: Unit) -> Reason | None:
        return next((r for pair in unit if (r := check.reason(*pair, unit)) is not None), None)

    todo, sites = planned[::-1], sum(len(covered(unit)) for unit in planned)
    while todo:
        unit = todo.pop()
        reason = wrong(unit)
        chain = chain_of(unit[0][0])
        if reason is None:
            kept.append(unit)
        elif len(chain) > 1:
            todo += planner.parted(chain, planner.with_values(wrong))[::-1]
        else:
            chain[0].refuse(reason)
    held = sum(len(covered(unit)) for unit in kept)
    report.value_runs = {"sites": sites, "runs": check.runs, "kept": held}
    return kept


def edit(editor: Editor, planned: Iterable[Unit]) -> dict[int, tuple[fx.Node, ...]]:
    """Replace every planned site; id of each -> its new nodes."""
    made = {}
    for unit in planned:
        for site, replacement in unit:
            if site.outcome != "found":
                continue  # it reads what there is not
            done = len(editor.events)
            try:
                call = editor.replace(site, replacement)
            except EditError as error:
                _leave(editor, site, error.reason)
                continue
            inserted = [e.node for e in editor.events[done:] if e.kind == "inserted"]
            new = new_nodes(call, inserted)
            for place in (site, *site.absorbed):
                place.new_node = call.name
                made[id(place)] = new
    return made


def _leave(editor: Editor, site: Site, reason: Reason) -> None:
    """A site that could not be replaced stays, and so do those that read what its op makes."""
    site.refuse(reason)
    for link in site.links:
        link.decline(reason)
        if link.giver is site:
            if link.taker.outcome == "found":
                _leave(editor, link.taker, reason)
        elif isinstance(link, HandOver) and link.only and link.giver.outcome == "found":
            editor.reduce(link.giver, link.only)

"""What takes the place of every accepted site, and the edits; pairs of sites stay together.

A unit is one site, or the giver and the taker of a hand-over. Where either of the two cannot be
replaced in its form with the hand-over, both take their forms without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from k3fuse.rewriter.edit import EditError, Editor
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.record import new_nodes
from k3fuse.rewriter.report import Report
from k3fuse.rewriter.site import HandOver, Replacement, Site, absorb_views
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView

Unit = list[tuple[Site, Replacement]]


def join(
    view: GraphView,
    patterns: Sequence[Pattern],
    report: Report,
    judge: Callable[[Site], None],
) -> None:
    """Let accepted sites hand over to each other where both forms with it hold, too.

    judge: asks guards and safety of a site, as of every site that was found.
    """
    found = report.found
    owner = {n: s for s in found for n in s.nodes if not is_plain_view(view, n)}
    for pattern in patterns:
        for pair in pattern.hand_overs(view, found):
            objection = _objection(view, pair, owner, judge)
            if objection is None:
                pair.agree()
            else:
                pair.decline(objection)


def _objection(
    view: GraphView, pair: HandOver, owner: dict[fx.Node, Site], judge: Callable[[Site], None]
) -> Reason | None:
    """Why two sites cannot take their forms with a hand-over."""
    taken: set[fx.Node] = set()
    for site, form in ((pair.giver, pair.gives), (pair.taker, pair.takes)):
        form.layer = site.layer
        form.nodes = absorb_views(view, form)
        judge(form)
        if form.reasons:
            return form.reasons[0]
        computing = {n for n in form.nodes if not is_plain_view(view, n)}
        others = (n for n in computing if owner.get(n, site) not in (pair.giver, pair.taker))
        for node in (*(computing & taken), *others):
            text = f"{node.name} belongs to another site"
            return Reason(Code.SHADOWED_BY, text, (node.name,))
        taken |= computing
    return None


def is_plain_view(view: GraphView, node: fx.Node) -> bool:
    """Whether a node computes nothing: two sites may share it."""
    return view.canon(node).op in ("reshape", "permute", "slice", "cast")


class Planner:
    """Makes units of accepted sites; all of them before the first edit."""

    def __init__(
        self, view: GraphView, patterns: Sequence[Pattern], target: Target, editor: Editor
    ) -> None:
        self.view, self.target, self.editor = view, target, editor
        self.patterns = {p.name: p for p in patterns}

    def units(self, sites: Iterable[Site]) -> list[Unit]:
        """The units of these sites, in order; a site that cannot be replaced is refused."""
        made: list[Unit] = []
        done: set[int] = set()
        for site in sites:
            if id(site) not in done:
                pair = site.hand_over
                done |= {id(s) for s in ((pair.giver, pair.taker) if pair else (site,))}
                made += self._units_of(site)
        return made

    def _units_of(self, site: Site) -> list[Unit]:
        pair = site.hand_over
        if pair is None:
            try:
                return [[(site, self._replacement(site))]]
            except Refusal as refusal:
                site.refuse(refusal.reason)
                return []
        try:
            unit = [(s, self._replacement(s)) for s in (pair.giver, pair.taker)]
            for member, replacement in unit:
                self.editor.check(member, replacement)
        except (Refusal, EditError) as error:
            return self.parted(pair, error.reason)
        return [unit]

    def parted(self, pair: HandOver, reason: Reason) -> list[Unit]:
        """The units of a pair without its hand-over."""
        pair.part(reason)
        return self.units([pair.giver, pair.taker])

    def _replacement(self, site: Site) -> Replacement:
        return self.patterns[site.pattern].replacement(site, self.view, self.target)


def same_values(planner: Planner, planned: list[Unit], report: Report) -> list[Unit]:
    """The units whose ops give the values of their nodes; the other sites are refused."""
    from k3fuse.rewriter.values import ValueCheck

    check, kept = ValueCheck(planner.view), []
    todo, sites = planned[::-1], sum(map(len, planned))
    while todo:
        unit = todo.pop()
        reason = next((r for pair in unit if (r := check.reason(*pair, unit)) is not None), None)
        site = unit[0][0]
        if reason is None:
            kept.append(unit)
        elif site.hand_over is not None:
            todo += planner.parted(site.hand_over, reason)[::-1]
        else:
            site.refuse(reason)
    report.value_runs = {"sites": sites, "runs": check.runs, "kept": sum(map(len, kept))}
    return kept


def edit(editor: Editor, planned: Iterable[Unit]) -> dict[int, tuple[fx.Node, ...]]:
    """Replace every planned site; id of each -> its new nodes."""
    made = {}
    for unit in planned:
        for site, replacement in unit:
            done = len(editor.events)
            try:
                call = editor.replace(site, replacement)
            except EditError as error:
                site.refuse(error.reason)
                _alone(editor, site, error.reason)
                break  # a giver's taker reads what there is not
            site.new_node = call.name
            inserted = [e.node for e in editor.events[done:] if e.kind == "inserted"]
            made[id(site)] = new_nodes(call, inserted)
    return made


def _alone(editor: Editor, site: Site, reason: Reason) -> None:
    """The other site of a hand-over stays without its partner, which could not be replaced."""
    pair = site.hand_over
    if pair is None:
        return
    pair.decline(reason)
    if site is pair.giver:
        pair.taker.refuse(reason)
    elif pair.only:
        editor.reduce(pair.giver, pair.only)

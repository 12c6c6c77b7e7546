"""Which accepted sites stand together: a router hands rows to experts, experts do an AttnRes, too.

Sites that links connect are a chain. A link is taken where the forms of both its sites with it hold
as every site does; one that does not hold, then or later, is left out of its chain, and the others
stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx

from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason, Refusal
from k3fuse.rewriter.site import Link, Site, absorb_views
from k3fuse.rewriter.view import GraphView

Chain = list[Site]


def is_plain_view(view: GraphView, node: fx.Node) -> bool:
    """Whether a node computes nothing: two sites may share it."""
    return view.canon(node).op in ("reshape", "permute", "slice", "cast")


def chain_of(site: Site) -> Chain:
    """The sites that a site stands together with, givers before their takers."""
    found = {id(site): site}
    todo = [site]
    while todo:
        for link in todo.pop().links:
            for other in (link.giver, link.taker):
                if id(other) not in found:
                    found[id(other)] = other
                    todo.append(other)
    ordered: Chain = []
    while found:
        waiting = {id(k.taker) for s in found.values() for k in s.links if id(k.giver) in found}
        ready = next(i for i in found if i not in waiting)
        ordered.append(found.pop(ready))
    return ordered


class Linker:
    """Takes links, and takes them back.

    judge: asks guards and safety of a site, as of every site that was found.
    """

    def __init__(
        self, view: GraphView, found: Iterable[Site], judge: Callable[[Site], None]
    ) -> None:
        self.view, self.judge = view, judge
        self._owner: dict[fx.Node, Site] = {}
        # By the site's id: the form without a link.
        self._alone: dict[int, Site] = {}
        self._taken: list[Link] = []
        for site in found:
            self._own(site)

    def join(self, patterns: Sequence[Pattern], found: Sequence[Site]) -> None:
        """Take every link that a pattern proposes and that holds; notes say why one does not."""
        for pattern in patterns:
            for link in pattern.links(self.view, found):
                reason = self._take(link)
                if reason is not None:
                    link.decline(reason)

    def part(self, chain: Chain, objection: Callable[[Chain], Reason | None]) -> None:
        """Leave out the links of a chain with which `objection` has something against it."""
        links = [k for k in self._taken if any(k.giver is s for s in chain)]
        kept: list[Link] = []
        failed: list[tuple[Link, Reason]] = []
        for link in links:
            reason = self._again(chain, [*kept, link]) or objection(chain_of(link.giver))
            if reason is None:
                kept.append(link)
            else:
                failed.append((link, reason))
        self._again(chain, kept)
        for link, reason in failed:
            link.decline(reason)

    def _again(self, chain: Chain, links: Sequence[Link]) -> Reason | None:
        """Give a chain these links and no others; why the last one does not hold."""
        for site in chain:
            self._taken = [k for k in self._taken if k.giver is not site]
            site.links.clear()
            self._become(site, self._alone[id(site)])
        reason = None
        for link in links:
            reason = self._take(link)
        return reason

    def _take(self, link: Link) -> Reason | None:
        """Both sites get their forms with the link; or why they do not."""
        found = self._forms(link)
        if isinstance(found, Reason):
            return found
        for site, form in zip((link.giver, link.taker), found, strict=True):
            self._alone.setdefault(id(site), replace(site))
            self._become(site, form)
            site.links.append(link)
        if link.absorbs:
            self._own(link.giver)
        self._taken.append(link)
        return None

    def _forms(self, link: Link) -> tuple[Site, Site] | Reason:
        giver, taker = link.giver, link.taker
        names = (giver.anchor.name, taker.anchor.name)
        if giver.within or taker.within or (link.absorbs and taker.links):
            return Reason(Code.SHADOWED_BY, "another op does the work of one of the two", names)
        if any(giver is s for s in _behind(taker)):
            return Reason(Code.INTERPOSED_OP, "each would read what the other makes", names)
        try:
            gives, takes = link.forms()
        except Refusal as refusal:
            return refusal.reason
        judged = [(giver, gives)] if link.absorbs else [(giver, gives), (taker, takes)]
        taken: set[fx.Node] = set()
        for site, form in judged:
            form.layer = site.layer
            form.nodes = absorb_views(self.view, form)
            self.judge(form)
            if form.reasons:
                return form.reasons[0]
            computing = self._computing(form)
            others = (
                n for n in computing
                if all(self._owner.get(n, site) is not s for s in (giver, taker))
            )  # fmt: skip
            for node in (*(computing & taken), *others):
                text = f"{node.name} belongs to another site"
                return Reason(Code.SHADOWED_BY, text, (node.name,))
            taken |= computing
        if link.absorbs and gives.kernel is not None:
            said = f"in the launches of {giver.pattern}"
            takes.kernel = replace(
                gives.kernel, launches=0, policy=said, hops=0, unread=0, built={}
            )
        return gives, takes

    def _become(self, site: Site, form: Site) -> None:
        for node in self._computing(site):
            if self._owner.get(node) is site:
                del self._owner[node]
        site.become(form)
        self._own(site)

    def _own(self, site: Site) -> None:
        self._owner.update(dict.fromkeys(self._computing(site), site))

    def _computing(self, site: Site) -> set[fx.Node]:
        return {n for n in site.nodes if not is_plain_view(self.view, n)}


def _behind(site: Site) -> list[Site]:
    """The sites that read, through links, what a site makes."""
    found = [k.taker for k in site.links if k.giver is site]
    for other in found:
        found += [k.taker for k in other.links if k.giver is other]
    return found

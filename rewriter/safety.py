"""Whether taking a site's nodes out of the graph can change anything else.

Four questions, each answered with a reason: is an inner value read outside, does something between
the site's nodes write what they read, would a view keep pointing at what went away, and can the
site be one node at all (no path leaves it and comes back).
"""

from __future__ import annotations

from torch import fx

from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.site import Site
from k3fuse.rewriter.view import GraphView


def insertion_index(site: Site, view: GraphView) -> int:
    """Index of the node the fused op goes behind: the last operand, or what precedes the site.

    Not higher up, so that a write before the whole site stays before the op.
    """
    before = view.index[site.nodes[0]] - 1
    return max([*(view.index[n] for n in site.operand_nodes()), view.last_input, before])


def check(site: Site, view: GraphView) -> list[Reason]:
    """Return every reason why the site must stay as it is (empty: safe to replace)."""
    missing = [n.name for n in (*site.outputs, *site.operand_nodes()) if n.meta.get("val") is None]
    if missing:
        return [
            Reason(
                Code.META_MISSING,
                f"no fake value on {', '.join(missing[:3])}",
                tuple(missing),
                expected="meta['val']",
                actual="nothing",
            )
        ]
    return [*_escapes(site, view), *_mutations(site, view), *_returns(site, view)]


def _recomputable(site: Site, view: GraphView) -> set[fx.Node]:
    """Inner nodes that only reshape, slice or widen operands or weights: cheap to leave behind."""
    operands = {view.strip(n) for n in site.operand_nodes()} | set(site.operand_nodes())
    found: set[fx.Node] = set()
    for node in site.nodes:
        spelled = view.canon(node)
        if spelled.op not in ("reshape", "permute", "slice", "cast"):
            continue
        source = spelled.inputs[0]
        if source in operands or source in found or view.is_weight(source):
            found.add(node)
    return found


def _escapes(site: Site, view: GraphView) -> list[Reason]:
    inner, outputs = set(site.nodes), set(site.outputs)
    spared = _recomputable(site, view)
    reasons = []
    for node in site.nodes:
        if node in outputs or node in spared:
            continue
        outside = [u for u in node.users if u not in inner]
        if outside:
            reader = "the graph's output" if outside[0].op == "output" else outside[0].name
            reasons.append(
                Reason(
                    Code.USER_ESCAPES,
                    f"{node.name} also feeds {reader}",
                    (node.name, outside[0].name),
                    expected="read inside the site only",
                    actual=", ".join(u.name for u in outside[:3]),
                )
            )
    return reasons


def _mutations(site: Site, view: GraphView) -> list[Reason]:
    if not view.mutations:
        return []
    inner = set(site.nodes)
    low = view.index[site.nodes[0]]
    high = max(view.index[site.nodes[-1]], insertion_index(site, view))
    outside = {i for n in site.nodes for i in n.all_input_nodes if i not in inner}
    read = {view.root(n) for n in [*outside, *site.operand_nodes()]}
    since: dict[fx.Node, int] = {}
    for node in outside:
        copied = view.copied_at(node)
        source = view.root(view.strip(node))
        if copied is not None and isinstance(source, fx.Node):
            # The op may read the original in the copy's place.
            since[source] = min(copied, since.get(source, copied))
            read.add(source)
    made = {view.root(n) for n in site.nodes} - read
    below = [u for o in site.outputs for u in o.users if u not in inner and view.index[u] <= high]
    passed = [m for m in view.mutations if low <= m.index <= high and m.node not in inner]
    if passed and any(view.index[u] <= insertion_index(site, view) for u in below):
        # Such a reader moves behind the op, past the write.
        names = (passed[0].node.name, below[0].name)
        sentence = f"{names[0]} writes between the site and {names[1]}, which reads its output"
        return [
            Reason(Code.MUTATION_BETWEEN, sentence, names, "no write inside the site", names[0])
        ]
    for mutation in (m for m in view.mutations if m.node in inner):
        if outer := mutation.roots - made:
            # An in-place collective: its operand's other readers would see the old value.
            root = min(outer, key=view.index.__getitem__)
            names = (mutation.node.name, root.name)
            sentence = f"{names[0]} writes {names[1]} in place, and the site would not"
            return [Reason(Code.ALIAS_RISK, sentence, names, "no write in place", names[0])]
    found = {
        (m.index, root): m
        for root in read | made
        for m in view.mutations_of(root)
        if m.node not in inner
    }
    reasons = []
    for (index, root), mutation in sorted(found.items(), key=lambda item: item[0][0]):
        names = (mutation.node.name, root.name)
        if root in made:
            sentence = f"{names[0]} writes into {names[1]}, whose storage the site owns"
            expected = "no write into the site's values"
            reasons.append(Reason(Code.ALIAS_RISK, sentence, names, expected, names[0]))
        elif min(low, since.get(root, low)) <= index <= high:
            sentence = f"{names[0]} writes {names[1]} between nodes that read it"
            expected = "no write inside the site"
            reasons.append(Reason(Code.MUTATION_BETWEEN, sentence, names, expected, names[0]))
    return reasons


def _returns(site: Site, view: GraphView) -> list[Reason]:
    """Refuse where an operand depends on an output through nodes outside the site."""
    last = insertion_index(site, view)
    inner = set(site.nodes)
    frontier = [
        u for o in site.outputs for u in o.users if u not in inner and view.index[u] <= last
    ]
    seen: set[fx.Node] = set(frontier)
    operands = set(site.operand_nodes())
    while frontier:
        node = frontier.pop()
        if node in operands:
            return [
                Reason(
                    Code.INTERPOSED_OP,
                    f"{node.name} is computed from the site's output and read by the site",
                    (node.name,),
                    expected="operands that do not depend on the site",
                    actual=node.name,
                )
            ]
        for user in node.users:
            if user not in seen and user not in inner and view.index[user] <= last:
                seen.add(user)
                frontier.append(user)
    return []

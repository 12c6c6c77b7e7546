"""Which graph is number i of a seed, and what the property says about it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from check import FAMILIES, Graph, Unbuildable, Verdict, examine, groups, healthy
from defects import CATALOGUE, Defect
from edits import EDITS

# Graphs that share one traced module: as declared, then with defects put into the graph.
SHARED = 32
# Several defects at once: a refusal may then be about the neighbour of the place that is wrong.
ALWAYS = frozenset({"OP_MISMATCH", "USER_ESCAPES", "SHAPE_MISMATCH"})


@dataclass
class Case:
    """Graph number `number` of a seed, its catalogued defects, and the verdict once examined."""

    number: int
    graph: Graph
    declared: tuple[Defect, ...] = ()
    verdict: Verdict = field(default_factory=lambda: Verdict("unbuildable"))
    problem: str = ""


def _pick(rng: random.Random, family: str, count: int, turn: int) -> list[Defect]:
    """Defects of different knobs. Each of the family's comes first in its turn."""
    mine = [d for d in CATALOGUE if family in d.families]
    others = rng.sample(mine, len(mine))
    chosen: list[Defect] = []
    for defect in [mine[turn % len(mine)], *others]:
        if len(chosen) < count and not any(set(d.knobs) & set(defect.knobs) for d in chosen):
            chosen.append(defect)
    return chosen


def declared(family: str, seed: int, chosen: Iterable[Defect]) -> Graph:
    """The family with healthy knobs of this seed and the defects' own."""
    rng = random.Random(seed)
    knobs, level = healthy(family, rng)
    chosen = tuple(chosen)
    for defect in chosen:
        knobs.update(defect.knobs)
        if defect.kind == "group":
            knobs["group"] = groups()[0]
    other = groups()[1]
    knobs = {k: other if k.endswith("_group") and v == "other" else v for k, v in knobs.items()}
    return Graph(family, knobs, seed, level, tuple(d.name for d in chosen))


def spelled(family: str, knobs: dict[str, Any], seed: int = 0) -> Graph:
    """The healthy graph of a seed on one rank with these knobs set."""
    return Graph(family, {**declared(family, seed, ()).knobs, "group": "", **knobs}, seed, "aot")


def case(seed: int, number: int, shared: int = SHARED) -> Case:
    """Graph `number`: family in turn, 0 to 2 catalogued defects, then 0 to 2 edits of the graph."""
    base, variant = divmod(number, shared)
    rng = random.Random(f"{seed} {base}")
    turn, which = divmod(base, len(FAMILIES))
    family = list(FAMILIES)[which]
    chosen = _pick(rng, family, rng.choice((0, 0, 1, 1, 1, 2)), turn)
    graph = declared(family, rng.randrange(1 << 30), chosen)
    if variant:
        count = min(rng.choice((1, 1, 2)), 3 - len(chosen))
        edits = random.Random(f"{seed} {number}").choices(list(EDITS), k=count)
        graph.edits, graph.edit_seed = tuple(edits), number
    return Case(number, graph, tuple(chosen))


def judge(found: Case) -> str:
    """What is wrong with the verdict; "" where the property holds."""
    verdict, defects = found.verdict, found.declared
    if verdict.outcome == "crashed":
        return f"crash: {verdict.fault}"
    if verdict.fault:
        return f"false accept: {verdict.fault}"
    if found.graph.edits:
        return ""
    if not defects:
        return "" if verdict.outcome == "rewritten" else f"missed control: {sorted(verdict.codes)}"
    allowed = {c for d in defects for c in d.codes}
    if len(defects) > 1:
        allowed |= ALWAYS
    if found.graph.level == "dynamic":
        allowed.add("USER_ESCAPES")  # of a size that make_fx reads off an inner value
    if not verdict.codes <= allowed:
        return f"wrong code: {sorted(verdict.codes - allowed)}"
    if len(defects) > 1:
        return ""
    if defects[0].meaning == "changed" and verdict.outcome == "rewritten":
        # Of two sites, the one without the defect may be taken.
        return "" if found.graph.family == "two_blocks" else "false accept: declared as changed"
    if verdict.outcome == "absent" and "" not in allowed:
        return "wrong code: no reason at all"
    return ""


def examined(seed: int, number: int, shared: int = SHARED) -> Case:
    """Draw, examine and judge one graph; the outcome is "unbuildable" where there is none."""
    found = case(seed, number, shared)
    try:
        found.verdict = examine(found.graph, composed=number % 4 == 0)
    except Unbuildable:
        return found
    found.problem = judge(found)
    return found

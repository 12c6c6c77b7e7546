"""What an op asks for ahead: order, cap, ranges, and each reason to leave a weight out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from build import Hand
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.plan import Unit
from k3fuse.rewriter.prefetch import with_prefetch
from k3fuse.rewriter.site import Ahead, Kernel, Read, Replacement, Site
from k3fuse.rewriter.target import Target
from k3fuse.rewriter.view import GraphView

aten = torch.ops.aten
SIZE = 64 * 64 * 2  # bytes of a weight


class Stub(Pattern):
    """Sites are made by the tests: facts are what the site reads, and what it can ask for."""

    summary: ClassVar[str] = ""
    guards: ClassVar[tuple[Any, ...]] = ()

    def find(self, view: GraphView) -> Any:
        return iter(())

    def replacement(self, site: Site, view: GraphView, target: Target) -> Replacement:
        raise AssertionError("the tests plan themselves")

    def kernel(self, site: Site, target: Target) -> Kernel | None:
        return None

    def reads(self, site: Site, target: Target) -> Sequence[Read]:
        found: list[Read] = site.facts[0]
        return found

    def ahead(self, site: Site, target: Target) -> Ahead | None:
        found: Ahead | None = site.facts[1]
        return found


class Asking(Stub):
    name: ClassVar[str] = "asking"


class Reading(Stub):
    name: ClassVar[str] = "reading"


LIMITS = Ahead(most_bytes=4 * SIZE, most_ranges=4, launches=1, group="tp")


class Chain:
    """A graph of sites in a row, one op each."""

    def __init__(self) -> None:
        self.hand = Hand()
        self.row = self.hand.input("x", 2, 64)
        self.sites: list[Site] = []

    def weight(self, name: str, *shape: int) -> fx.Node:
        return self.hand.input(name, *(shape or (64, 64)))

    def op(self, *weights: fx.Node) -> fx.Node:
        """An op that no site covers."""
        self.row = self.hand.call(aten.mm.default, self.row, weights[0])
        return self.row

    def site(self, ahead: Ahead | None = None, reads: Sequence[Read] = (), op: Any = None) -> Site:
        node = op or self.hand.call(aten.relu.default, self.row)
        self.row = node
        pattern = Reading.name if ahead is None else Asking.name
        kernel = Kernel("stub", True, 2)
        made = Site(pattern, "", node, (node,), {}, (node,), {}, facts=(list(reads), ahead))
        made.kernel = kernel
        self.sites.append(made)
        return made

    def read(self, name: str, **more: Any) -> Site:
        """A site that reads a weight of its own."""
        return self.reader(self.weight(name), **more)

    def reader(self, weight: fx.Node, **more: Any) -> Site:
        node = self.hand.call(aten.mm.default, self.row, weight)
        more.setdefault("bytes", SIZE)
        return self.site(reads=[Read(weight, **more)], op=node)

    def plan(self) -> list[dict[str, Any]]:
        view = self.hand.view(self.row)
        units: list[Unit] = [
            [(s, Replacement(aten.relu.default, (), {"target": "t"}, ()))] for s in self.sites
        ]
        made = with_prefetch(view, (Asking(), Reading()), Target.reference(), units)
        assert [s for unit in made for s, _ in unit] == self.sites
        return [r.kwargs for unit in made for _, r in unit]


def names(kwargs: dict[str, Any]) -> list[str]:
    return [n.name for n in kwargs.get("prefetch", ())]


def test_the_sites_up_to_the_next_that_asks() -> None:
    chain = Chain()
    weights = [chain.weight(f"w{i}") for i in range(4)]
    first = chain.site(LIMITS)
    chain.site()
    for weight in weights[:2]:
        chain.reader(weight)
    second = chain.site(LIMITS, [Read(weights[2], SIZE)])
    third = chain.reader(weights[3])
    plain = [s.kernel for s in chain.sites]
    kwargs = chain.plan()
    assert [names(k) for k in kwargs] == [["w0", "w1", "w2"], [], [], [], ["w3"], []]
    assert [k["target"] for k in kwargs] == ["t"] * 6
    assert not any("prefetch_split" in k for k in kwargs)
    assert first.prefetched == (("w0", SIZE), ("w1", SIZE), ("w2", SIZE))
    assert (first.prefetched_bytes, second.prefetched_bytes) == (3 * SIZE, SIZE)
    launches = [s.kernel.launches - p.launches for s, p in zip(chain.sites, plain, strict=True)]
    assert launches == [1, 0, 0, 0, 1, 0]
    assert first.notes == ("prefetches w0, w1, w2",)
    assert third.notes == ()


def test_the_cap_cuts_the_last_weight_and_says_so() -> None:
    chain = Chain()
    weights = [chain.weight(f"w{i}") for i in range(3)]
    site = chain.site(Ahead(SIZE + 100, 4, 1, "tp"))
    chain.site(reads=[Read(weight, SIZE) for weight in weights])
    chain.reader(chain.weight("beyond"))
    assert names(chain.plan()[0]) == ["w0", "w1"]
    assert site.prefetched == (("w0", SIZE), ("w1", 100))
    assert site.notes == (
        f"prefetches w0, w1 (100 of {SIZE} bytes)",
        f"no prefetch of w2: the {SIZE + 100} bytes of one call are full",
    )


def test_split_rows_are_named_and_take_ranges() -> None:
    chain = Chain()
    weights = [chain.weight(f"w{i}") for i in range(3)]
    site = chain.site(Ahead(4 * SIZE, 3, 1, "tp"))
    chain.reader(weights[0], bytes=SIZE // 8, split=64, group="tp")
    chain.reader(weights[1], bytes=SIZE // 2, split=32, group="tp", ranges=2)
    chain.reader(weights[2])
    kwargs = chain.plan()[0]
    assert (names(kwargs), kwargs["prefetch_split"]) == (["w0", "w1"], [64, 32])
    assert site.notes[1:] == ("no prefetch of w2: the 3 ranges of one call are full",)


def computed(chain: Chain, weight: fx.Node) -> fx.Node:
    return chain.hand.call(aten.mul.Tensor, weight, 2.0)


def viewed(chain: Chain, weight: fx.Node) -> fx.Node:
    return chain.hand.call(aten.slice.Tensor, weight, 0, 0, 64)


def written(chain: Chain, weight: fx.Node) -> fx.Node:
    chain.hand.call(aten.copy_.default, weight, weight)
    return weight


def functionalized(chain: Chain, weight: fx.Node) -> fx.Node:
    """Read by a call that stands for one that writes in place."""
    call = torch.ops.higher_order.auto_functionalized
    node = chain.hand.graph.call_function(call, (aten.relu_.default,), {"self": weight})
    node.meta["val"] = (weight.meta["val"],)
    return weight


def read_before(chain: Chain, weight: fx.Node) -> fx.Node:
    """Through a view of it."""
    turned = chain.hand.call(aten.t.default, weight)
    chain.row = chain.hand.call(aten.mm.default, chain.row, turned)
    return weight


REFUSED: dict[str, tuple[Callable[[Chain, fx.Node], fx.Node], dict[str, Any], str]] = {
    "computed": (computed, {}, "it is no input of the graph, but computed or a view"),
    "a view": (viewed, {}, "it is no input of the graph, but computed or a view"),
    "written": (written, {}, "may write it"),
    "functionalized": (functionalized, {}, "may write it"),
    "read before": (read_before, {}, "it has been read before"),
    "another group": (
        lambda _, w: w, {"split": 64, "group": "ep"}, "its rows are split over 'ep', not over 'tp'"
    ),
    "no fixed size": (lambda _, w: w, {"bytes": 0}, "its size is not fixed, or it is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_left_out_and_named(name: str) -> None:
    change, more, why = REFUSED[name]
    chain = Chain()
    weight, other = chain.weight("weight"), chain.weight("other")
    weight = change(chain, weight)
    site = chain.site(LIMITS)
    chain.reader(weight, **more)
    chain.reader(other)
    assert names(chain.plan()[0]) == ["other"]  # the control
    (note,) = site.notes[1:]
    assert why in note


def test_a_strided_weight_and_one_behind_the_op_are_left_out() -> None:
    chain = Chain()
    turned = chain.hand.given("turned", chain.weight("plain").meta["val"].t())
    site = chain.site(LIMITS)
    late = chain.hand.input("late", 64, 64)
    chain.reader(turned)
    chain.reader(late)
    assert names(chain.plan()[0]) == []
    assert [n.split(": ")[1] for n in site.notes] == [
        "its size is not fixed, or it is not contiguous", "it stands behind the op in the graph"
    ]  # fmt: skip
    assert site.kernel is not None
    assert site.kernel.launches == 2


def test_a_weight_on_another_device_is_left_out() -> None:
    chain = Chain()
    with chain.hand.mode:
        elsewhere = chain.hand.given("elsewhere", torch.empty(64, 64, device="cuda"))
    site = chain.site(LIMITS)
    chain.site(reads=[Read(elsewhere, SIZE)])
    assert names(chain.plan()[0]) == []
    assert site.notes == ("no prefetch of elsewhere: it is on another device",)


def test_a_weight_is_named_once() -> None:
    chain = Chain()
    weight = chain.weight("weight")
    chain.site(LIMITS)
    chain.reader(weight)
    chain.site(LIMITS)
    chain.reader(weight)
    assert [names(k) for k in chain.plan()] == [["weight"], [], [], []]


@pytest.mark.parametrize("wide", [False, True])
def test_not_past_ops_that_read_more_than_the_cap(wide: bool) -> None:
    chain = Chain()
    between = [chain.weight(f"b{i}") for i in range(4 + wide)]
    weight = chain.weight("weight")
    site = chain.site(LIMITS)
    for one in between:
        chain.op(one)
    chain.reader(weight)
    assert names(chain.plan()[0]) == ([] if wide else ["weight"])
    said = f"no prefetch of what reading reads: ops before it read {5 * SIZE} bytes"
    assert [n.startswith(said) for n in site.notes] == [wide]


def test_what_the_policy_leaves_out_says_so() -> None:
    chain = Chain()
    weight = chain.weight("weight")
    site = chain.site(Ahead(SIZE, 4, 1, "tp", against="the policy has no row for M = 9"))
    chain.reader(weight)
    assert names(chain.plan()[0]) == []
    assert site.notes == ("no prefetch of all weights: the policy has no row for M = 9",)

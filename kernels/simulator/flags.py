"""Order through words of memory: release and acquire, fences around relaxed accesses, atomics.

A word that was stored with `.release`, or relaxed after a fence, carries a message; who loads the
value with `.acquire`, or relaxed before a fence, learns it, provided that the scope of each side
takes in the other. An atomic keeps the messages that the word carries and adds its own. A relaxed
store of another thread, and any weak store, drops them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from k3fuse.kernels.simulator.clocks import Clocks, Stamp
from k3fuse.kernels.simulator.order import SCOPES, Order
from k3fuse.kernels.simulator.shadow import Shadow
from k3fuse.kernels.simulator.types import Array

_PHANTOMS = 64  # lanes of one store for which the message that a release would send is kept


class Part(NamedTuple):
    """A message at a scope, from a warp (its column)."""

    strength: int
    column: int
    stamp: Stamp


@dataclass
class Flag:
    """What a word carries: messages by (scope, CTA), who stored it, and how often it changed.

    `phantom` is the message that a release would have sent, with what to do, for explanations.
    """

    writer: int
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    version: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    phantom: tuple[Stamp, str] | None = None


class Flags:
    """The messages of all words, the fences of all threads, and why messages were not received."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.words: dict[tuple[int, int], Flag] = {}
        self.fences: dict[int, dict[int, Stamp]] = {}
        self.pending: dict[int, dict[tuple[int, int], Part]] = {}
        self.missed: dict[int, list[tuple[Stamp, str]]] = {}

    def fenced(self, thread: int, strength: int) -> list[tuple[int, Stamp]]:
        """What a relaxed store of a thread publishes: (scope, message) of its earlier fences."""
        found = self.fences.get(thread, {})
        return [(min(scope, strength), stamp) for scope, stamp in found.items()]

    def fence(self, threads: Array, strength: int) -> None:
        """`fence.acq_rel` or `fence.sc` of these threads (sorted) at a scope."""
        for row, members, _ in self.clocks.warps_of(threads):
            column = int(self.clocks.column[row])
            got: dict[int, tuple[Stamp, list[int]]] = {}
            for thread in members.tolist():
                for part in self.pending.pop(thread, {}).values():
                    if self._reaches(column, part.column, min(part.strength, strength)):
                        got.setdefault(id(part.stamp), (part.stamp, []))[1].append(thread)
                    else:
                        self.miss(thread, part.stamp, self._too_narrow(column, part, strength))
            for stamp, learners in got.values():
                self.clocks.learn(np.array(learners), stamp)
        for thread, stamp in zip(threads.tolist(), self.clocks.publish_each(threads), strict=True):
            known = self.fences.setdefault(thread, {})
            for scope in [scope for scope in known if scope <= strength]:
                del known[scope]
            known[strength] = stamp

    def store(self, shadow: Shadow, words: Array, threads: Array, order: Order) -> None:
        """Stores to words [n, words of one access] by threads [n]."""
        flagged = shadow.flagged is not None and bool(shadow.flagged[words].any())
        if order.strength == 0:
            if flagged:
                self._drop(shadow, words)
            return
        fenced = bool(self.fences) and any(thread in self.fences for thread in threads.tolist())
        few = len(threads) <= _PHANTOMS
        if not (order.releases or fenced or flagged or few):
            return
        stamps = self.clocks.publish_each(threads) if order.releases or few else []
        for place, thread in enumerate(threads.tolist()):
            parts: dict[tuple[int, int], Part] = {}
            if order.releases:
                self._add(parts, thread, order.strength, stamps[place])
            else:
                for strength, stamp in self.fenced(thread, order.strength):
                    self._add(parts, thread, strength, stamp)
            for word in words[place].tolist():
                self._put(shadow, word, Flag(thread, parts), stamps[place] if few else None)

    def _put(self, shadow: Shadow, word: int, flag: Flag, unsent: Stamp | None) -> None:
        key = id(shadow), word
        old = self.words.get(key)
        if not flag.parts:
            if old is not None and old.writer == flag.writer and old.parts:
                return  # a later relaxed store of the same thread still publishes its release
            if unsent is None:
                self.words.pop(key, None)
                if shadow.flagged is not None:
                    shadow.flagged[word] = False
                return
            why = "the flag is stored relaxed: use st.release, or a fence.acq_rel before it"
            flag.phantom = unsent, why
        if shadow.flagged is None:
            shadow.flagged = np.zeros(shadow.size // 4 + 4, np.bool_)
        shadow.flagged[word] = True
        flag.version = 0 if old is None else old.version + 1
        self.words[key] = flag

    def _drop(self, shadow: Shadow, words: Array) -> None:
        flagged = shadow.flagged
        if flagged is None:
            return
        for word in np.unique(words[flagged[words]]).tolist():
            self.words.pop((id(shadow), word), None)
            flagged[word] = False

    def _add(
        self, parts: dict[tuple[int, int], Part], thread: int, strength: int, stamp: Stamp
    ) -> None:
        column = int(self.clocks.column[thread >> 5])
        key = strength, self.clocks.cta[column]
        if key in parts:
            total = Stamp()
            total.join(parts[key].stamp)
            total.join(stamp)
            stamp = total
        parts[key] = Part(strength, column, stamp)

    def load(self, shadow: Shadow, words: Array, threads: Array, order: Order) -> None:
        """Strong loads of words [n, words of one access] by threads [n]."""
        if shadow.flagged is None or order.strength == 0:
            return
        lanes, place = np.nonzero(shadow.flagged[words])
        readers: dict[int, list[int]] = {}
        for lane, word in zip(lanes.tolist(), words[lanes, place].tolist(), strict=True):
            readers.setdefault(word, []).append(int(threads[lane]))
        for word, found in readers.items():
            flag = self.words[id(shadow), word]
            new = [thread for thread in found if flag.seen.get(thread) != flag.version]
            if new:
                flag.seen.update(dict.fromkeys(new, flag.version))
                self.receive(list(flag.parts.values()), np.unique(new), order, flag.phantom)

    def receive(
        self,
        parts: list[Part],
        threads: Array,
        order: Order,
        phantom: tuple[Stamp, str] | None = None,
    ) -> None:
        """Let threads (sorted) take messages with an acquire, or keep them for their next fence."""
        for row, members, _ in self.clocks.warps_of(threads):
            column = int(self.clocks.column[row])
            for part in parts:
                scope = min(part.strength, order.strength)
                if not self._reaches(column, part.column, scope):
                    why = self._too_narrow(column, part, order.strength)
                    for thread in members.tolist():
                        self.miss(thread, part.stamp, why)
                elif order.acquires:
                    self.clocks.learn(members, part.stamp)
                else:
                    key = scope, self.clocks.cta[part.column]
                    for thread in members.tolist():
                        self.pending.setdefault(thread, {})[key] = part._replace(strength=scope)
            if phantom is not None:
                for thread in members.tolist():
                    self.miss(thread, *phantom)

    def update(self, shadow: Shadow, words: Array, threads: Array, order: Order) -> None:
        """Atomics on one word a lane, in lane order: receive, keep what is there, add one's own."""
        flagged = shadow.flagged is not None and bool(shadow.flagged[words].any())
        fenced = bool(self.fences) and any(thread in self.fences for thread in threads.tolist())
        few = len(threads) <= _PHANTOMS
        if not (order.releases or flagged or fenced or few):
            return
        for place, thread in enumerate(threads.tolist()):
            one = threads[place : place + 1]
            self.load(shadow, words[place : place + 1], one, order)
            unsent = self.clocks.publish_each(one)[0] if order.releases or few else None
            for word in words[place].tolist():
                old = self.words.get((id(shadow), word))
                flag = Flag(thread, dict(old.parts) if old is not None else {})
                if order.releases and unsent is not None:
                    self._add(flag.parts, thread, order.strength, unsent)
                for strength, stamp in self.fenced(thread, order.strength):
                    self._add(flag.parts, thread, strength, stamp)
                if old is not None or flag.parts or few:
                    self._put(shadow, word, flag, unsent)

    def _reaches(self, column: int, other: int, strength: int) -> bool:
        columns = np.array([column]), np.array([other]), np.array([strength])
        return bool(self.clocks.includes(*columns)[0])

    def _too_narrow(self, column: int, part: Part, strength: int) -> str:
        name = SCOPES[min(part.strength, strength)]
        return f"the flag orders at .{name} scope, {self.distance(column, part.column)}"

    def distance(self, column: int, other: int) -> str:
        """Where the other agent is, and the scope that takes it in."""
        clocks = self.clocks
        if clocks.rank[column] != clocks.rank[other]:
            return "the peer is on another rank: use .sys on both sides"
        if clocks.cluster[column] != clocks.cluster[other]:
            return "the peer is in another cluster: use .gpu on both sides"
        return "the peer is in another CTA of the cluster: use .cluster on both sides"

    def miss(self, thread: int, stamp: Stamp, why: str) -> None:
        """Remember a message that a thread did not get, and why."""
        kept = self.missed.setdefault(thread, [])
        kept.append((stamp, why))
        del kept[:-8]

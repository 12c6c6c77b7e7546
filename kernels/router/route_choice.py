"""The choice: scores, keys, the top k of them in order, weights. Imports the DSL.

Exact for any keys. A group is the experts that one lane has in all warps; the k-th greatest of the
groups' maxima is no greater than the k-th greatest key, and few keys reach it. These candidates are
ranked by counting the greater ones. Where there are too many, the warp takes the greatest key k
times.

A key is a signed integer in the order of its float; every NaN has one of its own below all floats,
the lower id before the higher, and what is no expert is below these.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3fuse.kernels.common.device import ptx, warp
from k3fuse.kernels.router.route_config import EACH, GROUPS, MAX_EXPERTS, Config, Shared
from k3fuse.kernels.router.route_scores import key, sigmoid, softmax

NOTHING = -(2**31)  # the key of no expert
RANKED = 4  # candidates of one step of the ranking


class Choice:
    """One token's choice; all threads of a CTA, four experts each."""

    def __init__(self, config: Config, given: Any, base: Any, token: Any, tid: Any) -> None:
        self.config, self.given, self.base, self.token, self.tid = config, given, base, token, tid
        self.shared = Shared(config)
        self.lane = tid % 32
        self.warp = cute.arch.make_warp_uniform(tid // 32)
        self.first = tid * Int32(EACH)
        self.bias: Any = None

    def at(self, offset: int) -> Any:
        """Address in shared memory."""
        return self.base + Int32(offset)

    @cute.jit
    def prepare(self) -> None:
        """What needs no logits: the bias of a thread's experts, an empty list of candidates."""
        config, shared = self.config, self.shared
        if cutlass.const_expr(config.bias):
            self.bias = self.load_bias()
        empty = [Int32(0), Int32(NOTHING)] * 2
        for part in cutlass.range_constexpr(config.candidates // 64):
            if self.warp == config.warps - 1:
                place = self.at(shared.found + 512 * part) + self.lane * Int32(16)
                warp.shared_store16(place, empty)
        if self.tid == 0:
            ptx.shared_store4(self.at(shared.limit), self.at(shared.found), 4)

    @cute.jit
    def load_bias(self) -> cute.Tensor:
        """Words of the bias, 0 beyond the last expert."""
        config = self.config
        words = cute.make_rmem_tensor((EACH,), Int32)
        start = self.given.bias + self.first.to(Int64) * Int64(4)
        if cutlass.const_expr(config.experts == EACH * config.threads):
            got = ptx.load16_constant(start)
            for i in cutlass.range_constexpr(EACH):
                words[i] = got[i]
        else:
            for i in cutlass.range_constexpr(EACH):
                words[i] = Int32(0)
                if self.first + i < config.experts:
                    words[i] = warp.load4_constant(start, 4 * i)
        return words

    @cute.jit
    def run(self, words: cute.Tensor) -> Int32:
        """Choose from the logits; returns 1 where this token was the last one of the call."""
        config, shared = self.config, self.shared
        logits = [words[i] for i in range(EACH)]
        scores = self.scores(logits)
        keys = self.keys(scores, logits)
        most = greatest(keys)
        ptx.shared_store4(self.at(shared.maxima) + self.tid * Int32(4), most)
        warp.shared_store16(self.at(shared.scores) + self.tid * Int32(16), scores)
        cute.arch.sync_threads()
        if self.warp == 0:
            limit = self.find_limit(most)
            if self.lane == 0:
                ptx.shared_store4(self.at(shared.limit), limit)
        cute.arch.sync_threads()
        self.collect(keys)
        cute.arch.sync_threads()
        size = ptx.shared_load4(self.at(shared.limit), 4) - self.at(shared.found)
        if size <= 8 * config.candidates:
            if self.warp == 0:
                self.rank(size)
        else:
            warp.shared_store16(self.at(shared.keys) + self.tid * Int32(16), keys)
            cute.arch.sync_threads()
            if self.warp == 0:
                self.take_greatest()
        if self.warp == 0:
            self.weigh()
        last = Int32(0)
        if cutlass.const_expr(config.plan):
            last = self.arrive()
        return last

    def scores(self, logits: list[Any]) -> list[Any]:
        """Unbiased scores; 0 for a NaN. Bits, as the logits."""
        if self.config.softmax:
            sums = self.at(self.shared.sums)
            inside = [self.first + Int32(i) < Int32(self.config.experts) for i in range(EACH)]
            return list(softmax(logits, inside, sums, self.lane, self.warp, self.config.warps))
        return [sigmoid(logit) for logit in logits]

    def keys(self, scores: list[Any], logits: list[Any]) -> list[Any]:
        """What is compared: score + bias as an integer."""
        found = []
        for i, score in enumerate(scores):
            bias = self.bias[i] if self.config.bias else None
            own = key(score, bias, logits[i], Int32(NOTHING + MAX_EXPERTS - i) - self.first)
            if self.config.experts < EACH * self.config.threads:
                inside = self.first + Int32(i) < Int32(self.config.experts)
                own = ptx.select(inside, own, Int32(NOTHING))
            found.append(own)
        return found

    def find_limit(self, most: Any) -> Any:
        """The k-th greatest of the groups' maxima, above what is no expert; the first warp."""
        maxima = self.at(self.shared.maxima)
        own = maxima + self.lane * Int32(4)
        for other in range(1, self.config.warps):
            most = warp.most_of(most, ptx.shared_load4(own, 128 * other))
        ptx.shared_store4(own, most)
        warp.sync_warp()
        enough = count_reached(maxima, most) >= Int32(self.config.top_k)
        limit = warp.most_of_warp(ptx.select(enough, most, Int32(NOTHING)))
        return warp.most_of(limit, Int32(NOTHING + 1))

    def collect(self, keys: list[Any]) -> None:
        """Put the keys that reach the limit into the list, in any order; all threads."""
        shared = self.shared
        limit = ptx.shared_load4(self.at(shared.limit))
        for i, own in enumerate(keys):
            # The place is counted on beyond the list's end, so that its length is known.
            ptx.asm(
                "{ .reg .pred p; .reg .b32 at; setp.ge.s32 p, $0, $1;"
                " @p atom.shared.add.u32 at, [$2+4], 8; @p setp.lt.s32 p, at, $3;"
                " @p st.shared.v2.b32 [at], {$4, $0}; }",
                [], own, limit, self.at(shared.limit), self.at(shared.chosen),
                Int32(-1 - i) - self.first,
            )  # fmt: skip

    @cute.jit
    def rank(self, size: Int32) -> None:
        """Count for each candidate those before it; `size` bytes of them; the first warp."""
        shared = self.shared
        steps = (size + Int32(8 * RANKED - 1)) // Int32(8 * RANKED)
        halves = (size + Int32(255)) // Int32(256)
        for half in cutlass.range(halves, unroll=1):
            mine = self.at(shared.found) + (half * Int32(32) + self.lane) * Int32(8)
            own = warp.shared_load8(mine)
            before = Int32(0)
            for step in cutlass.range(steps, unroll=1):
                place = self.at(shared.found) + step * Int32(8 * RANKED)
                before = count_greater(before, place, own)
            if mine < self.at(shared.found) + size and before < self.config.top_k:
                place = self.at(shared.chosen) + before * Int32(4)
                ptx.shared_store4(place, Int32(-1) - own.to(Int32))
        warp.sync_warp()

    @cute.jit
    def take_greatest(self) -> None:
        """Take the greatest key k times, the lowest id of equal ones; the first warp."""
        config, shared = self.config, self.shared
        for place in cutlass.range(config.top_k, unroll=1):
            best, at = Int32(NOTHING), self.lane
            for turn in cutlass.range_constexpr(EACH * config.warps):
                own = ptx.shared_load4(self.at(shared.keys + 128 * turn) + self.lane * Int32(4))
                better = own > best
                best = ptx.select(better, own, best)
                at = ptx.select(better, self.lane + Int32(32 * turn), at)
            top = warp.most_of_warp(best)
            expert = warp.least_of_warp(ptx.select(best == top, at, Int32(MAX_EXPERTS)))
            # The lane that reads this key takes it out.
            if self.lane == expert % 32:
                ptx.shared_store4(self.at(shared.chosen) + place * Int32(4), expert)
                ptx.shared_store4(self.at(shared.keys) + expert * Int32(4), Int32(NOTHING))
        warp.sync_warp()

    @cute.jit
    def weigh(self) -> None:
        """Ids and weights of the choice, a lane each; the first warp."""
        config, shared, given = self.config, self.shared, self.given
        expert, score = Int32(0), Float32(0.0)
        if self.lane < config.top_k:
            expert = ptx.shared_load4(self.at(shared.chosen) + self.lane * Int32(4))
            score = ptx.shared_load_f32(self.at(shared.scores) + expert * Int32(4))
        weight = score * ptx.as_f32(given.scale)
        if cutlass.const_expr(config.renormalize):
            total = sum_of_lanes(score, config.top_k) + ptx.as_f32(given.eps)
            weight = warp.divide(weight, total)
        if self.lane < config.top_k:
            place = (self.token * config.top_k + self.lane).to(Int64)
            ptx.store8(given.ids + place * Int64(8), [expert, Int32(0)])
            if cutlass.const_expr(config.wide):
                ptx.store4(given.weights + place * Int64(4), ptx.as_i32(weight))
            else:
                ptx.store2(given.weights + place * Int64(2), ptx.pack([weight, weight])[0])

    @cute.jit
    def arrive(self) -> Int32:
        """Count this token; 1 where it is the last of the call, whose thread sees all ids."""
        shared = self.shared
        if self.warp == 0:
            warp.sync_warp()
            if self.lane == 0:
                before = warp.count_arrival(self.given.arrivals, self.given.m - 1)
                ptx.shared_store4(self.at(shared.limit), before, 8)
        cute.arch.sync_threads()
        last = Int32(0)
        if ptx.shared_load4(self.at(shared.limit), 8) == self.given.m - 1:
            last = Int32(1)
        return last


def greatest(keys: list[Any]) -> Any:
    """The greatest of some keys."""
    most = keys[0]
    for other in keys[1:]:
        most = warp.most_of(most, other)
    return most


def sum_of_lanes(value: Any, lanes: int) -> Any:
    """The sum over the first `lanes` lanes, the others hold 0; the same bits in each of them."""
    for step in (16, 8, 4, 2, 1):
        if step < lanes:
            value = value + ptx.shuffle_xor(value, step)
    return value


def count_reached(maxima: Any, least: Any) -> Any:
    """How many of the groups' maxima in shared memory are not less than `least`."""
    code = "{ .reg .pred p; .reg .b32 n, a, b, c, d; mov.b32 n, 0;"
    for four in range(GROUPS // 4):
        code += f" ld.shared.v4.b32 {{a, b, c, d}}, [$1+{16 * four}];"
        code += "".join(f" setp.ge.s32 p, {x}, $2; @p add.s32 n, n, 1;" for x in "abcd")
    return ptx.asm(code + " mov.b32 $0, n; }", [Int32], maxima, least)


def count_greater(counted: Any, place: Any, own: Any) -> Any:
    """`counted` plus those of RANKED candidates at `place` that are greater than `own`."""
    loads = " ".join(
        f"ld.shared.v2.b64 {{a{i}, a{i + 1}}}, [$2+{8 * i}];" for i in range(0, RANKED, 2)
    )
    tests = " ".join(f"setp.gt.s64 p, a{i}, $3; @p add.s32 n, n, 1;" for i in range(RANKED))
    code = (
        "{ .reg .pred p; .reg .b32 n; .reg .b64 a<" + f"{RANKED}" + ">; mov.b32 n, $1; "
        + loads + " " + tests + " mov.b32 $0, n; }"
    )  # fmt: skip
    return ptx.asm(code, [Int32], counted, place, own)

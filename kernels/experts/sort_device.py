"""The list of entries: (token, slot) pairs sorted by expert. Imports the DSL.

Every CTA sorts all ids by counting, in its shared memory. Entries are numbered in the order of the
experts; cluster c takes number c, c + clusters, and so on. The atomics give the pairs of one expert
in any order, and the CTAs of a cluster must agree on one: so each pair counts those before it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from k3fuse.kernels.common.device import ptx
from k3fuse.kernels.experts import words
from k3fuse.kernels.experts.config import BINS, NONE, THREADS, Config

EACH = BINS // THREADS  # bins of a thread


def clear(config: Config, base: Int32, tid: Int32) -> None:
    """Empty the bins, before the ids are there."""
    place = base + Int32(config.bins) + tid * Int32(4 * EACH)
    for i in range(EACH):
        ptx.shared_store4(place, Int32(0), 4 * i)


@cute.jit
def sort(
    config: cutlass.Constexpr,
    given: cutlass.Constexpr,
    base: Int32,
    cluster: Int32,
    tid: Int32,
) -> Int32:
    """Make the list; all threads of the CTA. Returns the number of this cluster's entries."""
    pairs = given.m * Int32(config.top_k)
    experts, places = count(config, given, base, pairs, tid)
    cute.arch.sync_threads()
    entries = make_entries(config, base, cluster, tid)
    cute.arch.sync_threads()
    # Anyhow first, where the hidden rows will be.
    anyhow = base + Int32(config.hidden_rows)
    bins = base + Int32(config.bins)
    starts = []
    for turn in cutlass.range_constexpr(len(experts)):
        expert = experts[turn]
        valid = ptx.select(expert < Int32(0), Int32(0), expert)
        starts.append(ptx.shared_load4(bins + valid * Int32(4)))
        place = anyhow + (starts[turn] + places[turn]) * Int32(4)
        words.shared_store4_if(place, tid + Int32(THREADS * turn), expert)
    cute.arch.sync_threads()
    for turn in cutlass.range_constexpr(len(experts)):
        expert, pair = experts[turn], tid + Int32(THREADS * turn)
        if expert >= 0:
            end = ptx.shared_load4(bins + ptx.least(expert + Int32(1), NONE) * Int32(4))
            end = ptx.select(expert == Int32(NONE), pairs, end)
            rank = starts[turn]
            for other in cutlass.range(starts[turn], end, unroll=1):
                smaller = ptx.shared_load4(anyhow + other * Int32(4)) < pair
                rank = rank + ptx.select(smaller, Int32(1), Int32(0))
            ptx.shared_store4(base + Int32(config.order) + rank * Int32(4), pair)
    cute.arch.sync_threads()
    return entries


def count(
    config: Config, given: Any, base: Any, pairs: Any, tid: Any
) -> tuple[list[Any], list[Any]]:
    """Count the pairs of each expert. Returns this thread's experts, and how many came before."""
    size = 8 if config.wide_ids else 4
    experts = []
    for turn in range(-(-config.pairs // THREADS)):
        pair = tid + Int32(THREADS * turn)
        address = given.ids + (pair * Int32(size)).to(Int64)
        experts.append(words.load_id(address, config.wide_ids, pair, pairs, given.experts))
    bins = base + Int32(config.bins)
    return experts, [words.shared_count(bins + expert * Int32(4), expert) for expert in experts]


@cute.jit
def make_entries(config: cutlass.Constexpr, base: Int32, cluster: Int32, tid: Int32) -> Int32:
    """Turn the counts into first pairs, and store the cluster's entries; returns their number.

    Sums of pairs are in the lower half of a word, of entries in the upper one.
    """
    mine = base + Int32(config.bins) + tid * Int32(4 * EACH)
    counts = ptx.shared_load16(mine)
    numbers = []
    total = Int32(0)
    for i in cutlass.range_constexpr(EACH):
        numbers.append((counts[i] + Int32(config.tokens - 1)) // Int32(config.tokens))
        total = total + counts[i] + (numbers[i] << Int32(16))
    before = words.scan(total, tid % Int32(32))
    warp = tid // Int32(32)
    totals = base + Int32(config.totals)
    if tid % 32 == 31:
        ptx.shared_store4(totals + warp * Int32(4), before)
    cute.arch.sync_threads()
    before = before - total
    whole = Int32(0)
    for other in cutlass.range_constexpr(THREADS // 32):
        part = ptx.shared_load4(totals, 4 * other)
        whole = whole + part
        before = before + ptx.select(warp > Int32(other), part, Int32(0))
    for i in cutlass.range_constexpr(EACH):
        start = before & Int32(0xFFFF)
        ptx.shared_store4(mine, start, 4 * i)
        for turn in cutlass.range(numbers[i], unroll=1):
            number = (before >> Int32(16)) + turn
            if number % Int32(config.clusters) == cluster:
                entry = base + Int32(config.list) + number // Int32(config.clusters) * Int32(16)
                done = turn * Int32(config.tokens)
                ptx.shared_store4(entry, tid * Int32(EACH) + Int32(i))
                ptx.shared_store4(entry, start + done, 4)
                ptx.shared_store4(entry, ptx.least(counts[i] - done, config.tokens), 8)
        before = before + counts[i] + (numbers[i] << Int32(16))
    entries = whole >> Int32(16)
    return (entries - cluster + Int32(config.clusters - 1)) // Int32(config.clusters)

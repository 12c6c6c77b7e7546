"""`multimem.st`, `multimem.red` and `multimem.ld_reduce`: one access to the memories of all ranks.

With random delivery every rank receives every 4-byte word at a time of its own: one word of each
fragment lands, and the others after somebody has read it, so that a consumer that tests one word
sees the others missing. A fence of the sender delivers them all. Loads sum in float64 (16-bit ones
without `.acc::f32`: rounded after each rank); a switch adds in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from k3fuse.kernels.simulator.formats import bf16_to_f32, f32_to_bf16
from k3fuse.kernels.simulator.machine import Frame, Group, Step
from k3fuse.kernels.simulator.memory import Origin
from k3fuse.kernels.simulator.ops_atomic import apply_atomic
from k3fuse.kernels.simulator.ops_memory import take_order, take_vector
from k3fuse.kernels.simulator.translate import Site, operation
from k3fuse.kernels.simulator.types import B32, B64, Array, PtxType, bits_type


@operation("multimem", selective=True)
def multimem(site: Site) -> Step:
    """Stores, additions and combined loads at a multicast address."""
    if site.take("ld_reduce"):
        return _load_reduce(site)
    kind = site.take_type()
    name = site.take("st", "red")
    site.take("global")
    order = take_order(site, "relaxed" if name == "red" else "weak")
    adds = site.take("add") if name == "red" else None
    count = take_vector(site)
    site.done()
    if name is None or (name == "red" and adds is None) or kind.width != 32:
        raise site.unsupported("multimem form")
    if name == "red" and kind.name not in ("f32", "u32", "s32", "bf16x2"):
        raise site.unsupported("multimem.red type")
    reads = site.item_bits(1, 32)
    if len(reads) != count:
        raise site.unsupported("number of values")
    pointer = site.pointer(0, 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text, order)
        late = who.unchecked()
        address = frame.array(pointer(frame))
        members = group.memory.multicast(address, 4 * count, who)
        if order.releases:
            group.delivery.flush(group)
        values = [frame.array(read(frame)).copy() for read in reads]
        delivery, done = group.delivery, kind if adds else None
        lanes = np.arange(frame.count)
        for at, member in enumerate(members):
            if group.races is not None:
                group.races.spread(group.memory, member, 4 * count, who, adds is not None)
            if delivery.random is None and not adds:
                group.memory.store(member, 32, values, late)
                continue
            if delivery.random is None or count == 1:
                for item, value in enumerate(values):
                    place = member + np.uint64(4 * item)
                    land = _landing(group, place, value, done, late)
                    # Words of neighbouring lanes come apart as those of one lane do.
                    odd = place // np.uint64(4) % np.uint64(2) == 1
                    halves = lanes[~odd], lanes[odd]
                    delivery.send(group, [partial(land, half) for half in halves], fenced=True)
                continue
            # Neighbouring fragments, and the same fragment at neighbouring ranks, begin with
            # different words: whatever word a consumer tests, some fragment begins with it.
            start = (member // np.uint64(4 * count)).astype(np.int64) + at + delivery.turn
            table, torn = np.stack(values), []
            for step in range(count):
                word = (start + step) % count
                place = member + (4 * word).astype(np.uint64)
                value = table[word, lanes]
                torn.append((place, _landing(group, place, value, done, late)))
            delivery.tear(group, torn[0][0], [land for _, land in torn])

    return run


def _landing(
    group: Group, place: Array, value: Array, kind: PtxType | None, who: Origin
) -> Callable[[Array], None]:
    """Land the words of the lanes given: a store, or an addition of type `kind`."""

    def land(lanes: Array) -> None:
        site = who.at(who.ctas[lanes])
        if kind is None:
            group.memory.store(place[lanes], 32, [value[lanes]], site)
            return
        words = value[lanes]
        for view, chosen, index in group.memory.update(place[lanes], 32, site):
            part = slice(None) if chosen is None else chosen
            apply_atomic(view, index, "add", kind, [words[part]])

    return land


_FOLD: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def _load_reduce(site: Site) -> Step:
    """`multimem.ld_reduce`: the elements of all ranks, combined."""
    kind = site.take_type()
    site.take("global")
    order = take_order(site)
    name = site.take(*_FOLD) or ""
    wide = bool(site.take("acc::f32"))
    count = take_vector(site)
    site.done()
    known = ("f32", "bf16x2", "f16x2", "u32", "s32", "b32", "u64", "s64", "b64")
    halves = kind.name.removesuffix("x2") if kind.name.endswith("16x2") else ""
    if not name or kind.name not in known or (wide and not (halves and name == "add")):
        raise site.unsupported("multimem.ld_reduce form")
    if name in ("and", "or", "xor") and not kind.is_integer:
        raise site.unsupported("bitwise operation on floats")
    raw = bits_type(kind) if kind.is_integer else (B32 if kind.width == 32 else B64)
    writes = [site.writer(item, raw) for item in site.items(0)]
    if len(writes) != count:
        raise site.unsupported("number of results")
    pointer = site.pointer(1, 64)
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        group, who = frame.group, frame.origin(line, text, order)
        address, size = frame.array(pointer(frame)), kind.width // 8 * count
        loads = [
            group.memory.load(member, kind.width, count, who)
            for member in group.memory.multicast(address, size, who)
        ]
        for item, write in enumerate(writes):
            words = [load[item] for load in loads]
            folded = _halves(words, halves, name, wide) if halves else _whole(words, kind, name)
            write(frame, folded)

    return run


def _whole(words: list[Array], kind: PtxType, name: str) -> Array:
    dtype = np.float64 if kind.kind == "f" else kind.dtype
    total = words[0].view(kind.dtype).astype(dtype)
    for word in words[1:]:
        total = _FOLD[name](total, word.view(kind.dtype).astype(dtype))
    result: Array = total.astype(kind.dtype).view(words[0].dtype)
    return result


def _halves(words: list[Array], name_of: str, name: str, wide: bool) -> Array:
    """16-bit floats, two a word; `wide` keeps the sum exact until the one rounding at the end."""

    def numbers(word: Array) -> Array:
        codes = np.ascontiguousarray(word).view(np.uint16)
        if name_of == "bf16":
            return np.asarray(bf16_to_f32(codes), np.float64)
        return codes.view(np.float16).astype(np.float64)

    def codes_of(value: Array) -> Array:
        if name_of == "bf16":
            return np.asarray(f32_to_bf16(value.astype(np.float32)))
        return value.astype(np.float16).view(np.uint16)

    total = words[0]
    if wide:
        value = numbers(words[0])
        for word in words[1:]:
            value = _FOLD[name](value, numbers(word))
        total = codes_of(value).view(np.uint32)
    else:
        for word in words[1:]:
            total = codes_of(_FOLD[name](numbers(total), numbers(word))).view(np.uint32)
    return total

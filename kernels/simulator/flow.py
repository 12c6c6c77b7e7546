"""Control flow of a kernel: basic blocks, what ends them, and which registers live across them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from k3fuse.kernels.simulator.errors import UnsupportedPtxError
from k3fuse.kernels.simulator.syntax import (
    Address,
    Constant,
    Entry,
    Instruction,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

EXIT = -1
_NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bra",
        "bar",
        "barrier",
        "ret",
        "exit",
        "trap",
        "fence",
        "membar",
        "prefetch",
        "prefetchu",
        "nanosleep",
        "cp",
        "discard",
        "griddepcontrol",
        "applypriority",
        "setmaxnreg",
    ]
)
_NO_RESULT_PREFIXES = (
    "multimem.st",
    "multimem.red",
    "mbarrier.init",
    "mbarrier.inval",
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    "tcgen05.dealloc",
)
_JUMPS = ("bra", "ret", "exit")
_WARP_WIDE = ("shfl", "vote", "redux", "match", "elect", "mma", "ldmatrix", "stmatrix", "movmatrix")
# Their last operand names the lanes that take part; the others take all lanes of a warp.
MASKED = ("shfl", "vote", "redux", "match", "elect", "bar")
ALL_LANES = Constant(0xFFFFFFFF)


@dataclass
class Block:
    """A run of instructions entered only at its top.

    `end` says what follows: "next", "jump", "exit", "bar", "cluster_wait" or "grid_wait"; `last` is
    the instruction that does it. `uses` must be read on entry; `keeps` are written here and read
    later.
    """

    first: int
    body: list[Instruction]
    end: str = "next"
    last: Instruction | None = None
    target: int = EXIT
    warp_wide: bool = False
    uses: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    successors: list[int] = field(default_factory=list)


def registers(operand: Operand | None) -> Iterable[str]:
    """The register names inside an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        yield from registers(operand.base)
        for item in operand.coordinates:
            yield from registers(item)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written (rather than read)."""
    if instruction.parts[0] in _NO_RESULT or instruction.opcode.startswith(_NO_RESULT_PREFIXES):
        return False
    return bool(instruction.operands) and not isinstance(instruction.operands[0], Address)


def results(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    return list(registers(instruction.operands[0])) if has_result(instruction) else []


def reads(instruction: Instruction) -> set[str]:
    """The registers that it reads; a guarded result keeps its old value, so that is read too."""
    names: set[str] = set()
    start = 1 if has_result(instruction) else 0
    for operand in instruction.operands[start:]:
        names.update(registers(operand))
    if instruction.guard is not None:
        names.add(instruction.guard.name)
        names.update(results(instruction))
    return names


def is_warp_wide(instruction: Instruction) -> bool:
    """Whether the lanes of a warp must meet at this instruction."""
    parts = instruction.parts
    if parts[0] == "tcgen05":
        return "sync" in parts
    return parts[0] in _WARP_WIDE or instruction.opcode == "bar.warp.sync"


def lanes_of(instruction: Instruction) -> Operand:
    """The member mask of a warp-wide instruction; all lanes where it has no such operand."""
    if instruction.parts[0] in MASKED:
        mask = instruction.operands[-1]
        whole = isinstance(mask, Constant) and mask.value & ALL_LANES.value == ALL_LANES.value
        if mask is not None and not whole:
            return mask
    return ALL_LANES


def stop_of(instruction: Instruction) -> str | None:
    """How this instruction ends a block, or None when it does not."""
    parts = instruction.parts
    if parts[0] in _JUMPS:
        return "jump" if parts[0] == "bra" else "exit"
    if parts[:3] == ("barrier", "cluster", "wait"):
        return "cluster_wait"
    if parts[:2] == ("griddepcontrol", "wait"):
        return "grid_wait"
    if parts[0] in ("bar", "barrier") and "sync" in parts and "warp" not in parts:
        return "bar"
    return None


def blocks_of(entry: Entry) -> list[Block]:
    """Cut the code of an entry into basic blocks, in the order of the text."""
    code = entry.instructions
    cuts = {0, *entry.labels.values()}
    met: Operand | None = None  # the lanes that the last warp-wide instruction of this run named
    for place, instruction in enumerate(code):
        if place in cuts:
            met = None
        if stop_of(instruction):
            cuts.add(place + 1)
        elif is_warp_wide(instruction):
            # The same lanes as before are still together; others have to be waited for.
            if lanes_of(instruction) != met:
                cuts.add(place)
            met = lanes_of(instruction)
    starts = sorted(cut for cut in cuts if cut < len(code))
    index = {start: number for number, start in enumerate(starts)}
    blocks = []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        block = Block(start, code[start:stop])
        block.warp_wide = is_warp_wide(code[start])
        blocks.append(block)
    for number, block in enumerate(blocks):
        _connect(entry, block, number, len(blocks), index)
    _liveness(blocks)
    return blocks


def _connect(entry: Entry, block: Block, number: int, total: int, index: dict[int, int]) -> None:
    following = number + 1 if number + 1 < total else EXIT
    last = block.body[-1]
    kind = stop_of(last)
    if kind is None:
        block.successors = [following]
        return
    block.end, block.last = kind, block.body.pop()
    if kind == "jump":
        label = last.operands[0]
        if not isinstance(label, Symbol) or label.name not in entry.labels:
            raise UnsupportedPtxError(last.text, last.line, "branch target")
        block.target = index.get(entry.labels[label.name], EXIT)
        block.successors = [block.target] + ([following] if last.guard else [])
    elif kind == "exit":
        block.successors = [EXIT] + ([following] if last.guard else [])
    else:
        block.successors = [following]


def _liveness(blocks: list[Block]) -> None:
    uses: list[set[str]] = []
    writes: list[set[str]] = []
    for block in blocks:
        used: set[str] = set()
        written: set[str] = set()
        for instruction in [*block.body, *([block.last] if block.last else [])]:
            used |= reads(instruction) - written
            written.update(results(instruction))
        uses.append(used)
        writes.append(written)
    live_in = [set(used) for used in uses]
    live_out: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            after: set[str] = set()
            for successor in blocks[number].successors:
                if successor != EXIT:
                    after |= live_in[successor]
            before = uses[number] | (after - writes[number])
            if after != live_out[number] or before != live_in[number]:
                live_out[number], live_in[number] = after, before
                changed = True
    for block, used, written, after in zip(blocks, uses, writes, live_out, strict=True):
        block.uses = frozenset(used)
        block.keeps = frozenset(written & after)

"""Translation of a parsed entry to a program: one Python closure for each PTX instruction.

An instruction family registers a builder with `@operation("add", ...)`. The builder takes the
modifiers that it models from the opcode; whatever it leaves makes the instruction unsupported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from k3fuse.kernels.simulator.errors import BarrierError, SimulationError, UnsupportedPtxError
from k3fuse.kernels.simulator.flow import MASKED, blocks_of, reads, results
from k3fuse.kernels.simulator.formats import bf16_to_f32, f32_to_bf16
from k3fuse.kernels.simulator.machine import WARP, Code, Frame, Program, Step
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
from k3fuse.kernels.simulator.types import UNSIGNED, PtxType, Value, is_scalar, parse_type

Reader = Callable[[Frame], Value]
Writer = Callable[[Frame, Value], None]
Builder = Callable[["Site"], Step]
BUILDERS: dict[str, Builder] = {}
SELECTIVE: set[str] = set()
# Parameter i lies at i << PARAMETER_SHIFT of parameter space; a kernel has at most 32 KiB of them.
PARAMETER_SHIFT = 16


def operation(*names: str, selective: bool = False) -> Callable[[Builder], Builder]:
    """Register the builder of the opcodes that start with one of `names`.

    `selective` instructions have effects beyond their result: under a guard they run for the
    guarded lanes alone, where the others are computed for all lanes and merged.
    """

    def register(builder: Builder) -> Builder:
        for name in names:
            BUILDERS[name] = builder
            if selective:
                SELECTIVE.add(name)
        return builder

    return register


class Site:
    """One instruction under translation: operands as readers and writers, modifiers to be taken."""

    def __init__(self, instruction: Instruction, names: Names) -> None:
        self.instruction, self.names = instruction, names
        self.left = list(instruction.parts[1:])

    def unsupported(self, why: str) -> UnsupportedPtxError:
        """The error that says what is not modelled."""
        return UnsupportedPtxError(self.instruction.text, self.instruction.line, why)

    def take(self, *choices: str) -> str | None:
        """Take the first modifier that is one of `choices`."""
        for part in self.left:
            if part in choices:
                self.left.remove(part)
                return part
        return None

    def take_type(self) -> PtxType:
        """Take the last modifier, which must be a type."""
        kind = parse_type(self.left[-1]) if self.left else None
        if kind is None:
            raise self.unsupported("no known type")
        self.left.pop()
        return kind

    def done(self) -> None:
        """Raise when a modifier is left that nobody took."""
        if self.left:
            raise self.unsupported(f"modifier .{self.left[0]}")

    @property
    def count(self) -> int:
        """The number of operands."""
        return len(self.instruction.operands)

    def operand(self, place: int) -> Operand | None:
        """Operand `place`; an error when there are fewer."""
        if place >= self.count:
            raise self.unsupported(f"operand {place + 1} is missing")
        return self.instruction.operands[place]

    def bits(self, place: int, width: int) -> Reader:
        """Reader of the raw bits of an operand at a width (1 for a predicate)."""
        return self.names.reader(self.operand(place), width, self)

    def value(self, place: int, kind: PtxType) -> Reader:
        """Reader of an operand as numbers: bf16 as float32, the rest as the type's dtype."""
        return self.typed(self.bits(place, kind.width), kind)

    def typed(self, raw: Reader, kind: PtxType) -> Reader:
        """Wrap a reader of bits so that it gives numbers."""
        if kind.kind == "bf":
            return lambda frame: bf16_to_f32(raw(frame))
        if kind.dtype is kind.bits:
            return raw
        dtype = kind.dtype
        return lambda frame: raw(frame).view(dtype)

    def items(self, place: int) -> tuple[Operand | None, ...]:
        """The items of a vector operand; a single operand is a vector of one."""
        operand = self.operand(place)
        return operand.items if isinstance(operand, Vector) else (operand,)

    def item_bits(self, place: int, width: int) -> list[Reader]:
        """Readers of all items of a vector operand."""
        return [self.names.reader(item, width, self) for item in self.items(place)]

    def result(self, kind: PtxType, place: int = 0) -> Writer:
        """Writer of the result of a type; numbers in, as `value` gives them."""
        return self.writer(self.operand(place), kind)

    def writer(self, operand: Operand | None, kind: PtxType) -> Writer:
        """Writer of a register; a wider register is sign or zero extended."""
        if operand is None:
            return lambda frame, value: None
        if not isinstance(operand, Register):
            raise self.unsupported("the result is no register")
        slot, width = self.names.slots[operand.name], self.names.widths[operand.name]
        if kind.kind == "bf":
            return _extended(lambda value: f32_to_bf16(value), slot, 16, width)
        if kind.kind == "pred" or kind.width == width:
            bits = kind.bits
            if kind.dtype is bits:
                return lambda frame, value: frame.env.__setitem__(slot, value)
            return lambda frame, value: frame.env.__setitem__(slot, value.view(bits))
        if width < kind.width:
            raise self.unsupported(f"{operand.name} is narrower than .{kind.name}")
        if kind.kind == "s":
            signed = np.dtype(f"i{width // 8}").type
            unsigned = UNSIGNED[width]
            return lambda frame, value: frame.env.__setitem__(
                slot, value.astype(signed).view(unsigned)
            )
        return _extended(lambda value: value.view(kind.bits), slot, kind.width, width)

    def pair(self) -> tuple[Operand | None, Operand | None]:
        """The two results of `d|p`; a lone operand has no second."""
        operand = self.operand(0)
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    def address(self, place: int) -> tuple[Operand, int]:
        """Base operand and byte offset of an address operand."""
        operand = self.operand(place)
        if not isinstance(operand, Address):
            raise self.unsupported(f"operand {place + 1} is no address")
        return operand.base, operand.offset

    def pointer(self, place: int, width: int) -> Reader:
        """Reader of an address operand, offset added, as 32 or 64-bit unsigned."""
        base, offset = self.address(place)
        if isinstance(base, Register) and self.names.widths[base.name] == 64:
            whole = self.names.reader(base, 64, self)
            shift = np.uint64(offset & (2**64 - 1))
            if width == 64:
                return (lambda frame: whole(frame) + shift) if offset else whole
            return lambda frame: (whole(frame) + shift).astype(np.uint32)
        raw = self.names.reader(base, width, self)
        if not offset:
            return raw
        plus = UNSIGNED[width](offset & (2**width - 1))
        return lambda frame: raw(frame) + plus


def _extended(convert: Callable[[Value], Value], slot: int, narrow: int, width: int) -> Writer:
    if narrow == width:
        return lambda frame, value: frame.env.__setitem__(slot, convert(value))
    dtype = UNSIGNED[width]
    return lambda frame, value: frame.env.__setitem__(slot, convert(value).astype(dtype))


class Names:
    """What the names of an entry mean: register slots, shared and local arrays, parameters."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.slots = {name: slot for slot, name in enumerate(entry.registers)}
        self.widths = entry.registers
        self.parameters = {item.name: item for item in entry.parameters}

    def reader(self, operand: Operand | None, width: int, site: Site) -> Reader:
        """Reader of an operand as raw bits of `width`."""
        if isinstance(operand, Register):
            return self._register(operand, width, site)
        if isinstance(operand, Constant):
            return self._constant(operand, width, site)
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, width, site)
        raise site.unsupported("operand")

    def _register(self, operand: Register, width: int, site: Site) -> Reader:
        slot, held = self.slots[operand.name], self.widths[operand.name]
        line, text = site.instruction.line, site.instruction.text

        def missing() -> SimulationError:
            return SimulationError(
                f"line {line}: {operand.name} is read before it is written in `{text}`"
            )

        def plain(frame: Frame) -> Value:
            value = frame.env[slot]
            if value is None:
                raise missing()
            return value

        if operand.negated:
            return lambda frame: ~plain(frame)
        if held == width:
            return plain
        if 1 in (held, width) or width > held:
            raise site.unsupported(f"{operand.name} has {held} bits, {width} are read")
        dtype = UNSIGNED[width]
        return lambda frame: plain(frame).astype(dtype)

    def _constant(self, operand: Constant, width: int, site: Site) -> Reader:
        if operand.float_bits and operand.float_bits != width:
            raise site.unsupported("float constant of another width")
        if width == 1:
            flag = np.bool_(operand.value != 0)
            return lambda frame: flag
        value = UNSIGNED[width](operand.value & (2**width - 1))
        return lambda frame: value

    def _symbol(self, name: str, width: int, site: Site) -> Reader:
        if name in self.entry.shared:
            start = UNSIGNED[width](self.entry.shared[name].offset)
            return lambda frame: start
        if name in self.entry.local:
            start = UNSIGNED[width](self.entry.local[name].offset)
            return lambda frame: start
        if name in self.parameters:
            place = UNSIGNED[width](list(self.parameters).index(name) << PARAMETER_SHIFT)
            return lambda frame: place
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo", "%clock_hi"):
            dtype = UNSIGNED[width]
            return lambda frame: dtype(frame.group.round * 1000 & (2**width - 1))
        return self._special(name, width, site)

    def _special(self, name: str, width: int, site: Site) -> Reader:
        if name not in SPECIAL:
            raise site.unsupported(f"name {name}")
        dtype = UNSIGNED[width]

        def read(frame: Frame) -> Value:
            value = frame.group.special[name]
            if not is_scalar(value):
                value = value if frame.full else value[frame.lanes]
            return value.astype(dtype)

        return read


SPECIAL = frozenset(
    f"%{name}.{axis}"
    for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
                 "cluster_nctaid")
    for axis in "xyz"
) | {"%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"} | {
    f"%lanemask_{name}" for name in ("eq", "lt", "le", "gt", "ge")
}  # fmt: skip


def translate(entry: Entry) -> Program:
    """Translate an entry; raises UnsupportedPtxError for the first instruction not modelled."""
    names = Names(entry)
    codes = []
    for block in blocks_of(entry):
        steps = [_step(instruction, names) for instruction in block.body]
        uses = sorted(names.slots[name] for name in block.uses)
        keeps = sorted(names.slots[name] for name in block.keeps)
        code = Code(block, steps, uses, keeps)
        code.issued = len(block.body) + (block.last is not None)
        if block.last is not None:
            site = Site(block.last, names)
            if block.last.guard is not None:
                code.condition = names.reader(block.last.guard, 1, site)
            if block.end == "bar":
                code.arguments = [site.bits(place, 32) for place in range(site.count)]
            _check_end(site, block.end)
        if block.warp_wide:
            code.mask = _members(block.body[0], names)
        codes.append(code)
    widths = [names.widths[name] for name in names.slots]
    return Program(codes, widths, entry.shared_bytes, entry.local_bytes)


def _check_end(site: Site, end: str) -> None:
    """Take the modifiers that a block-ending instruction may have."""
    known = {
        "jump": ("uni",),
        "exit": ("uni",),
        "bar": ("sync", "cta", "aligned"),
        "cluster_wait": ("cluster", "wait", "acquire", "aligned"),
        "grid_wait": ("wait",),
    }[end]
    while site.take(*known):
        pass
    site.done()


def _members(instruction: Instruction, names: Names) -> Reader | None:
    """Reader of the member mask of a warp-wide instruction; None when all lanes must take part."""
    site = Site(instruction, names)
    if instruction.parts[0] in MASKED:
        return site.bits(site.count - 1, 32)
    return None


def _step(instruction: Instruction, names: Names) -> Step:
    builder = BUILDERS.get(instruction.parts[0])
    site = Site(instruction, names)
    if builder is None:
        raise site.unsupported("no such operation is modelled")
    step = builder(site)
    if instruction.guard is None:
        return step
    guard = names.reader(instruction.guard, 1, site)
    written = [names.slots[name] for name in results(instruction)]
    widths = [names.widths[name] for name in results(instruction)]
    if instruction.parts[0] in MASKED:
        step = _all_named(step, _members(instruction, names), site)
    if instruction.parts[0] in SELECTIVE:
        needed = sorted({names.slots[name] for name in reads(instruction)})
        return _selected(step, guard, needed, written, widths)
    return _blended(step, guard, written, widths)


def _all_named(step: Step, members: Reader | None, site: Site) -> Step:
    """`step` where a guard holds; raises BarrierError if it holds back a lane that is named."""
    line, text = site.instruction.line, site.instruction.text

    def run(frame: Frame) -> None:
        if members is not None and not frame.full:
            group, lanes = frame.group, frame.lanes
            active = np.zeros(group.size, np.bool_)
            active[lanes] = True
            warps = lanes // WARP
            missing = (group.alive & ~active).reshape(-1, WARP)[warps]
            named = frame.array(members(frame))[:, None] >> np.arange(WARP, dtype=np.uint32) & 1
            bad = (missing & (named != 0)).any(axis=1)
            if bad.any():
                where = frame.origin(line, text).where(int(np.flatnonzero(bad)[0]))
                raise BarrierError(f"{site.instruction.parts[0]} names a lane held back: {where}")
        step(frame)

    return run


def _selected(
    step: Step, guard: Reader, needed: list[int], written: list[int], widths: list[int]
) -> Step:
    def run(frame: Frame) -> None:
        mask = frame.array(guard(frame))
        if mask.all():
            step(frame)
        elif mask.any():
            inner = frame.narrow(mask, needed)
            step(inner)
            frame.widen(inner, mask, written, widths)

    return run


def _blended(step: Step, guard: Reader, written: list[int], widths: list[int]) -> Step:
    def run(frame: Frame) -> None:
        mask = guard(frame)
        if np.all(mask):
            step(frame)
        elif np.any(mask):
            olds: list[Any] = [frame.env[slot] for slot in written]
            step(frame)
            for slot, old, width in zip(written, olds, widths, strict=True):
                zero = np.bool_(0) if width == 1 else UNSIGNED[width](0)
                new = frame.env[slot]
                frame.env[slot] = np.where(mask, new, zero if old is None else old)

    return run

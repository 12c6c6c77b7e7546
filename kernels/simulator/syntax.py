"""What the parser makes of a PTX text: operands, instructions, variables, entries, modules."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    """A register operand; `negated` is the `!p` of a predicate."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Constant:
    """An immediate: an integer, or the raw bits of a 32 or 64-bit float."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A name that is no register: a special register, parameter, label or array."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, offset in bytes; `[base, {c0, c1, ...}]` of a tensor copy."""

    base: Operand
    offset: int
    coordinates: tuple[Operand | None, ...] = ()


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`; an item is None where the text has `_`."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`, the two results of setp, shfl and elect; None where the text has `_`."""

    first: Operand | None
    second: Operand | None


Operand = Register | Constant | Symbol | Address | Vector | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction: opcode split at its dots, operands, guard predicate and source line."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    guard: Register | None
    line: int
    text: str


@dataclass(frozen=True)
class Variable:
    """A parameter, shared or local array: bytes, alignment, and its offset in its space."""

    name: str
    size: int
    align: int
    offset: int
    type_name: str


@dataclass
class Entry:
    """One `.entry`: its parameters, arrays, registers (name -> width, 1 for predicates) and code.

    `labels` maps a label to the index of the instruction that follows it.
    """

    name: str
    line: int
    parameters: list[Variable] = field(default_factory=list)
    block: tuple[int, int, int] | None = None
    shared: dict[str, Variable] = field(default_factory=dict)
    shared_bytes: int = 0
    local: dict[str, Variable] = field(default_factory=dict)
    local_bytes: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Module:
    """The kernels of one PTX text."""

    entries: dict[str, Entry]

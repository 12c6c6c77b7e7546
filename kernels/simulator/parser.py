"""PTX text -> a typed module: kernels, parameters, arrays, registers and instructions.

The grammar read here is the one that NVVM and the inline assembly of CuTe DSL emit: one statement
ends with `;`, `{ }` opens a scope with its own registers and labels, `//` and `/* */` are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from k3fuse.kernels.simulator.errors import PtxSyntaxError, UnsupportedPtxError
from k3fuse.kernels.simulator.syntax import (
    Address,
    Constant,
    Entry,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)
from k3fuse.kernels.simulator.types import parse_type

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(r"[{};]|[^{};]+")
_LABEL = re.compile(r"\s*([%$\w]+)\s*:(?!:)")
_VARIABLE = re.compile(
    r"(?:\.extern\s+|\.visible\s+)?\.(shared|local|param)\s+(?:\.align\s+(\d+)\s+)?"
    r"(?:\.ptr\s+)?\.(\w+)\s+(?:\.ptr(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?\s+)?([%$\w]+)\s*"
    r"(\[\s*\d*\s*\])?$"
)
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([%$\w]+)\s*(?:\((.*?)\))?(.*)$", re.S)
_IGNORED = (".pragma", ".loc", ".file", ".section")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_PREAMBLE = re.compile(r"\.(version|target|address_size)\b[^\n]*")
_SHARED_BASE = 1024  # the first KiB of shared memory belongs to the system on sm_90 and later


@dataclass
class _Scope:
    number: int = 0
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def _variable(text: str, line: int, offset: int) -> tuple[str, Variable]:
    match = _VARIABLE.match(text.strip())
    if match is None:
        raise PtxSyntaxError(f"line {line}: cannot read the declaration `{text.strip()}`")
    space, align, kind, name, count = match.groups()
    element = parse_type(kind)
    if element is None:
        raise UnsupportedPtxError(text.strip(), line, f"type .{kind}")
    width = max(1, element.width // 8)
    items = int(count.strip("[] ") or 0) if count else 1
    alignment = int(align) if align else width
    start = -(-offset // alignment) * alignment
    return space, Variable(name, width * items, alignment, start, kind)


def split_operands(text: str) -> Iterator[str]:
    """The comma-separated operands of an instruction, commas inside brackets kept."""
    depth = start = 0
    for place, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


class _Body:
    """Reads the statements between the outer braces of one entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.scopes = [_Scope()]
        self.opened = 0
        self.pending: list[tuple[str, int, list[_Scope]]] = []

    def open(self) -> None:
        """Enter a scope."""
        self.opened += 1
        self.scopes.append(_Scope(self.opened))

    def close(self) -> bool:
        """Leave a scope; True when it was the outermost one, which ends the entry."""
        self.scopes.pop()
        if not self.scopes:
            self.finish()
        return not self.scopes

    def unique(self, name: str) -> str:
        """The name, marked with its scope when that is not the outermost."""
        number = self.scopes[-1].number
        return f"{name}@{number}" if number else name

    def label(self, name: str, line: int) -> None:
        """Note a label at the next instruction."""
        unique = self.unique(name)
        if unique in self.entry.labels:
            raise PtxSyntaxError(f"line {line}: label {name} is defined twice")
        self.scopes[-1].labels[name] = unique
        self.entry.labels[unique] = len(self.pending)

    def statement(self, text: str, line: int) -> None:
        """Read one statement; instructions are resolved in `finish`."""
        if text.startswith(".reg"):
            self.declare(text, line)
        elif text.startswith((".shared", ".local")):
            add_array(self.entry, text, line)
        elif text.startswith("."):
            if not text.startswith(_IGNORED):
                raise UnsupportedPtxError(text, line, "directive")
        else:
            self.pending.append((text, line, list(self.scopes)))

    def declare(self, text: str, line: int) -> None:
        """Read a `.reg` declaration."""
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S)
        kind = parse_type(match[1]) if match else None
        if match is None or kind is None:
            raise UnsupportedPtxError(text, line, "register type")
        for item in match[2].split(","):
            many = re.match(r"\s*(%?[\w$]+)<(\d+)>\s*$", item)
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [item.strip()]
            for name in names:
                unique = self.unique(name)
                self.scopes[-1].registers[name] = unique
                self.entry.registers[unique] = kind.width

    def finish(self) -> None:
        """Resolve the names of all instructions, now that all labels are known."""
        for text, line, scopes in self.pending:
            self.entry.instructions.append(_Reader(text, line, scopes).instruction())


class _Reader:
    """Reads one instruction with the names that its scopes declare."""

    def __init__(self, text: str, line: int, scopes: list[_Scope]) -> None:
        self.text, self.line, self.scopes = text, line, scopes

    def instruction(self) -> Instruction:
        """The instruction of the statement."""
        rest, guard = self.text, None
        match = re.match(r"@(!?)\s*([%$\w]+)\s+(.*)$", rest, re.S)
        if match:
            name = self.register(match[2])
            if name is None:
                raise PtxSyntaxError(f"line {self.line}: unknown guard {match[2]}")
            guard, rest = Register(name, match[1] == "!"), match[3]
        match = re.match(r"([\w.:]+)\s*(.*)$", rest, re.S)
        if match is None:
            raise PtxSyntaxError(f"line {self.line}: cannot read `{self.text}`")
        operands = tuple(self.operand(item) for item in split_operands(match[2]))
        parts = tuple(match[1].split("."))
        return Instruction(match[1], parts, operands, guard, self.line, self.text)

    def register(self, name: str) -> str | None:
        """The unique name of a register, or None when it is none."""
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
        return None

    def operand(self, text: str) -> Operand | None:
        """One operand; None for the sink `_`."""
        text = text.strip()
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self.operand(item) for item in split_operands(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1].strip())
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first), self.operand(second))
        negated = text.startswith("!")
        name = self.register(text.lstrip("!"))
        if name is not None:
            return Register(name, negated)
        return self.constant(text) or self.symbol(text)

    def constant(self, text: str) -> Constant | None:
        """An immediate, or None when the text is none."""
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Constant(int(text[2:], 16), 32)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Constant(int(text[2:], 16), 64)
        if _INTEGER.match(text):
            return Constant(_integer(text))
        return None

    def symbol(self, text: str) -> Symbol:
        """A label or another name."""
        if not re.match(r"[%$\w.]+$", text):
            raise PtxSyntaxError(f"line {self.line}: cannot read operand `{text}`")
        for scope in reversed(self.scopes):
            if text in scope.labels:
                return Symbol(scope.labels[text])
        return Symbol(text)

    def address(self, text: str) -> Address:
        """The inside of `[...]`."""
        tile = re.match(r"([%$\w]+)\s*,\s*(\{[^{}]*\})$", text)
        if tile:
            map_, items = self.operand(tile[1]), self.operand(tile[2])
            if isinstance(map_, Register) and isinstance(items, Vector):
                return Address(map_, 0, items.items)
        if "{" in text or "," in text:
            raise UnsupportedPtxError(self.text, self.line, f"address [{text}]")
        match = re.match(r"(.+?)\s*\+\s*(-?\w+)$", text)
        base, offset = (match[1], _integer(match[2])) if match else (text, 0)
        operand = self.operand(base)
        if operand is None or isinstance(operand, (Address, Vector, Pair)):
            raise UnsupportedPtxError(self.text, self.line, f"address [{text}]")
        return Address(operand, offset)


def _integer(text: str) -> int:
    text = text.rstrip("U")
    if re.match(r"-?0\d+$", text):
        return int(text, 8)
    return int(text, 0)


def add_array(entry: Entry, text: str, line: int) -> None:
    """Add a `.shared` or `.local` declaration to `entry`."""
    shared = ".shared" in text.split()
    space, variable = _variable(text, line, entry.shared_bytes if shared else entry.local_bytes)
    if space == "shared":
        entry.shared[variable.name] = variable
        entry.shared_bytes = variable.offset + variable.size
    else:
        entry.local[variable.name] = variable
        entry.local_bytes = variable.offset + variable.size


def _header(text: str, line: int) -> Entry:
    match = _ENTRY.search(text)
    if match is None:
        raise UnsupportedPtxError(
            " ".join(text.split())[:80], line, "only .entry functions are read"
        )
    entry = Entry(match[1], line, shared_bytes=_SHARED_BASE)
    offset = 0
    for item in split_operands(match[2] or ""):
        _, variable = _variable(item, line, offset)
        entry.parameters.append(variable)
        offset = variable.offset + variable.size
    block = re.search(r"\.reqntid\s+([\d\s,]+)", match[3])
    if block:
        sizes = [int(item) for item in block[1].split(",")] + [1, 1]
        entry.block = (sizes[0], sizes[1], sizes[2])
    return entry


class _Splitter:
    """Cuts a text into statements and scopes, and hands them to the entry they belong to."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.arrays: list[tuple[str, int]] = []
        self.body: _Body | None = None
        self.depth = 0
        self.statement = ""

    def take(self, token: str, line: int) -> None:
        """Read the next token; `line` is the line on which it ends."""
        if self.body is None:
            self.outside(token, line)
        elif token == "{" and not self.statement.strip():
            self.body.open()
        elif token == "}" and not self.statement.strip() and self.depth == 0:
            if self.body.close():
                self.body = None
        elif token == ";" and self.depth == 0:
            text = self.statement.strip()
            if text:
                self.body.statement(text, line - text.count("\n"))
            self.statement = ""
        else:
            self.depth += (token == "{") - (token == "}")
            self.statement += token
            while self.depth == 0 and (match := _LABEL.match(self.statement)):
                self.body.label(match[1], line)
                self.statement = self.statement[match.end() :]

    def outside(self, token: str, line: int) -> None:
        """A token outside any kernel."""
        if token not in "{;":
            self.statement += token
            return
        text = _PREAMBLE.sub("", self.statement).strip()
        self.statement = ""
        if token == "{":
            entry = _header(text, line)
            for array, where in self.arrays:
                add_array(entry, array, where)
            self.entries[entry.name] = entry
            self.body = _Body(entry)
        elif re.match(r"(\.extern\s+|\.visible\s+)?\.shared\b", text):
            self.arrays.append((text, line))
        elif text:
            raise UnsupportedPtxError(text[:80], line, "declaration outside a kernel")


@lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """Read a PTX text.

    Raises PtxSyntaxError where it cannot be read, UnsupportedPtxError for a directive not modelled.
    """
    clean = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    splitter, line = _Splitter(), 1
    for match in _TOKEN.finditer(clean):
        line += match[0].count("\n")
        splitter.take(match[0], line)
    if splitter.body is not None:
        raise PtxSyntaxError(f"line {line}: a brace is not closed")
    if not splitter.entries:
        raise PtxSyntaxError("the text holds no .entry")
    return Module(splitter.entries)

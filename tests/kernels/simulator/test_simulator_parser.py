"""Reading PTX: declarations, scopes, operands, lines, and what cannot be read."""

from __future__ import annotations

import pytest

from k3fuse.kernels.simulator import PtxSyntaxError, UnsupportedPtxError
from k3fuse.kernels.simulator.flow import EXIT, blocks_of
from k3fuse.kernels.simulator.parser import parse
from k3fuse.kernels.simulator.syntax import Address, Constant, Entry, Pair, Register, Symbol, Vector
from ptx_text import HEAD, kernel


def entry(text: str) -> Entry:
    (only,) = parse(text).entries.values()
    return only


def test_header_and_arrays() -> None:
    text = f"""{HEAD}
// a comment with {{ braces }} ; and semicolons
.extern .shared .align 1024 .b8 dynamic[];
.shared .align 4 .b8 fixed[12];
.visible .entry k(
  .param .u32 small, /* one
  more */ .param .align 8 .b8 big[24],
  .param .u64 .ptr .global .align 16 pointer
)
.reqntid 64, 2
.minnctapersm 1
{{ .local .align 16 .b8 stack[32]; ret; }}
"""
    found = entry(text)
    assert (found.name, found.block) == ("k", (64, 2, 1))
    assert [(p.name, p.offset, p.size) for p in found.parameters] == [
        ("small", 0, 4), ("big", 8, 24), ("pointer", 32, 8),
    ]  # fmt: skip
    assert {name: item.offset for name, item in found.shared.items()} == {
        "dynamic": 1024, "fixed": 1024,
    }  # fmt: skip
    assert found.shared_bytes == 1036
    assert (found.local["stack"].size, found.local_bytes) == (32, 32)
    assert [item.opcode for item in found.instructions] == ["ret"]


def test_operands() -> None:
    body = """
  ld.global.v2.u32 {%r5, _}, [%d0+-8];
  setp.lt.s32 %p1|%p2, %r5, -3;
  @!%p1 mov.b32 %r6, 0f3F800000;
  mov.u32 %r7, 0x1F;
  selp.b32 %r8, %r6, 010, !%p2;
"""
    found = {item.text.split()[-1]: item for item in entry(kernel(body, params=1)).instructions}
    load = found["[%d0+-8]"]
    assert load.operands == (Vector((Register("%r5"), None)), Address(Register("%d0"), -8))
    assert found["-3"].operands[0] == Pair(Register("%p1"), Register("%p2"))
    assert found["-3"].operands[2] == Constant(-3)
    assert found["0f3F800000"].guard == Register("%p1", negated=True)
    assert found["0f3F800000"].operands[1] == Constant(0x3F800000, 32)
    assert found["0x1F"].operands[1] == Constant(31)
    assert found["!%p2"].operands[2:] == (Constant(8), Register("%p2", negated=True))
    lines = kernel(body, params=1).split("\n")
    assert all(item.text.split()[0] in lines[item.line - 1] for item in found.values())


def test_scopes_have_names_of_their_own() -> None:
    block = "{ .reg .b32 t; AGAIN: add.u32 t, %r0, 1; bra AGAIN; }\n"
    found = entry(kernel(block + block, params=0))
    adds = [item for item in found.instructions if item.opcode == "add.u32"]
    first, second = (item.operands[0] for item in adds)
    assert first != second
    branches = [item.operands[0] for item in found.instructions if item.opcode == "bra"]
    targets = [found.labels[label.name] for label in branches if isinstance(label, Symbol)]
    assert [found.instructions[at] for at in targets] == adds


def test_blocks_and_liveness() -> None:
    body = """
  mov.u32 %r5, 0;
LOOP:
  add.u32 %r5, %r5, %r0;
  setp.lt.u32 %p1, %r5, 9;
  @%p1 bra LOOP;
"""
    first, loop, last = blocks_of(entry(kernel(body, params=0)))
    assert (first.end, loop.end, last.end) == ("next", "jump", "exit")
    assert loop.successors == [1, 2]
    assert last.successors == [EXIT]
    assert loop.uses == {"%r5", "%r0"}
    assert {"%r5", "%r0"} <= first.keeps
    assert loop.keeps == {"%r5"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (HEAD, PtxSyntaxError, "holds no .entry"),
        (HEAD + ".visible .entry k() { ret;", PtxSyntaxError, "a brace is not closed"),
        (HEAD + ".func f() { ret; }", UnsupportedPtxError, "only .entry functions"),
        (HEAD + ".global .b8 table[4];", UnsupportedPtxError, "declaration outside a kernel"),
        (kernel("X: X: ret;"), PtxSyntaxError, "label X is defined twice"),
        (kernel("@%q7 mov.u32 %r5, 1;"), PtxSyntaxError, "unknown guard %q7"),
        (kernel(".reg .b128 %q;"), UnsupportedPtxError, "register type"),
        (kernel("mov.u32 %r5, #;"), PtxSyntaxError, "cannot read operand `#`"),
    ],
)
def test_what_cannot_be_read(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(text)

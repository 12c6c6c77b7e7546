"""Read what a cubin says about its kernels, in Python: architecture, registers, parameters.

A cubin is a little-endian 64-bit ELF file. The compiler records facts of a kernel as attributes in
the sections `.nv.info` and `.nv.info.KERNEL`: one byte of format, one of attribute, two of value or
size, then the payload. Names and numbers as printed by `cuobjdump -elf`; the tests compare with it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Dim3

_SIZED = 0x04  # format of an attribute with a payload; the others are four bytes in all
_REQNTID, _FRAME_SIZE, _KPARAM_INFO, _REGCOUNT = 0x10, 0x11, 0x17, 0x2F


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of a cubin. Sizes in bytes; parameters as (offset, size) in order.

    registers: per thread. stack: frame of a thread, spills included. static_smem: per CTA, with
    what the system reserves (1024). block: threads the kernel is fixed to, None where it is free.
    """

    name: str
    registers: int
    stack: int
    static_smem: int
    parameters: tuple[tuple[int, int], ...]
    block: Dim3 | None


@dataclass(frozen=True)
class Cubin:
    """Architecture ("sm_103a") and kernels of a cubin."""

    arch: str
    kernels: tuple[KernelFacts, ...]


def read_cubin(data: bytes) -> Cubin:
    """Parse a cubin. Raises BuildError where it is none, or truncated."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise BuildError("no cubin: it does not start like a little-endian 64-bit ELF file")
    if struct.unpack_from("<H", data, 18)[0] != 190:
        raise BuildError("no cubin: the ELF file is for another machine than CUDA")
    try:
        sections = _sections(data)
        return Cubin(_arch(data), tuple(_kernels(data, sections)))
    except (struct.error, KeyError, ValueError, IndexError) as error:
        raise BuildError(f"the cubin is damaged: {error!r}; build it again") from None


def _arch(data: bytes) -> str:
    # ABI 7 keeps the SM version in the low byte of e_flags and "arch-specific" in bit 11; ABI 8 in
    # the second byte and bit 3. Seen on cubins for sm_90(a), sm_100(a), sm_103(a), sm_120a.
    flags: int = struct.unpack_from("<I", data, 48)[0]
    if data[8] >= 8:
        return f"sm_{flags >> 8 & 0xFF}" + ("a" if flags & 0x8 else "")
    return f"sm_{flags & 0xFF}" + ("a" if flags & 0x800 else "")


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int


def _sections(data: bytes) -> dict[str, _Section]:
    programs, start = struct.unpack_from("<QQ", data, 32)
    program, programs_count, entry, count, names = struct.unpack_from("<HHHHH", data, 54)
    if programs + program * programs_count > len(data):
        raise IndexError("the program headers end beyond the file")
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * entry) for i in range(count)]
    strings = rows[names][4]
    found = [_Section(_text(data, strings + r[0]), r[4], r[5], r[6]) for r in rows]
    return {s.name: s for s in found}


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _attributes(data: bytes, section: _Section) -> list[tuple[int, bytes]]:
    found, at, end = [], section.offset, section.offset + section.size
    if end > len(data):
        raise IndexError(f"section {section.name} ends beyond the file")
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            found.append((attribute, data[at : at + value]))
            at += value
    return found


def _symbols(data: bytes, sections: dict[str, _Section]) -> list[str]:
    table, strings = sections[".symtab"], sections[".strtab"]
    return [
        _text(data, strings.offset + struct.unpack_from("<I", data, table.offset + at)[0])
        for at in range(0, table.size, 24)
    ]


def _kernels(data: bytes, sections: dict[str, _Section]) -> list[KernelFacts]:
    symbols = _symbols(data, sections)
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    for attribute, payload in _attributes(data, sections[".nv.info"]):
        if attribute in (_REGCOUNT, _FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload)
            (registers if attribute == _REGCOUNT else stack)[symbols[symbol]] = value
    prefix, found = ".nv.info.", []
    for name in (s.removeprefix(prefix) for s in sections if s.startswith(prefix)):
        parameters, block = {}, None
        for attribute, payload in _attributes(data, sections[prefix + name]):
            if attribute == _KPARAM_INFO:
                # index, ordinal, offset, then a word whose upper 14 bits are the size
                _, ordinal, offset, word = struct.unpack("<IHHI", payload)
                parameters[ordinal] = (offset, word >> 18)
            elif attribute == _REQNTID:
                x, y, z = struct.unpack("<III", payload[:12])
                block = (x, y, z)
        shared = sections.get(f".nv.shared.{name}")
        found.append(
            KernelFacts(
                name=name,
                registers=registers[name],
                stack=stack.get(name, 0),
                static_smem=shared.size if shared else 0,
                parameters=tuple(parameters[i] for i in sorted(parameters)),
                block=block,
            )
        )
    return found

"""A kernel without one of the lines that order something, or with a weaker one: one by one."""

from __future__ import annotations

import re
from dataclasses import replace

from k3fuse.kernels.build.compile import Built

# Barriers, fences, waits, and what mbarriers are told to wait for.
_ORDER = re.compile(
    r"^[^\n/]*(?:bar\.sync|bar\.arrive|bar\.warp\.sync|barrier\.cluster\.\w+|mbarrier\.\w+"
    r"|fence\.\w+|griddepcontrol\.wait)[^\n]*$",
    re.MULTILINE,
)
# What other threads rely on, and the same without it.
_STRENGTH = re.compile(r"\.(?:acquire|release|acq_rel)(?=\.(?:gpu|cluster|cta)\b)")


def sites(built: Built) -> list[tuple[str, Built]]:
    """Each line that orders something, as text, and the kernel without it."""
    return [(place.group().strip(), _changed(built, place, "")) for place in _lines(built)]


def weakened(built: Built) -> list[tuple[str, Built]]:
    """Each explicit acquire or release, as the text of its line, and the kernel with it relaxed."""
    found = []
    for place in _STRENGTH.finditer(built.ptx):
        line = built.ptx[built.ptx.rindex("\n", 0, place.start()) :].split("\n", 2)[1]
        if "barrier.cluster" not in line and "fence" not in line:
            found.append((line.strip(), _changed(built, place, ".relaxed")))
    return found


def _lines(built: Built) -> list[re.Match[str]]:
    return list(_ORDER.finditer(built.ptx))


def _changed(built: Built, place: re.Match[str], other: str) -> Built:
    return replace(built, ptx=built.ptx[: place.start()] + other + built.ptx[place.end() :])
